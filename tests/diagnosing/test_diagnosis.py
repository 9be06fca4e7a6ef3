"""Test the diagnosis against published critical dimensions and float64 arithmetic."""

import json
import math
from dataclasses import replace

import pytest
from helpers.tiny_models import make_config, make_model
from transformers import LlamaConfig

import rope_patch
from rope_patch.diagnosing.pairs import Pair

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
def test_critical_dimension_matches_the_published_one(head_dim, theta, trained, critical):
    diagnosis = rope_patch.diagnose(make_config_of(head_dim, theta, trained))
    assert diagnosis.rotations[None].critical_dimension == critical


@pytest.mark.parametrize(("head_dim", "theta", "trained", "critical"), PUBLISHED)
def test_pairs_from_the_critical_one_extrapolate_without_a_method(
    head_dim, theta, trained, critical
):
    model = make_config_of(head_dim, theta, trained)
    plain = rope_patch.diagnose(model, length=4 * trained).rotations[None].pairs
    assert [p.pair for p in plain if p.extrapolates] == list(range(critical, head_dim // 2))
    for method in ("linear", "yarn"):
        pairs = rope_patch.diagnose(model, method, factor=4).rotations[None].pairs
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


def test_table_names_the_critical_dimension():
    text = str(rope_patch.diagnose(make_config_of(64, 1e5, 8192), length=16384))
    assert "critical dimension: pair 20 of 32" in text
    assert "12 of them meet angles that training never showed: pairs 20 to 31" in text


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
