"""Test mlx-lm's models on exported configs, if mlx is installed (it runs on CPUs, too)."""

import copy
import importlib

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, METHODS, make_patched
from helpers.rotary_modules import find_rotaries, transformers_frequencies
from test_exporting import REFUSED

import rope_patch

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm.utils")

POSITIONS = (1, 37, 4000)


def make_mlx_model(config):
    """Return mlx-lm's model of a config, without weights."""
    kind = config["model_type"]
    file = importlib.import_module(f"mlx_lm.models.{mlx_lm.MODEL_REMAPPING.get(kind, kind)}")
    return file.Model(file.ModelArgs.from_dict(config))


def rotate_ones(rope, size, position):
    """Rotate a head whose first half is 1; return cos and sin times the attention factor."""
    x = mx.concatenate([mx.ones((1, 1, 1, size // 2)), mx.zeros((1, 1, 1, size // 2))], axis=-1)
    return np.array(rope(x, offset=position))[0, 0, 0].astype(np.float64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mlx_rotates_like_the_patched_model(name, method):
    if method in REFUSED["mlx"].get(name, ()):
        pytest.skip("refused, see test_exporting.py")
    patched_model, handle = make_patched(name, method)
    (rotary,) = find_rotaries(patched_model)
    expected = {
        **transformers_frequencies(rotary, CHECKPOINTS[name]),
        **handle.frequencies,
    }
    config = {**CHECKPOINTS[name].to_dict(), **rope_patch.export(patched_model, "mlx").config}
    if name.startswith("Gemma"):
        config["sliding_window_pattern"] = 2  # mlx-lm reads it instead of layer_types
    layers = make_mlx_model(copy.deepcopy(config)).layers
    assert len(layers) == 2
    for kind, frequencies in expected.items():
        rope = layers[0 if kind == "sliding_attention" else 1].self_attn.rope
        inv_freq, factor = frequencies.inv_freq.numpy(), frequencies.attention_factor
        for position in POSITIONS:
            angle = position * inv_freq
            whole = factor * np.concatenate([np.cos(angle), np.sin(angle)])
            got = rotate_ones(rope, 2 * len(inv_freq), position)
            # float32 holds angles to about 1e-7 of their size.
            np.testing.assert_allclose(got, whole, atol=2e-6 + 5e-7 * position, rtol=0)
