"""Test methods, formulas and disagreements of docs/conformance.md, and the page itself."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import formulas
import hf_rotation
import page
import pytest
import torch
import transformers
from agreements import AGREEMENTS, PUBLISHED_SCALINGS
from comparison import Pair, difference, largest_difference, ours, source
from engines import mlx_proportional
from formulas import default, ntk, proportional, yarn_attention_factor
from packaging.version import Version
from published import ALL, DEEPSEEK3, GEMMA3_FULL, LLAMA2, SMOLLM2
from transformers import AutoModelForCausalLM

import rope_patch

ROWS = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())
ENTRIES = [entry for group in page.GROUPS.values() for entry in group]
INSTALLED = Version(transformers.__version__)
OLD = Version("5.1") > INSTALLED
NEW = Version("5.23") <= INSTALLED
old_or_new = pytest.mark.skipif(not (OLD or NEW), reason="known of transformers 5.0 and from 5.23")
has_proportional = pytest.mark.skipif(
    not hf_rotation.has("proportional"), reason="transformers has no proportional"
)


# -- methods on published geometries ---------------------------------------------------------------


@pytest.mark.parametrize("model", ALL, ids=str)
def test_geometry_matches_the_published_config(model):
    config = model.config()
    assert getattr(config, "head_dim", None) in (None, model.head_dim)
    layers = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(set(layers)) if layers else 1
    if layers:
        config.layer_types = sorted(set(layers))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    chosen = {} if model.layer_type is None else {"layer_types": [model.layer_type]}
    plan = rope_patch.entry_points.check(built, "linear", factor=2, start="unscaled", **chosen)
    geometry = plan.geometries[model.layer_type]
    got = (geometry.head_dim, geometry.rotary_dim, geometry.theta, geometry.trained_length)
    assert got == (model.head_dim, model.rotary_dim, model.theta, model.trained_length)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.short)
@pytest.mark.parametrize("method", rope_patch.list_methods())
def test_method_matches_its_reference(method, model):
    # transformers computes in float32; formulas and our methods in float64.
    dynamic = method.startswith("dynamic")  # compared with transformers' default, too
    tolerance = 2e-6 if dynamic or source(method, model) == "transformers" else 1e-12
    try:
        assert largest_difference(method, model) < tolerance
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scaling", PUBLISHED_SCALINGS, ids=str)
def test_method_matches_the_published_config(scaling):
    compared_pairs = list(scaling.pairs())
    assert len(compared_pairs) == len(scaling.lengths)
    assert all(pair.difference() < 2e-6 for pair in compared_pairs)
    for name, value in scaling.model.scaling.items():  # options equal the fields of config.json
        assert scaling.options.get(name, value) == value


def test_models_scalings_and_golden_vectors_cover_what_there_is():
    assert len({model.repository for model in ALL}) >= 8
    assert len({model.name for model in ALL}) == len({model.short for model in ALL}) == len(ALL)
    assert {scaling.model.name for scaling in PUBLISHED_SCALINGS} == {
        model.name for model in ALL if model.scaling
    }
    golden = {row["method"].split(" (")[0] for row in ROWS}
    assert {m for m in rope_patch.list_methods() if source(m, ALL[0]) == "golden"} <= golden


def test_our_frequencies_do_not_depend_on_earlier_calls():
    before = ours("dynamic", LLAMA2, seq_len=2048)
    ours("dynamic", LLAMA2, seq_len=16384)
    assert before == ours("dynamic", LLAMA2, seq_len=2048)


# -- formulas that serve as references -------------------------------------------------------------


def compute_by_formula(row, at):
    """Compute a row of golden.json by the formulas."""
    method, options = row["method"].split(" (")[0], dict(row["params"])
    ratio = options.pop("seq_len", 0) / row["original_length"]
    factor = options.pop("factor", None)
    if method == "linear":
        return formulas.linear(at, factor)
    if method == "ntk":
        return formulas.ntk(at, factor)
    if method == "ntk-by-parts-2023-06":
        return formulas.by_parts_2023_06(at, factor)
    if method == "llama3":
        return formulas.llama3(at, factor, options["low_freq_factor"], options["high_freq_factor"])
    if method == "yarn":
        fast, slow = options.get("beta_fast", 32), options.get("beta_slow", 1)
        computed = formulas.yarn(at, factor, fast, slow, options.get("truncate", True))
        if "mscale" not in options:
            return computed
        of_all = formulas.yarn_attention_factor(factor, options["mscale_all_dim"])
        return computed[0], formulas.yarn_attention_factor(factor, options["mscale"]) / of_all
    if method == "longrope":
        stretch = options["long_factor" if ratio > 1 else "short_factor"]
        return formulas.longrope(at, factor, stretch)
    if method == "dynamic-ntk-by-parts-2023-06":
        return formulas.by_parts_2023_06(at, ratio) if ratio > 1 else formulas.default(at)
    if method == "dynamic-yarn":
        return formulas.yarn(at, ratio) if ratio > 1 else formulas.default(at)
    if method == "dynamic-ntk":
        grown = factor * ratio - (factor - 1)
        return formulas.ntk(at, grown) if ratio > 1 else formulas.default(at)
    assert method == "proportional"
    return formulas.proportional(at, options["partial_rotary_factor"])


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_formulas_match_the_golden_vectors(number):
    row = ROWS[number]
    at = SimpleNamespace(
        rotary_dim=row["head_dim"],
        theta=row["rope_theta"],
        trained_length=row["original_length"],
    )
    computed = compute_by_formula(row, at)
    assert difference(row["inv_freq"], computed[0]) < 2e-6
    assert computed[1] == pytest.approx(row["attention_factor"], rel=0, abs=1e-6)


@pytest.mark.parametrize("agreement", AGREEMENTS, ids=str)
def test_restated_engines_match_our_methods(agreement):
    assert agreement.number() < 1e-12


# -- disagreements ---------------------------------------------------------------------------------


def number_of(entry, pair):
    return pair.of_frequency() if entry.of == "frequency" else pair.of_attention()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_implementations_disagree(entry):
    number = entry.number()
    assert math.isfinite(number)
    assert number > 1e-3, f"{entry.who}: do they agree by now? Then it is no disagreement any more"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.followed], ids=str)
def test_our_rotation_matches_the_listed_choice(entry):
    assert number_of(entry, Pair(entry.ours(), entry.followed())) < 2e-6


def test_entries_have_names_choices_and_links():
    assert len({entry.about for entry in ENTRIES}) == len(ENTRIES) > 30
    for entry in ENTRIES:
        assert entry.of in ("frequency", "attention factor", "softmax scale")
        assert entry.who
        assert entry.choice
        assert all("](https://" in link for link in entry.links)
        assert entry.links or "we do" in entry.who


@old_or_new
def test_transformers_keeps_frequencies_after_a_longer_text():
    longer, between, short = 16384, 4200, 2048
    previous = ntk(LLAMA2, longer / 4096)
    after = hf_rotation.rotation_after(LLAMA2, longer, between)
    assert Pair(ntk(LLAMA2, between / 4096) if OLD else previous, after).difference() < 2e-6
    after = hf_rotation.rotation_after(LLAMA2, longer, short)
    assert Pair(previous if OLD else default(LLAMA2), after).difference() < 2e-6
    at_the_length = hf_rotation.rotation_after(LLAMA2, longer, 4096)
    assert Pair(previous, at_the_length).difference() < 2e-6


@old_or_new
def test_transformers_scales_deepseek_v2_softmax_in_new_versions():
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

    scaling = {**DEEPSEEK3.scaling, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = v2.DeepseekV2Config(
        hidden_size=32, num_attention_heads=2, q_lora_rank=None, kv_lora_rank=8, v_head_dim=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, max_position_embeddings=163840,
        rope_theta=10000, rope_scaling=scaling,
    )  # fmt: skip
    attention = v2.DeepseekV2Attention(config, 0)
    expected = 1.0 if OLD else yarn_attention_factor(40, 0.707) ** 2
    assert attention.scaling * attention.qk_head_dim**0.5 == pytest.approx(expected)


@old_or_new
def test_transformers_ignores_a_flat_scaling_with_layer_types():
    flat = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    make = type(GEMMA3_FULL.config())
    if OLD:
        with pytest.raises(KeyError):
            hf_rotation.rotary_class(GEMMA3_FULL)(make(**GEMMA3_FULL.fields, rope_parameters=flat))
        return
    module = hf_rotation.rotary_class(GEMMA3_FULL)(make(**GEMMA3_FULL.fields, rope_parameters=flat))
    inv_freq = module.full_attention_inv_freq.double().tolist()
    assert difference(default(GEMMA3_FULL)[0], inv_freq) < 2e-6


@old_or_new
def test_transformers_5_0_fails_as_listed():
    assert hf_rotation.has("proportional") is NEW
    config = hf_rotation.scaled_config(
        GEMMA3_FULL, "longrope", factor=2.0, long_factor=[2.0] * 128, short_factor=[1.0] * 128
    )
    module = hf_rotation.rotary_class(GEMMA3_FULL)(config)
    long_text = torch.zeros(1), torch.tensor([[0, 40000]]), "full_attention"
    module(*long_text)
    flat = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    make = type(GEMMA3_FULL.config())
    if OLD:
        with pytest.raises(UnboundLocalError):
            module(*long_text)
        with pytest.raises(KeyError):
            make(**GEMMA3_FULL.fields, rope_scaling=flat)
    else:
        module(*long_text)
        make(**GEMMA3_FULL.fields, rope_scaling=flat)


@has_proportional
def test_transformers_divides_proportional_by_its_factor():
    inv_freq, _ = hf_rotation.rotation(
        SMOLLM2, "proportional", factor=4.0, partial_rotary_factor=0.75
    )
    assert difference([f / 4 for f in proportional(SMOLLM2, 0.75)[0]], inv_freq) < 2e-6
    inv_freq, _ = hf_rotation.rotation(SMOLLM2, "proportional", partial_rotary_factor=0.3)
    assert [f > 0 for f in inv_freq] == [f > 0 for f in proportional(SMOLLM2, 0.3)[0]]
    assert [f > 0 for f in inv_freq] != [f > 0 for f in mlx_proportional(SMOLLM2, 0.3)[0]]


# -- the page --------------------------------------------------------------------------------------


@has_proportional
def test_page_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.build(), (
        "docs/conformance.md is not what the code computes: run "
        "python tests/conformance/page.py and look at what changed"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0 %"), (0.003306, "0.331 %"), (0.42284, "42.3 %"), (1.0000001, "100 %"),
     (2.9999999, "× 4"), (30.54, "× 31.5")],
)  # fmt: skip
def test_percent(number, text):
    assert page.percent(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.0, "1e-12"), (3e-7, "2e-6"), (3e-6, "3e-6"), (0.25, "0.25")]
)
def test_bound(number, text):
    assert page.bound(number) == text
