"""Test our restatements of other packages against the packages, if these are installed."""

import importlib
import importlib.util
import math
import sys
from pathlib import Path

import engines
import formulas
import pytest
import torch
from comparison import Pair
from published import GPT_OSS, LLAMA2, LLAMA31, PHI35, SMOLLM2

MODELS = pytest.mark.parametrize("model", [LLAMA2, LLAMA31, SMOLLM2, GPT_OSS], ids=str)
FACTOR = 4.0


def mlx_rotation(model, scaling, full=None):
    """Return mlx-lm's rotation of a vector of ones and zeros at position 1."""
    mx = pytest.importorskip("mlx.core")
    ropes = pytest.importorskip("mlx_lm.models.rope_utils")
    module = ropes.initialize_rope(
        model.rotary_dim, model.theta, False, scaling, full or model.trained_length
    )
    half = model.rotary_dim // 2
    ones = mx.concatenate([mx.ones((1, 1, 1, half)), mx.zeros((1, 1, 1, half))], axis=-1)
    rotated = module(ones, offset=1).flatten().tolist()
    return from_cos_sin(rotated[:half], rotated[half:])


def from_cos_sin(cos, sin):
    """Return the angles and the largest magnitude of a rotation by one position."""
    angles = [math.atan2(s, c) for c, s in zip(cos, sin, strict=True)]
    return angles, max(math.hypot(c, s) for c, s in zip(cos, sin, strict=True))


def assert_same(computed, restated):
    assert Pair(restated, computed).difference() < 3e-6


@MODELS
@pytest.mark.parametrize(("mscale", "all_dim"), [(None, None), (0.707, None), (0.707, 1.0)])
def test_mlx_yarn(model, mscale, all_dim):
    scaling = {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": model.trained_length,
        "attention_factor": 1.0,  # ignored
        "truncate": False,  # ignored
    }
    scaling |= {"mscale": mscale} if mscale else {}
    scaling |= {"mscale_all_dim": all_dim} if all_dim else {}
    expected = engines.mlx_yarn(model, FACTOR, mscale or 1, all_dim or 0)
    assert_same(mlx_rotation(model, scaling), expected)


@MODELS
def test_mlx_linear_and_llama3(model):
    scaling = {"rope_type": "linear", "factor": FACTOR}
    assert_same(mlx_rotation(model, scaling), formulas.linear(model, FACTOR))
    scaling = {
        "rope_type": "llama3",
        "factor": FACTOR,
        "original_max_position_embeddings": model.trained_length,
    }
    assert_same(mlx_rotation(model, scaling), engines.mlx_llama3(model, FACTOR))


def test_mlx_longrope():
    scaling = {**PHI35.scaling, "original_max_position_embeddings": 4096, "factor": 2.0}
    short, long = scaling["short_factor"], scaling["long_factor"]
    computed = mlx_rotation(PHI35, scaling, full=131072)
    assert_same(computed, engines.mlx_longrope(PHI35, 131072, short, long))


@pytest.mark.parametrize("share", [0.75, 0.3])
def test_mlx_proportional(share):
    scaling = {"rope_type": "proportional", "partial_rotary_factor": share}
    assert_same(mlx_rotation(SMOLLM2, scaling), engines.mlx_proportional(SMOLLM2, share))


@MODELS
def test_litgpt(model):
    build = pytest.importorskip("litgpt.model").build_rope_cache
    half = model.rotary_dim // 2

    def rotation(**extra):
        extra = {"factor": FACTOR, **extra}
        cos, sin = build(2, model.rotary_dim, base=model.theta, extra_config=extra)
        return from_cos_sin(cos[1, :half].double().tolist(), sin[1, :half].double().tolist())

    original = {"original_max_seq_len": model.trained_length}
    ramp = {"beta_fast": 32, "beta_slow": 1, **original}
    assert_same(rotation(**ramp), engines.litgpt_yarn(model, FACTOR))
    assert_same(rotation(**ramp, mscale=1.0), engines.litgpt_yarn(model, FACTOR, mscale=1.0))
    bounds = {"low_freq_factor": 1, "high_freq_factor": 4, **original}
    assert_same(rotation(**bounds), formulas.llama3(model, FACTOR))
    assert_same(rotation(), formulas.linear(model, FACTOR))


@MODELS
def test_torchtune(model):
    package = importlib.util.find_spec("torchtune")
    if package is None:
        pytest.skip("torchtune is not installed")
    # Load this file alone, because torchtune needs many packages and the file only torch.
    file = Path(package.origin).parent / "models" / "llama3_1" / "_position_embeddings.py"
    spec = importlib.util.spec_from_file_location("torchtune_llama3_rope", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rope = module.Llama3ScaledRoPE(
        model.rotary_dim, 8, model.theta, FACTOR, 1, 4, model.trained_length
    )
    assert_same((rope.theta.double().tolist(), 1.0), formulas.llama3(model, FACTOR))


@MODELS
def test_rotary_embedding_torch(model):
    make = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding
    rope = make(model.rotary_dim, theta=model.theta, theta_rescale_factor=FACTOR)
    assert_same((rope.freqs.detach().double().tolist(), 1.0), formulas.ntk(model, FACTOR))
    rope = make(model.rotary_dim, theta=model.theta, interpolate_factor=FACTOR)
    positions = rope.get_seq_pos(2, device=torch.device("cpu"), dtype=torch.float64)
    computed = (positions[1] * rope.freqs.detach().double()).tolist()
    assert_same((computed, 1.0), formulas.linear(model, FACTOR))


@MODELS
def test_x_transformers(model):
    make = pytest.importorskip("x_transformers.x_transformers").RotaryEmbedding
    rope = make(model.rotary_dim, base=model.theta, base_rescale_factor=FACTOR)
    assert_same((rope.inv_freq.double().tolist(), 1.0), formulas.ntk(model, FACTOR))


@MODELS
@pytest.mark.parametrize("truncate", [True, False])
def test_keras_hub(model, truncate, monkeypatch):
    if importlib.util.find_spec("keras_hub") is None:
        pytest.skip("keras-hub is not installed")
    if "keras" not in sys.modules:
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    make = importlib.import_module("keras_hub.layers").RotaryEmbedding

    def frequencies(kind):
        rope = make(
            model.theta,
            FACTOR,
            rope_type=kind,
            original_max_position_embeddings=model.trained_length,
            truncate=truncate,
        )
        return [float(number) for number in rope._get_inverse_freq(model.rotary_dim)]

    expected = formulas.yarn(model, FACTOR, truncate=truncate)[0]
    assert_same((frequencies("yarn"), 1.0), (expected, 1.0))
    assert_same((frequencies("linear"), 1.0), formulas.linear(model, FACTOR))
    assert_same((frequencies("dynamic"), 1.0), engines.keras_dynamic(model, FACTOR))
