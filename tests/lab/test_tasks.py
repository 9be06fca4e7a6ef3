"""Test the lab's tasks against what transformers computes, and against a perfect reader."""

from types import SimpleNamespace

import pytest
import torch
import train_tiny

from rope_patch.lab import (
    RecallTask,
    RecallVocabulary,
    TextTask,
    build_model,
    position_edges,
    recall_batch,
)

PAIRS, VOCABULARY = 4, RecallVocabulary(range(16), range(16, 32), range(32, 48), 48)


@pytest.mark.parametrize("length", [64, 32])
def test_losses_of_text_are_those_of_transformers(length):
    """Shorter windows are cut from the same excerpts."""
    task = TextTask(32, 64, 2)
    model = build_model("rope", task.vocabulary_size, 32, 0).eval()
    scores = task.measure(model, length)
    for row, loss in zip(task._excerpts, scores["loss"], strict=True):
        windows = row.view(-1, length)
        with torch.no_grad():
            expected = model(input_ids=windows, labels=windows).loss.item()
        assert loss == pytest.approx(expected, abs=2e-5)
    if length == 64:
        # Bands hold 7, 8, 16 and 32 characters: the first one has nothing before it.
        assert task.edges == [0, 8, 16, 32, 64]
        weights = torch.tensor([7.0, 8, 16, 32]) / 63
        for bands, loss in zip(scores["by_position"], scores["loss"], strict=True):
            assert float(torch.tensor(bands) @ weights) == pytest.approx(loss, abs=2e-5)
        assert [bands[-1] for bands in scores["by_position"]] == pytest.approx(scores["last_half"])


def test_held_out_novels_are_not_trained_on():
    task = TextTask(32, 64, 8)
    trained_on = bytes(task._train.tolist())
    assert all(bytes(row.tolist()) not in trained_on for row in task._excerpts)
    with pytest.raises(ValueError, match="fewer excerpts"):
        TextTask(32, 100_000, 20)


@pytest.mark.parametrize(
    ("length", "longest", "edges"),
    [
        (64, 64, [0, 16, 32, 64]),
        (64, 512, [0, 16, 32, 64, 128, 256, 512]),
        (64, 300, [0, 16, 32, 64, 128, 256, 300]),
    ],
)
def test_position_edges(length, longest, edges):
    assert position_edges(length, longest) == edges


class PerfectReader:
    """Predicts what followed the same token before; or, if it errs, another token."""

    def __init__(self, errs=False):
        self.shift = int(errs)

    def __call__(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY.size)
        for row, ids in enumerate(input_ids.tolist()):
            for at, token in enumerate(ids):
                if token in ids[:at]:
                    follower = ids[ids.index(token) + 1]
                    logits[row, at, (follower + self.shift) % VOCABULARY.size] = 20
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("length", [32, 64])
def test_a_perfect_reader_recalls_everything_and_one_that_errs_nothing(length):
    task = RecallTask(32, 10, 5)
    scores = task.measure(PerfectReader(), length)
    assert scores["right"] == [1.0] * 5
    assert max(scores["loss"]) < 1e-4
    assert task.measure(PerfectReader(errs=True), length)["right"] == [0.0] * 5


def test_stages_double_up_to_the_trained_length_and_all_steps_have_one():
    task = RecallTask(256, 50, 2)
    lengths = [task.stage_length(step) for step in range(50)]
    assert lengths == [32] * 20 + [64] * 10 + [128] * 10 + [256] * 10
    assert [RecallTask(48, 9, 2).stage_length(step) for step in range(9)] == [48] * 9
    for step in (0, 49):
        input_ids, labels = task.batch(torch.Generator().manual_seed(0), step)
        shape = task.tokens(step) // lengths[step], lengths[step]
        assert input_ids.shape == labels.shape == shape


def test_recall_batches_ask_each_key_once():
    input_ids, labels = recall_batch(torch.Generator().manual_seed(0), VOCABULARY, 9, 40, PAIRS)
    body = input_ids[:, : 40 - 2 * PAIRS]
    assert ((labels != -100).sum(1) == PAIRS).all()
    for row, all_ids in zip(body.tolist(), input_ids.tolist(), strict=True):
        for key, value in zip(all_ids[-2 * PAIRS :: 2], all_ids[1 - 2 * PAIRS :: 2], strict=True):
            assert row.count(key) == 1
            assert row[row.index(key) + 1] == value


def test_tiny_models_are_trained_on_the_same_task():
    batch = train_tiny.recall_batch(torch.Generator().manual_seed(3), 2, 64, 6)
    same = recall_batch(torch.Generator().manual_seed(3), train_tiny.VOCABULARY, 2, 64, 6)
    assert all(torch.equal(a, b) for a, b in zip(batch, same, strict=True))
