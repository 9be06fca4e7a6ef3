"""Test casts before and after a patch: frequencies stay exact, and one message says so.

The reference is a model with cast weights and uncast buffers of the rotary module.
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


def cast_weights_only(family, cast):
    """Return a cast model with restored frequencies."""
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
def test_cast_before_or_after_a_patch_changes_weights_only(family, cast, method, options):
    truth = cast_weights_only(family, CASTS[cast])
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
def test_far_positions_match_the_formula(cast):
    """Compare with float64; a cast buffer errs by more than a quarter of a rotation."""
    model = CASTS[cast](make_model())
    positions = torch.tensor([[0, 100, 2000, 60_000]])
    x = torch.zeros(1, dtype=torch.float64)
    pair = torch.arange(8, dtype=torch.float64)
    plain = positions[0, :, None] / 10_000 ** (pair / 8)

    def largest_error(angles):
        cos, sin = model.model.rotary_emb(x, positions)
        expected = torch.cat([angles, angles], -1)
        return max((cos - expected.cos()).abs().max(), (sin - expected.sin()).abs().max())

    if "float64" not in cast:
        assert largest_error(plain) > 1
    rope_patch.patch(model, "linear", factor=4)
    assert largest_error(plain / 4) < 0.01  # float32's rounding at 60,000 tokens


def logged_messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rope_patch"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_repaired_frequencies_are_logged_once(family, caplog):
    model = make_model(family).half()
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        rope_patch.patch(model, "yarn", factor=4)
        logits(model)
        model.bfloat16()
        logits(model)
    (message,) = logged_messages(caplog)
    assert "had been cast to float16" in message
    for name, _ in make_model(family).model.rotary_emb.named_buffers():
        assert (name in message) != ("original" in name)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cast_after_a_patch_is_logged_once(family, caplog):
    model = make_model(family)
    rope_patch.patch(model, "yarn", factor=4)
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        for cast in CASTS.values():
            cast(model)
        model.to("cpu")
    (message,) = logged_messages(caplog)
    assert "stay in float32" in message


def test_move_without_a_cast_logs_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        model = make_model()
        rope_patch.patch(model, "yarn", factor=4)
        caplog.clear()
        model.to("cpu").float()
    assert not logged_messages(caplog)
