"""Test the diagnosis against published critical dimensions and float64 arithmetic, and its plot."""

import functools
import json
import math
import os
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures.tiny_architectures import model_types, tiny_config
from helpers import published_yarn
from helpers.tiny_models import OLD_TRANSFORMERS, TARGET, TRAINED, make_config, make_model
from transformers import LlamaConfig

import rope_patch
from rope_patch.diagnosing import Pair, base_bound, critical_base, failing_distance
from rope_patch.utils import PALETTE

# head_dim, theta, trained length, first pair that never completed a rotation in training.
PUBLISHED = [
    pytest.param(128, 1e4, 4096, 46, id="Llama-2, arXiv:2310.05209: dimension 92 of 128"),
    pytest.param(128, 5e5, 8192, 35, id="Llama-3, arXiv:2502.20082"),
    pytest.param(96, 1e4, 2048, 31, id="Phi-3-mini, arXiv:2502.20082"),
    pytest.param(64, 1e5, 8192, 20, id="SmolLM2"),
]


def make_config_of(head_dim, theta, trained):
    return LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=trained,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


@pytest.mark.parametrize(("head_dim", "theta", "trained", "critical"), PUBLISHED)
def test_pairs_from_the_published_critical_one_extrapolate_without_a_method(
    head_dim, theta, trained, critical
):
    config = make_config_of(head_dim, theta, trained)
    plain = rope_patch.diagnose(config, length=4 * trained)
    table = plain.rotations[None]
    assert table.critical_dimension == critical
    assert [p.pair for p in table.pairs if p.extrapolates] == list(range(critical, head_dim // 2))
    assert f"critical dimension: pair {critical} of {head_dim // 2}" in str(plain)
    last = head_dim // 2 - 1
    assert (
        f"{last - critical + 1} of them meet angles that training never showed: "
        f"pairs {critical} to {last}"
    ) in str(plain)
    for method in ("linear", "yarn"):
        pairs = rope_patch.diagnose(config, method, factor=4).rotations[None].pairs
        assert not any(p.extrapolates for p in pairs)


def test_wavelengths_and_rotations_match_the_formula():
    pairs = (
        rope_patch.diagnose(make_config_of(64, 1e5, 8192), "linear", factor=2).rotations[None].pairs
    )
    for i, pair in enumerate(pairs):
        wavelength = 2 * math.pi * 1e5 ** (2 * i / 64)
        assert pair.wavelength == pytest.approx(wavelength, rel=1e-12)
        assert pair.turns == pytest.approx(8192 / wavelength, rel=1e-12)
        assert pair.stretch == pytest.approx(2, rel=1e-12)
        assert pair.turns_at_length == pytest.approx(16384 / (2 * wavelength), rel=1e-12)


def test_stopped_pairs_are_shown_and_are_valid_json():
    diagnosis = rope_patch.diagnose(make_config_of(64, 1e5, 8192), "proportional", factor=2)
    assert "stopped" in str(diagnosis)
    data = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert data["rotations"]["all"]["pairs"][-1]["stretch"] is None


def test_patched_model_is_diagnosed_like_the_unpatched_one():
    model = make_model("llama")
    before = rope_patch.diagnose(model, "yarn", factor=2)
    with rope_patch.patch(model, "ntk", factor=4):
        during = rope_patch.diagnose(model, "yarn", factor=2)
        assert "patched by rope_patch: ntk ×4" in str(during)
        assert replace(during, patched=None) == before


def test_layer_types_have_separate_tables():
    diagnosis = rope_patch.diagnose(
        make_config("gemma3"),
        "linear",
        factor=2,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert list(diagnosis.rotations) == ["sliding_attention", "full_attention"]
    assert "gemma3_text, sliding_attention" in str(diagnosis)


def test_yarn_attention_factor_is_the_formulas():
    def predicted(length):
        rotation = rope_patch.diagnose(make_config_of(64, 1e5, 8192), length=length).rotations[None]
        return rotation.yarn_attention_factor

    assert predicted(32768) == pytest.approx(0.1 * math.log(4) + 1, rel=1e-12)
    assert predicted(4096) == 1


def test_rounding_is_no_new_angle():
    """A folder's frequencies in float32 differ from those in float64 in the last place."""
    pair = {"pair": 3, "wavelength": 100.0, "stretch": 4.0}
    assert not Pair(turns=0.5, turns_at_length=0.5 * (1 + 2**-22), **pair).extrapolates
    assert Pair(turns=0.5, turns_at_length=0.5001, **pair).extrapolates


def test_maps_keep_pairs_within_the_angles_of_training():
    config = make_config()
    plain = rope_patch.diagnose(config, length=8 * TRAINED)
    mapped = rope_patch.diagnose(config, method="rerope", length=8 * TRAINED)
    ((_, before),), ((_, after),) = plain.rotations.items(), mapped.rotations.items()
    assert any(pair.extrapolates for pair in before.pairs)
    assert not any(pair.extrapolates for pair in after.pairs)
    assert [pair.turns_at_length for pair in after.pairs] == [pair.turns for pair in after.pairs]
    stretched = rope_patch.diagnose(config, method="string", length=4 * TRAINED, on="linear:4")
    ((_, linear),) = stretched.rotations.items()
    assert linear.pairs[0].stretch == 4


# -- checkpoints that were trained under the YaRN of their config ----------------------------------


needs_new_models = pytest.mark.skipif(
    OLD_TRANSFORMERS, reason="needs nested YaRN and new model types"
)
# The bound of the base takes seconds at a million tokens.
MILLION = [
    name for name in published_yarn.PUBLISHED if 4 * published_yarn.present_length(name) >= 2**20
]


def trained_yarn(slow=()):
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name, marks=[needs_new_models, *([pytest.mark.slow] if name in slow else [])]
            )
            for name in published_yarn.PUBLISHED
        ],
    )


@functools.cache
def trained_model(name):
    return published_yarn.make_model(name)


@trained_yarn()
def test_trained_yarn_is_healthy_and_long_enough(name):
    present = published_yarn.present_length(name)
    diagnosis = rope_patch.diagnose(published_yarn.make_config(name))
    assert diagnosis.healthy
    assert diagnosis.length == present
    assert diagnosis.advice.summary == "no extension is needed"
    table = diagnosis.rotations[published_yarn.kind_of(name)]
    assert table.geometry.trained_length == present
    original = published_yarn.PUBLISHED[name][2]["original_max_position_embeddings"]
    assert f"from {original:,} tokens, trained in" in table.own_yarn
    assert table.own_yarn in str(diagnosis)
    assert json.dumps(table.own_yarn) in json.dumps(diagnosis.to_dict())


@trained_yarn(slow=MILLION)
def test_table_shows_the_frequencies_of_the_patch(name):
    """The truth is transformers with the config's factor multiplied."""
    diagnosis = rope_patch.diagnose(trained_model(name), "yarn", factor=4)
    table = diagnosis.rotations[published_yarn.kind_of(name)]
    assert table.attention_factor == pytest.approx(published_yarn.ATTENTION[name], rel=1e-9)
    length = 4 * published_yarn.present_length(name)
    now = [2 * torch.pi * pair.turns_at_length / length for pair in table.pairs]
    expected = published_yarn.multiplied(name, 4)[0].inv_freq.tolist()
    assert now == pytest.approx(expected, rel=1e-5)


@trained_yarn(slow=MILLION)
def test_advice_for_a_longer_text_starts_at_the_present_length(name):
    present = published_yarn.present_length(name)
    config = published_yarn.make_config(name)
    with pytest.raises(ValueError, match=rf"{present:,}.*{present // 2:,}.*unscaled"):
        rope_patch.diagnose(config, "yarn", length=present // 2)
    diagnosis = rope_patch.diagnose(config, length=2 * present)
    assert "was trained in" in str(diagnosis.advice.reasons)
    assert f"{present:,}" in str(diagnosis.advice.reasons)
    method = diagnosis.advice.method
    with rope_patch.patch(trained_model(name), method, length=2 * present) as handle:
        assert handle.trained_length == present


# -- all architectures -----------------------------------------------------------------------------


# Their shrunk configs have lengths that do not match their factor of 32.
SHRUNK = {"gpt_oss": "factor-and-lengths", "ministral3": "factor-and-lengths"}


# A release of transformers is tried with all: `make test-newest` sets ALL_ARCHITECTURES.
ALL = pytest.param(1, marks=() if os.environ.get("ALL_ARCHITECTURES") else pytest.mark.slow)


def diagnose_each(names):
    """Return diagnoses of architectures that rotate, or why `patch` refuses them, too."""
    results = {}
    for name in names:
        try:
            config = tiny_config(name)
        except (ValueError, TypeError):
            continue
        except Exception as error:  # transformers' validation has a separate error class
            if "Strict" not in type(error).__name__:
                raise
            continue
        if getattr(config.get_text_config(decoder=True), "rope_parameters", None):
            try:
                results[name] = rope_patch.diagnose(config)
            except ValueError as error:
                results[name] = str(error)
    return results


@pytest.mark.parametrize("one_of", [4, ALL])
def test_most_architectures_are_diagnosed_without_a_false_alarm(one_of):
    diagnoses = diagnose_each(sorted({*model_types()[::one_of], *SHRUNK} & {*model_types()}))
    refused = {name: message for name, message in diagnoses.items() if isinstance(message, str)}
    assert len(diagnoses) - len(refused) >= 80 / one_of
    assert len(refused) <= 3, refused
    alarms = {
        name: [
            f.code
            for f in diagnosis.findings
            if f.severity != "note" and f.code != SHRUNK.get(name)
        ]
        for name, diagnosis in diagnoses.items()
        if name not in refused
    }
    assert {name: codes for name, codes in alarms.items() if codes} == {}


# -- bounds of the base, against brute force -------------------------------------------------------


def brute_force_minimum(rotary_dim, base, length):
    """Return the minimum of sum_i cos(m base^(-2i / d)) over m up to the length, by brute force."""
    inv_freq = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.cos(np.outer(np.arange(length + 1), inv_freq)).sum(-1).min()


@pytest.mark.parametrize("length", [1, 511, 512, 513, 1500])
@pytest.mark.parametrize("base", [20.0, 300.0, 1e4])
def test_failing_distance_matches_brute_force(base, length):
    inv_freq = base ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert (failing_distance(inv_freq, length) is None) == (
        brute_force_minimum(32, base, length) >= 0
    )


@pytest.mark.parametrize("near", [1, 30, 200, 1000])
def test_failing_distance_has_a_negative_sum_from_any_start(near):
    inv_freq = 300.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    m = failing_distance(inv_freq, 1000, near)
    assert sum(math.cos(m * f) for f in inv_freq.tolist()) < 0


@pytest.mark.parametrize(("rotary_dim", "length"), [(16, 40), (32, 200), (64, 300)])
def test_bound_is_the_smallest_base_without_negative_sums(rotary_dim, length):
    bound = base_bound(rotary_dim, length)
    assert brute_force_minimum(rotary_dim, bound, length) >= -1e-9
    for step in range(1, 300):  # smaller bases, down to two fifths of the bound
        assert brute_force_minimum(rotary_dim, bound / 1.003**step, length) < 0


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 16384])
def test_bound_of_real_heads_and_lengths(length):
    bound = base_bound(128, length)
    sums = [brute_force_minimum(128, base, length) for base in (bound, bound / 1.003)]
    assert sums[0] >= -1e-9 > sums[1]


def test_no_bound():
    assert base_bound(2, 100) is None  # one pair is negative at some distance for every base
    assert base_bound(128, 2**20 + 1) is None


def test_critical_base_matches_the_paper():
    # Liu et al. 2023, arXiv:2310.05209: theta^(log_{4096 / 2 pi}(16384 / 2 pi)).
    expected = 1e4 ** math.log(16384 / (2 * math.pi), 4096 / (2 * math.pi))
    assert critical_base(1e4, 4096, 16384) == pytest.approx(expected, rel=1e-12)
    assert critical_base(1e4, 4096, 4096) == pytest.approx(1e4, rel=1e-12)
    assert critical_base(1e4, 4, 4096) is None


# -- the plot --------------------------------------------------------------------------------------


TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


def plot_words(path, config, *arguments, **options):
    pytest.importorskip("matplotlib")
    diagnosis = rope_patch.diagnose(config, *arguments, **options)
    path.parent.mkdir(exist_ok=True)
    diagnosis.plot(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary files
    return diagnosis, " ".join(TEXT.findall(path.read_text()))


def test_plot_names_lengths_pairs_and_the_method(tmp_path):
    diagnosis, words = plot_words(tmp_path / "a.svg", make_config(), "yarn", factor=4)
    assert f"trained on {TRAINED} tokens" in words
    assert f"target {TARGET} tokens" in words
    critical = diagnosis.rotations[None].critical_dimension
    assert f"critical dimension: pair {critical}" in words
    assert f"llama: yarn ×4, at {TARGET} tokens, attention factor 1.139" in words
    assert "before" in words
    assert "beyond the angles of training" not in words  # YaRN stretches them all


def test_extrapolating_and_stopped_pairs_are_marked(tmp_path):
    config = make_config()
    _, words = plot_words(tmp_path / "one" / "a.svg", config, length=TARGET)
    assert "beyond the angles of training" in words
    assert "as it is" in words
    assert "before" not in words
    _, words = plot_words(tmp_path / "two" / "a.svg", config, "proportional", factor=4)
    assert "no longer turns" in words


def test_every_layer_type_has_a_panel(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    config = make_config("gemma3")
    _, words = plot_words(tmp_path / "a.svg", config, "linear", factor=4, layer_types=kinds)
    assert "gemma3_text, sliding attention: linear" in words
    assert "gemma3_text, full attention: linear" in words


def test_the_same_diagnosis_makes_the_same_file_and_a_bitmap_that_can_be_printed(tmp_path):
    pytest.importorskip("matplotlib")
    diagnosis = rope_patch.diagnose(make_config(), "yarn", factor=4)
    for name in ("a.svg", "b.svg", "a.PNG"):
        diagnosis.plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    data = (tmp_path / "a.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 1800  # six inches at 300 dots
    assert height >= 800


def test_colours_differ_in_lightness():
    """Before and after differ in lightness and markers, for readers without colour."""

    def lightness(colour):
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    light = [lightness(PALETTE[name][0]) for name in ("plain", "m0")]
    assert max(light) / min(light) > 1.3


@pytest.mark.parametrize("name", ["a.pdf", "a", "svg"])
def test_other_file_types_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"\.svg or a \.png"):
        rope_patch.diagnose(make_config()).plot(tmp_path / name)
    assert not list(tmp_path.iterdir())
