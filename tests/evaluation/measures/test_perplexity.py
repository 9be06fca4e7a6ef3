"""Test perplexity in one pass against the plain computation from all logits."""

import math

import pytest
import torch
from helpers.tiny_models import FAMILIES, make_model, tokens
from torch import nn

import rope_patch
from rope_patch.evaluation.measures import perplexity


def plain_losses(model, ids):
    """Return the cross entropy of every token but the first, from all logits at once."""
    batch = torch.tensor([ids])
    with torch.no_grad():
        out = model(batch, use_cache=False).logits[0].float()
    return nn.functional.cross_entropy(out[:-1], batch[0, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [None, "yarn"])
def test_losses_equal_those_of_the_whole_logits(family, method, monkeypatch):
    """Gemma2 soft-caps its logits outside of the head."""
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 17)
    model = make_model(family)
    if method:
        rope_patch.patch(model, method, factor=4)
    ids = tokens(150)[0].tolist()
    got = perplexity.token_losses(model, ids, scored=149, label="test")
    torch.testing.assert_close(got, plain_losses(model, ids), rtol=0, atol=1e-5)


def test_logits_are_computed_in_chunks(monkeypatch):
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 16)
    model = make_model()
    chunk_sizes = []
    model.lm_head.register_forward_hook(lambda _, __, out: chunk_sizes.append(out.shape[1]))
    perplexity.token_losses(model, tokens(100)[0].tolist(), scored=99, label="test")
    assert max(chunk_sizes) == 16
    assert sum(chunk_sizes) == 99


def test_the_model_is_unchanged_afterwards():
    model = make_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    perplexity.token_losses(model, tokens(40)[0].tolist(), scored=39, label="test")
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_are_means_over_positions_without_the_first():
    losses = torch.arange(1.0, 200)  # of positions 1 to 199
    means = perplexity.block_losses(losses, 64)
    positions = torch.arange(200.0)
    expected = [positions[1:64].mean(), positions[64:128].mean(), positions[128:192].mean()]
    assert means == [mean.item() for mean in expected]
    assert perplexity.block_losses(losses[:191], 64) == means  # 192 tokens: whole blocks, no more
    assert perplexity.block_losses(losses[:190], 64) == means[:2]


@pytest.mark.parametrize(("block", "window"), [(64, 64), (64, 192), (16, 16), (50, 50)])
def test_points_pool_the_tokens_of_all_documents(block, window):
    """The reference is means over single tokens; the documents' losses are far apart."""
    generator = torch.Generator().manual_seed(0)
    lengths = (600, 400)
    documents = [
        (n + 1) * torch.rand(length - 1, generator=generator, dtype=torch.float64)
        for n, length in enumerate(lengths)
    ]
    points = perplexity.curve_points(
        [perplexity.block_losses(losses, block) for losses in documents], block, window
    )
    assert [point["end"] for point in points] == list(range(window, 601, window))
    for point in points:
        end = point["end"]
        scored = torch.cat(
            [
                losses[max(end - window - 1, 0) : end - 1]
                for losses, length in zip(documents, lengths, strict=True)
                if end <= length
            ]
        )
        assert point["tokens"] == len(scored)
        assert point["nll"] == pytest.approx(scored.mean().item(), rel=1e-12)
        assert point["perplexity"] == pytest.approx(scored.mean().exp().item(), rel=1e-12)


def test_nan_and_infinite_losses_stay_in_their_points():
    points = perplexity.curve_points([[1.0, math.nan, math.inf, 1e4, 2.0], []], 64, 64)
    assert [point["perplexity"] for point in points] == [
        pytest.approx(math.e),
        pytest.approx(math.nan, nan_ok=True),
        math.inf,
        math.inf,
        pytest.approx(math.e**2),
    ]


def test_windows_are_made_of_whole_blocks():
    assert [perplexity.block_size(window) for window in (2, 16, 50, 64, 128, 8192)] == [
        2, 16, 50, 64, 64, 64,
    ]  # fmt: skip
    for length in (10, 256, 1024, 12288, 131072):
        perplexity.block_size(perplexity.default_window(length))
    with pytest.raises(ValueError, match=r"multiple of 64 .* got 1000: try 1024"):
        perplexity.block_size(1000)
    with pytest.raises(ValueError, match=r"2 to 63, got 1: try 64"):
        perplexity.block_size(1)


def test_the_control_sees_only_the_last_tokens():
    model, ids = make_model(), tokens(200)[0].tolist()
    loss = perplexity.control_loss(model, ids, end=180, window=20, context=60)
    expected = plain_losses(model, ids[120:180])[-20:].mean().item()
    assert loss == pytest.approx(expected, abs=1e-5)
    other = [*reversed(ids[:120]), *ids[120:]]  # another far past
    assert perplexity.control_loss(model, other, end=180, window=20, context=60) == loss


def test_an_excerpt_starts_with_the_head_of_the_document():
    model, ids = make_model(), [1, *tokens(199)[0].tolist()]  # a beginning-of-sequence token
    loss = perplexity.control_loss(model, ids, end=180, window=20, context=60, head=1)
    expected = plain_losses(model, [1, *ids[121:180]])[-20:].mean().item()
    assert loss == pytest.approx(expected, abs=1e-5)
    assert perplexity.excerpt(ids, 0, 60, head=1) == ids[:60]


@pytest.mark.parametrize(
    ("length", "window"), [(16384, 1024), (12288, 1024), (131072, 8192), (1024, 64), (100, 16)]
)
def test_a_curve_has_about_a_dozen_points_by_default(length, window):
    assert perplexity.default_window(length) == window
