"""Gradient checkpointing, in both of torch's ways: the gradients of a model that keeps it all."""

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
    "nope": {"temperature": 0.4},
}


def gradients(family, method, reentrant):
    """Return the summed gradients of two batches of different lengths; without checkpoints for
    None.

    The first has rows on both sides of the trained length, so rows of different frequencies.
    """
    model = make_model(family).train()
    rope_patch.patch(model, method, **METHODS[method])
    calls = []
    for layer in model.model.layers:  # newer transformers recompute what is in a layer, and no more
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    rows, mask = padded([tokens(SHORT), tokens(LONG, seed=2)], "right")
    for given in ({"input_ids": rows, "attention_mask": mask}, {"input_ids": tokens(TRAINED)}):
        labels = given["input_ids"]
        model(**given, labels=labels, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()], len(calls)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradients_are_those_without_checkpoints(family, method):
    expected, once = gradients(family, method, None)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for reentrant in (True, False):
        got, calls = gradients(family, method, reentrant)
        assert calls == 2 * once  # computed again, indeed
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
