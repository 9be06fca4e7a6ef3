"""Test gradient checkpointing, reentrant or not: gradients equal those without checkpoints."""

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    make_model,
    padded,
    tokens,
)

import rope_patch

METHODS = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4},
    "dynamic-yarn": {},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
    "mixed-yarn": {"factor": 4},
    "nope": {"temperature": "drope:0.4"},
}


def gradients(family, method, reentrant):
    """Return the summed gradients of two batches; `reentrant=None` means no checkpoints.

    The first batch has rows below and above the trained length, with different frequencies.
    """
    model = make_model(family).train()
    rope_patch.patch(model, method, **METHODS[method])
    calls = []
    for layer in model.model.layers:  # checkpoints recompute a layer's submodules
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    rows, mask = padded([tokens(SHORT), tokens(LONG, seed=2)], "right")
    for inputs in ({"input_ids": rows, "attention_mask": mask}, {"input_ids": tokens(TRAINED)}):
        labels = inputs["input_ids"]
        model(**inputs, labels=labels, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()], len(calls)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradients_equal_those_without_checkpoints(family, method):
    expected, once = gradients(family, method, None)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for reentrant in (True, False):
        got, calls = gradients(family, method, reentrant)
        assert calls == 2 * once  # activations were recomputed
        for gradient, truth in zip(got, expected, strict=True):
            torch.testing.assert_close(gradient, truth, rtol=0, atol=0)
