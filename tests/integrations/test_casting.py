"""Casting a model, ahead of the patch and after it: frequencies stay exact, and that is said once.

The truth: a model whose weights are cast, and whose rotary module's buffers are not.
"""

import logging

import pytest
import torch
from helpers.tiny_models import LONG, SHORT, logits, make_model

import rope_patch

CASTS = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(dtype=float16)": lambda model: model.to(dtype=torch.float16),
    "to(cpu, float64)": lambda model: model.to("cpu", torch.float64),
}
REQUESTS = [("yarn", {"factor": 4}), ("dynamic-yarn", {})]


def kept_exact(family, cast):
    """Return a cast model whose frequencies were restored by hand."""
    model = make_model(family)
    rotary = model.model.rotary_emb
    exact = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    cast(model)
    for name, buffer in exact.items():
        rotary._buffers[name] = buffer
    return model


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cast_before_or_after_changes_weights_only(family, cast, method, options):
    truth = kept_exact(family, CASTS[cast])
    rope_patch.patch(truth, method, **options)
    before, after = CASTS[cast](make_model(family)), make_model(family)
    rope_patch.patch(before, method, **options)
    rope_patch.patch(after, method, **options)
    CASTS[cast](after)
    assert after.lm_head.weight.dtype == truth.lm_head.weight.dtype != torch.float32
    for length in (SHORT, LONG):
        expected = logits(truth, length)
        assert logits(before, length).equal(expected)
        assert logits(after, length).equal(expected)


@pytest.mark.parametrize("cast", CASTS)
def test_far_positions_are_rotated_by_the_formula(cast):
    """In float64 by hand; a buffer that is left cast is off by more than a quarter turn."""
    model = CASTS[cast](make_model())
    at = torch.tensor([[0, 100, 2000, 60_000]])
    x = torch.zeros(1, dtype=torch.float64)
    pair = torch.arange(8, dtype=torch.float64)
    plain = at[0, :, None] / 10_000 ** (pair / 8)

    def off(angles):
        cos, sin = model.model.rotary_emb(x, at)
        wanted = torch.cat([angles, angles], -1)
        return max((cos - wanted.cos()).abs().max(), (sin - wanted.sin()).abs().max())

    if "float64" not in cast:
        assert off(plain) > 1
    rope_patch.patch(model, "linear", factor=4)
    assert off(plain / 4) < 0.01  # float32's own rounding, 60,000 tokens out


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rope_patch"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_repair_is_said_once_however_many_frequencies_were_cast(family, caplog):
    model = make_model(family).half()
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        rope_patch.patch(model, "yarn", factor=4)
        logits(model)
        model.bfloat16()
        logits(model)
    (message,) = said(caplog)
    assert "had been cast to float16" in message
    for name, _ in make_model(family).model.rotary_emb.named_buffers():
        assert (name in message) != ("original" in name)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cast_after_patching_is_said_once(family, caplog):
    model = make_model(family)
    rope_patch.patch(model, "yarn", factor=4)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        for cast in CASTS.values():
            cast(model)
        model.to("cpu")
    (message,) = said(caplog)
    assert "stay in float32" in message


def test_moving_without_casting_says_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        model = make_model()
        rope_patch.patch(model, "yarn", factor=4)
        caplog.clear()
        model.to("cpu").float()
    assert not said(caplog)
