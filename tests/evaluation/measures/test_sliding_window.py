"""Test sliding windows against transformers' loss of the same tokens in float64."""

import itertools

import pytest
import torch
from helpers.tiny_models import make_model, tokens

import rope_patch
from rope_patch.evaluation.measures import perplexity, sliding_window


def loss_of_last(model, ids, scored):
    """Return the mean loss of the last tokens that transformers computes from labels."""
    batch = torch.tensor([ids])
    labels = batch.clone()
    labels[:, :-scored] = -100
    with torch.no_grad():
        return model(batch, labels=labels, use_cache=False).loss.item()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", [None, "yarn", "dynamic"])
def test_windows_equal_a_direct_computation(family, method):
    model, ids = make_model(family), tokens(400)[0].tolist()
    if method:
        rope_patch.patch(model, method, factor=4)
    ends = sliding_window.window_ends(400, longest=240, stride=32, windows=4)
    got = {n: sliding_window.window_losses(model, ids, n, 32, ends, "test") for n in (60, 120, 240)}
    model = model.double()
    for length, means in got.items():
        expected = [loss_of_last(model, ids[end - length : end], 32) for end in ends]
        assert means == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(got[60], got[240], strict=True)) > 1e-2


def test_one_window_over_the_whole_document_equals_the_full_pass():
    model, ids = make_model(), tokens(150)[0].tolist()
    full = perplexity.document_losses(model, ids, "test")
    ends = sliding_window.window_ends(150, longest=150, stride=40, windows=1)
    got = sliding_window.window_losses(model, ids, 150, 40, ends, "test")
    assert got == [full[-40:].double().mean().item()]


def test_windows_start_with_the_head_of_the_document():
    model, ids = make_model(), [1, *tokens(199)[0].tolist()]
    (got,) = sliding_window.window_losses(model, ids, 60, 20, [180], "test", head=1)
    assert got == pytest.approx(loss_of_last(model, [1, *ids[121:180]], 20), abs=1e-5)


@pytest.mark.parametrize(
    ("total", "longest", "stride", "windows", "count"),
    [
        (16384, 8192, 256, 8, 8),
        (12288, 8192, 256, 100, 17),
        (8192, 8192, 256, 8, 1),
        (8192 + 7 * 256, 8192, 256, 8, 8),  # just enough
        (8192 + 7 * 256 - 1, 8192, 256, 8, 7),
        (1001, 500, 7, 10, 10),
    ],
)
def test_ends_are_spread_evenly_and_score_no_token_twice(total, longest, stride, windows, count):
    ends = sliding_window.window_ends(total, longest, stride, windows)
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    assert len(ends) == count
    assert ends[-1] == total
    assert ends[0] == longest or count == 1
    assert all(gap >= stride for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_documents_and_windows_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="at least the longest length of 8,192 tokens, got 8,000"):
        sliding_window.window_ends(8000, 8192, 256, 8)
    with pytest.raises(ValueError, match="more than the 256 tokens scored, got 256"):
        sliding_window.window_losses(make_model(), tokens(300)[0].tolist(), 256, 256, [300], "test")
