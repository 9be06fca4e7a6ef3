"""Test how many launches the growth of a cache takes in whole models."""

import pytest
import torch
from helpers.tiny_models import OLD_TRANSFORMERS, TRAINED, make_model, tokens
from transformers import DynamicCache, StaticCache

pytest.importorskip("triton")

import rope_patch
from rope_patch.ops.dispatch import triton_unavailable_reason
from rope_patch.ops.kernels import rerotate
from rope_patch.ops.kernels.launcher import Launcher
from rope_patch.patching.dynamic.rerotation import _runs

LAYERS = 36
TYPES = ["sliding_attention"] * 2 + ["full_attention"]


@pytest.fixture
def launches(monkeypatch):
    """Record the number of layers of each launch that re-rotates; launch nothing.

    Triton's interpreter would take minutes for so many layers, and results are tested with few.
    """
    assert triton_unavailable_reason() is None  # imports the kernels
    counts = []

    def record(self, key, tensors, address_bits, make_spec, *spec_args):
        if self.kernel is rerotate.rerotate_kernel:
            counts.append(spec_args[1])

    monkeypatch.setattr(Launcher, "__call__", record)
    return counts


def grow(model, cache):
    ids = tokens(TRAINED + 1)
    with torch.no_grad():
        model(ids[:, :TRAINED], past_key_values=cache)
        model(ids[:, TRAINED:], past_key_values=cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_growth_of_36_layers_takes_one_launch(launches, kind):
    if OLD_TRANSFORMERS and kind is StaticCache:
        pytest.skip("5.0 counts the slots that are not zero, and no launch fills them here")
    model = make_model("llama", num_hidden_layers=LAYERS)
    rope_patch.patch(model, "dynamic-yarn", kernels="triton")
    size = {} if kind is DynamicCache else {"max_cache_len": TRAINED + 2}
    grow(model, kind(config=model.config, **size))
    assert launches == [LAYERS]


def test_sliding_and_full_layers_take_a_launch_each(launches):
    model = make_model("gemma3", num_hidden_layers=LAYERS, layer_types=TYPES * (LAYERS // 3))
    rope_patch.patch(model, "dynamic-yarn", kernels="triton", layer_types=sorted(set(TYPES)))
    grow(model, DynamicCache(config=model.config))
    assert sorted(launches) == [LAYERS // 3, LAYERS - LAYERS // 3]


def test_neighbouring_rows_change_together():
    assert _runs([0, 1, 2]) == [slice(0, 3)]
    assert _runs([1, 2, 5, 7, 8]) == [slice(1, 3), slice(5, 6), slice(7, 9)]
