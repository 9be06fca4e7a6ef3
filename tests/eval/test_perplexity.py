"""Perplexity in one pass, against the plain computation from all logits at once."""

import math

import pytest
import torch
from tiny_models import FAMILIES, make_model, tokens
from torch import nn

import rope_patch
from rope_patch.eval import perplexity


def plain_losses(model, ids):
    """Cross entropy of every token but the first, from logits of the whole length."""
    batch = torch.tensor([ids])
    with torch.no_grad():
        out = model(batch, use_cache=False).logits[0].float()
    return nn.functional.cross_entropy(out[:-1], batch[0, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [None, "yarn"])
def test_losses_equal_those_of_the_whole_logits(family, method, monkeypatch):
    """Gemma2 caps its logits softly, which the head alone does not do."""
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 17)
    model = make_model(family)
    if method:
        rope_patch.patch(model, method, factor=4)
    ids = tokens(150)[0].tolist()
    got = perplexity.token_losses(model, ids, scored=149, label="test")
    torch.testing.assert_close(got, plain_losses(model, ids), rtol=0, atol=1e-5)


def test_logits_never_exist_for_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 16)
    model = make_model()
    seen = []
    model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out.shape[1]))
    perplexity.token_losses(model, tokens(100)[0].tolist(), scored=99, label="test")
    assert max(seen) == 16
    assert sum(seen) == 99


def test_the_model_is_left_as_it_was():
    model = make_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    perplexity.token_losses(model, tokens(40)[0].tolist(), scored=39, label="test")
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_points_are_means_over_consecutive_windows():
    model, ids = make_model(), tokens(200)[0].tolist()
    losses = plain_losses(model, ids).double()
    points = perplexity.curve(model, ids, window=50, label="test")
    assert [point["end"] for point in points] == [50, 100, 150, 200]
    assert [point["tokens"] for point in points] == [49, 50, 50, 50]  # the first has no past
    for point in points:
        mean = losses[max(point["end"] - 51, 0) : point["end"] - 1].mean().item()
        assert point["nll"] == pytest.approx(mean, abs=1e-5)
        assert point["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)


def test_the_control_sees_only_the_last_tokens():
    model, ids = make_model(), tokens(200)[0].tolist()
    point = perplexity.control_point(model, ids, end=180, window=20, context=60)
    expected = plain_losses(model, ids[120:180])[-20:].mean().item()
    assert point["nll"] == pytest.approx(expected, abs=1e-5)
    other = [*reversed(ids[:120]), *ids[120:]]  # another far past
    again = perplexity.control_point(model, other, end=180, window=20, context=60)
    assert again == point


@pytest.mark.parametrize(
    ("length", "window"), [(16384, 1024), (12288, 1024), (131072, 8192), (1024, 64), (100, 16)]
)
def test_a_curve_has_about_a_dozen_points_unless_told_otherwise(length, window):
    assert perplexity.default_window(length) == window
