"""Test registration with transformers, and configs that name our methods."""

import copy
import json
import math
import threading
from pathlib import Path

import pytest
import torch
import transformers
from architectures import tiny_architectures
from helpers.method_names import position_maps
from helpers.processes import run_code
from helpers.rope_type_configs import (
    BASE,
    LENGTH,
    LENGTH_DEPENDENT,
    NATIVE_ROPE_TYPES,
    STATIC,
    make_named_config,
    make_rotary,
    registry,
)
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_config,
    make_model,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch

# --- Names, conflicts and invalid values ----------------------------------------------------------

pytestmark = pytest.mark.usefixtures("restored_registry")


def test_register_adds_and_unregister_removes_all_methods():
    before = registry()
    rope_patch.register_rope_types()
    now, mixin = registry()
    assert now[: len(before[0])] == before[0]  # transformers' functions are unchanged
    added = [name for name, _ in now[len(before[0]) :]]
    maps = position_maps()  # no rotary module can do what they do
    assert added == [
        name for name in rope_patch.list_methods() if name not in {*NATIVE_ROPE_TYPES, *maps}
    ]
    assert set(added) == {*STATIC, "clipped-abf", "clipped-yarn", *LENGTH_DEPENDENT}
    assert mixin.keys() - before[1].keys() == {f"_validate_{n}_rope_parameters" for n in added}
    rope_patch.register_rope_types()
    assert registry() == (now, mixin)
    rope_patch.unregister_rope_types()
    assert registry() == before
    rope_patch.unregister_rope_types()
    assert registry() == before


def test_import_registers_nothing():
    run_code(
        "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS as known\n"
        "import rope_patch\nassert 'ntk' not in known\n"
        "rope_patch.register_rope_types()\nassert 'ntk' in known"
    )


def foreign_compute(config, device=None, seq_len=None, layer_type=None):
    return torch.ones(8), 1.0


def test_register_refuses_names_that_are_taken(monkeypatch):
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "abf", foreign_compute)
    before = registry()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'abf' is .*foreign_compute.*rope_patch\.patch"):
            rope_patch.register_rope_types()
        assert registry() == before
    rope_patch.unregister_rope_types()
    assert registry() == before


def test_unregister_keeps_functions_of_others(registered, caplog):
    ROPE_INIT_FUNCTIONS["abf"] = foreign_compute
    try:
        with pytest.raises(ValueError, match=r"'abf' is .*foreign_compute"):
            rope_patch.register_rope_types()
        assert ROPE_INIT_FUNCTIONS["abf"] is foreign_compute
        rope_patch.unregister_rope_types()
        assert ROPE_INIT_FUNCTIONS["abf"] is foreign_compute
        assert not {*STATIC, *LENGTH_DEPENDENT} - {"abf"} & ROPE_INIT_FUNCTIONS.keys()
        assert "'abf' was registered by somebody else" in caplog.text
    finally:
        del ROPE_INIT_FUNCTIONS["abf"]


def test_register_is_thread_safe(restored_registry):
    errors = []

    def back_and_forth():
        try:
            for _ in range(50):
                rope_patch.register_rope_types()
                rope_patch.unregister_rope_types()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=back_and_forth) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rope_patch.register_rope_types()
    assert {*STATIC, *LENGTH_DEPENDENT} <= ROPE_INIT_FUNCTIONS.keys()


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_length_dependent_config_error_names_patch(registered, name):
    config = make_named_config(rope_type=name, **BASE, factor=4)
    with pytest.raises(
        ValueError, match=rf"follows the length.*rope_patch\.patch\(model, '{name}'"
    ):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", ["nope", "ntk"])
def test_temperature_in_a_config_is_refused(registered, name):
    config = make_named_config(rope_type=name, **BASE, factor=4, temperature="log-n")
    with pytest.raises(ValueError, match=r"temperature='log-n' beside it.*rope_patch\.patch"):
        AutoModelForCausalLM.from_config(config)


def test_transformers_dynamic_is_unchanged(registered):
    config = make_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, **BASE})
    model = AutoModelForCausalLM.from_config(config).eval()
    rope_patch.unregister_rope_types()
    twin = AutoModelForCausalLM.from_config(config).eval()
    twin.load_state_dict(model.state_dict())
    assert logits(model).equal(logits(twin))


BAD = {
    "no factor": ("ntk", {"factor": None}, "expected a factor.*got nothing"),
    "no length": ("ntk-by-parts", {LENGTH: None}, f"expected {LENGTH}.*got nothing"),
    "no length to derive from": ("abf", {LENGTH: None}, f"expected {LENGTH}.*got nothing"),
    "small factor": ("ntk", {"factor": 0.5}, "factor must be at least 1"),
    "words": ("ntk-by-parts", {"factor": "four"}, "factor must be a number, got 'four'"),
    "negative length": ("ntk-by-parts", {LENGTH: -1}, "whole number of tokens.*got -1"),
    "infinite": ("ntk", {"factor": math.inf}, "factor must be finite"),
    "small base": ("abf", {"new_theta": 100.0}, "new_theta must be above the model's own"),
    "betas": ("ntk-by-parts", {"beta_fast": 1, "beta_slow": 2}, "beta"),
    "theta": ("ntk", {"rope_theta": "big"}, "rope_theta must be a number"),
    "share": ("ntk", {"partial_rotary_factor": 0.2}, "rotary_dim must be even"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused(registered, case):
    name, change, message = BAD[case]
    parameters = {"rope_type": name, "factor": 4, **BASE, **change}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    config = make_named_config(**parameters)
    with pytest.raises(ValueError, match=f"(?s)rope_type '{name}' in rope_parameters: .*{message}"):
        AutoModelForCausalLM.from_config(config)


def test_transformers_validation_knows_our_fields(registered, library_log):
    make_named_config(rope_type="ntk-by-parts-2023-06", factor=4, partial_rotary_factor=1.0, **BASE)
    assert not library_log.text
    make_named_config(rope_type="ntk", factor=4, beta_fast=16, **BASE)
    assert (
        "Unrecognized keys in `rope_parameters` for 'rope_type'='ntk': {'beta_fast'}"
        in library_log.text
    )
    library_log.clear()
    make_named_config("gemma3", rope_type="ntk-by-parts", factor="4", **BASE)
    assert (
        "rope_type 'ntk-by-parts' in rope_parameters: factor must be a number" in library_log.text
    )
    library_log.clear()
    rope_patch.unregister_rope_types()
    make_named_config(rope_type="ntk", factor=4, **BASE)
    assert "Missing validation function" in library_log.text


def test_unknown_layer_type_is_refused(registered):
    config = make_named_config("gemma3", rope_type="ntk", factor=4, **BASE)
    with pytest.raises(ValueError, match="nothing for the layer type 'global'"):
        ROPE_INIT_FUNCTIONS["ntk"](config, layer_type="global")


def test_load_without_register_names_register(tmp_path):
    make_model().save_pretrained(tmp_path)
    make_named_config(rope_type="ntk", factor=4, **BASE).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"names the scaling 'ntk'.*rope_patch\.register_rope_types\(\)"
    ):
        rope_patch.load(tmp_path, "yarn", factor=4)
    rope_patch.register_rope_types()
    loaded = rope_patch.load(tmp_path, "yarn", factor=4)
    assert rope_patch.current(loaded).trained_length == TARGET


# --- Models that transformers builds --------------------------------------------------------------

ROWS = json.loads((Path(__file__).parents[1] / "assets" / "golden.json").read_text())


def golden_id(row):
    return f"{row['method']}-{row['head_dim']}x{row['rope_theta']}-{row['params'].get('factor')}"


def golden(*methods):
    rows = [{**row, "method": row["method"].split(" (")[0]} for row in ROWS]
    return [row for row in rows if row["method"] in methods and "mscale" not in row["params"]]


@pytest.mark.parametrize(
    "row", golden("ntk", "ntk-by-parts-2023-06", "yarn"), ids=lambda row: golden_id(row)
)
def test_real_geometries_match_reference_vectors(registered, row):
    name = "ntk-by-parts" if row["method"] == "yarn" else row["method"]
    if row["method"] == "yarn":  # the same frequencies, without the attention factor
        row["params"].pop("attention_factor", None)
    rotary = make_rotary(
        row["head_dim"],
        rope_type=name,
        rope_theta=row["rope_theta"],
        **{LENGTH: row["original_length"]},
        **row["params"],
    )
    assert rotary.inv_freq.dtype == torch.float32
    assert rotary.attention_scaling == 1.0
    expected = torch.tensor(row["inv_freq"])
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("parameters", "base"),
    [
        ({"new_theta": 8e6}, 8e6),
        ({"factor": 8}, 5e5 ** (math.log(8 * 8192 / math.tau) / math.log(8192 / math.tau))),
        (
            {"factor": 2.5, "new_theta": None},
            5e5 ** (1 + math.log(2.5) / math.log(8192 / math.tau)),
        ),
    ],
)
def test_abf_matches_the_formula_for_llama_3(registered, parameters, base):
    rotary = make_rotary(128, rope_type="abf", rope_theta=5e5, **{LENGTH: 8192}, **parameters)
    expected = torch.tensor([base ** (-2 * pair / 128) for pair in range(64)])
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=2e-6, atol=0)
    assert rotary.attention_scaling == 1.0


def test_unused_fields_may_be_missing(registered):
    ntk = make_rotary(128, rope_type="ntk", rope_theta=1e6, factor=4)
    base = 1e6 * 4 ** (128 / 126)
    expected = torch.tensor([base ** (-2 * pair / 128) for pair in range(64)])
    torch.testing.assert_close(ntk.inv_freq, expected, rtol=2e-6, atol=0)
    assert make_rotary(rope_type="abf", rope_theta=1e4, new_theta=1e6).inv_freq[-1] < 1e-5
    assert make_rotary(rope_type="nope", rope_theta=1e4).inv_freq.equal(torch.zeros(32))


OPTIONS = {
    "ntk": {"factor": 4},
    "ntk-by-parts": {"factor": 4, "beta_fast": 16},
    "abf": {"factor": 4},
    "ntk-by-parts-2023-06": {"factor": 4},
    "nope": {},
    "clipped": {"factor": 4, "clipped_pairs": 8},
}


def quick_if(is_quick, *values):
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        quick_if(family == "llama" or (family, name) == ("gemma3", "ntk"), family, name)
        for family in ("llama", "qwen3", "gemma3")
        for name in STATIC
    ],
)
def test_config_has_the_rotation_of_its_method(registered, family, name, tmp_path):
    plain = make_model(family)
    theta = plain.config.rope_parameters
    theta = (theta["full_attention"] if family == "gemma3" else theta)["rope_theta"]
    config = make_named_config(
        family, rope_type=name, rope_theta=theta, **{LENGTH: TRAINED}, **OPTIONS[name]
    )
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    model.load_state_dict(plain.state_dict())
    before = {length: logits(plain, length) for length in (SHORT, LONG)}

    plain.save_pretrained(tmp_path)
    config.architectures = plain.config.architectures
    config.save_pretrained(tmp_path)
    assert f'"{name}"' in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    rope_patch.patch(plain, name, kernels="hf", **({} if name == "nope" else OPTIONS[name]))
    for length in (SHORT, LONG):
        assert_differs(logits(model, length), before[length])
        assert logits(loaded, length).equal(logits(model, length))
        assert logits(loaded, length).equal(logits(plain, length))


def test_partial_rotation_of_each_head(registered):
    torch.manual_seed(0)
    sizes = {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "hidden_size": 128}
    share = {"partial_rotary_factor": 0.25}
    named_form = {"rope_type": "ntk", "factor": 4, **BASE}
    native_form = {"rope_type": "default", "rope_theta": 1e4 * 4 ** (8 / 6)}  # 8 of 32 dimensions

    def build(parameters):
        return transformers.StableLmForCausalLM(
            transformers.StableLmConfig(**sizes, rope_parameters={**parameters, **share})
        ).eval()

    model, twin = build(named_form), build(native_form)
    assert model.model.rotary_emb.inv_freq.shape == (4,)
    twin.load_state_dict(model.state_dict())
    assert_close(logits(model), logits(twin))


def make_scaled(model_type, **parameters):
    """Return a tiny model of an architecture with changed rope_parameters."""
    config = tiny_architectures.tiny_config(model_type)
    default = config.rope_parameters
    geometry_keys = {
        k: v for k, v in default.items() if k in ("rope_theta", "partial_rotary_factor")
    }
    config.rope_parameters = {**geometry_keys, **parameters}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "model_type", ["gpt_neox", "phi", "glm", "cohere2", "smollm3", "deepseek_v3"]
)
def test_other_architectures_match_the_native_form(registered, model_type):
    model = make_scaled(model_type, rope_type="ntk", factor=4)
    rotaries = [m for m in model.modules() if hasattr(m, "original_inv_freq")]
    pairs = len(rotaries[0].inv_freq)
    theta = model.config.rope_parameters["rope_theta"]
    base = theta * 4 ** (pairs / (pairs - 1))
    twin = make_scaled(model_type, rope_type="default", rope_theta=base)
    twin.load_state_dict(model.state_dict())
    assert_close(logits(model), logits(twin))
    for module in rotaries:
        assert module.inv_freq[1] == pytest.approx(base ** (-1 / pairs), rel=1e-6)


def test_frequencies_are_on_the_models_device(registered):
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            make_named_config(rope_type="ntk", factor=4, **BASE)
        )
    assert empty.model.rotary_emb.inv_freq.is_meta
    function = ROPE_INIT_FUNCTIONS["ntk"]
    inv_freq, _ = function(
        make_named_config(rope_type="ntk", factor=4, **BASE), device="meta", seq_len=99
    )
    assert inv_freq.is_meta


def test_patch_extends_a_named_scaling(registered):
    model = AutoModelForCausalLM.from_config(
        make_named_config(rope_type="ntk", factor=4, **BASE)
    ).eval()
    before = logits(model)
    handle = rope_patch.patch(model, "linear", factor=2)
    assert (handle.trained_length, handle.length) == (TARGET, 2 * TARGET)
    assert "starts from what the model runs with, the config's own ntk" in handle.summary()
    running = torch.tensor(
        [(1e4 * 4 ** (16 / 14)) ** (-pair / 8) for pair in range(8)], dtype=torch.float64
    )
    got = handle.frequencies[None].inv_freq
    torch.testing.assert_close(got, running / 2, rtol=2e-6, atol=0)
    assert_differs(logits(model), before)
    handle.undo()
    assert logits(model).equal(before)
    handle = rope_patch.patch(model, "linear", factor=2, start="unscaled")
    assert (handle.trained_length, handle.length) == (TRAINED, 2 * TRAINED)
    plain = torch.tensor([1e4 ** (-pair / 8) for pair in range(8)], dtype=torch.float64)
    torch.testing.assert_close(handle.frequencies[None].inv_freq, plain / 2, rtol=1e-12, atol=0)
    handle.undo()
    assert logits(model).equal(before)


def rope_types_in(folder):
    """Return every rope_type in a folder's config."""
    rope_types = []

    def look(part):
        if isinstance(part, dict):
            rope_types.extend(v for k, v in part.items() if k in ("rope_type", "type"))
            for value in part.values():
                look(value)

    look(json.loads((folder / "config.json").read_text()))
    return set(rope_types)


PATCH_OPTIONS = {
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR},
    "mixed-longrope": {"factor": 4, "long_factor": LONG_FACTOR},
    "dpe": {"groups": [2, 4]},
    "string": {"on": "yarn:4"},
}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in rope_patch.list_methods() if method != "default"),
        *(("gemma3", method) for method in ("ntk", "longrope", "dynamic-yarn", "nope", "dpe")),
    ],
)
def test_save_writes_native_rope_types_only(registered, family, method, tmp_path):
    model = make_model(family)
    rope_patch.patch(model, method, **PATCH_OPTIONS.get(method, {"factor": 4}))
    rope_patch.save(model, tmp_path)
    assert rope_types_in(tmp_path) <= set(NATIVE_ROPE_TYPES)


@pytest.mark.parametrize(
    ("family", "method", "rope_type"),
    [
        quick_if(
            (method == "yarn" and (family == "llama" or rope_type == "nope")) or rope_type == "ntk",
            *(family, method, rope_type),
        )
        for family in ("llama", "gemma3")
        for method in ("yarn", "dynamic-yarn")
        for rope_type in STATIC
    ],
)
def test_save_replaces_our_rope_types_in_the_config(
    registered, family, method, rope_type, tmp_path
):
    if rope_type == "nope" and OLD_TRANSFORMERS:
        pytest.skip("this transformers has no form of its own to write")
    parameters = {"rope_type": rope_type, **BASE, **OPTIONS[rope_type]}
    if family == "gemma3":  # its sliding layers, which the patch does not change
        all_parameters = make_config(family).rope_parameters
        parameters = {**all_parameters, "sliding_attention": parameters}
    config = make_config(family, rope_parameters=parameters, max_position_embeddings=TARGET)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = logits(model)
    handle = rope_patch.patch(model, method, factor=4)
    rope_patch.save(model, tmp_path)
    assert rope_types_in(tmp_path) <= set(NATIVE_ROPE_TYPES)
    assert handle.original["rope_parameters"] == config.rope_parameters
    patched = logits(model)
    loaded = rope_patch.load(tmp_path)
    assert logits(loaded).equal(patched)
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(plain)
    if OLD_TRANSFORMERS and family == "gemma3":
        return  # transformers 5.0 cannot read nested scalings
    rope_patch.unregister_rope_types()
    native_model = AutoModelForCausalLM.from_pretrained(tmp_path)
    # Configs cannot hold an attention factor for pairs that do not rotate.
    stopped = rope_type in ("nope", "clipped") and family == "llama"
    is_native = method == "yarn" and not stopped
    assert json.loads((tmp_path / "rope_patch.json").read_text())["native"] is is_native
    assert_close(logits(native_model), patched if is_native else plain)


def test_named_config_can_be_read_without_registration(tmp_path):
    make_named_config(rope_type="ntk", factor=4, **BASE).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters["rope_type"] == "ntk"
    with pytest.raises(KeyError, match="ntk"):
        AutoModelForCausalLM.from_config(config)
