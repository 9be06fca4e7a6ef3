"""Test early stopping: losing candidates are stopped, and the winner stays the same."""

import pytest
import torch
from helpers.search_fixtures import LENGTH, load, questions, stretch_candidate

from rope_patch.extension import Extension
from rope_patch.inference import scorer
from rope_patch.searching.measure.early_stopping import predicted_deficit
from rope_patch.searching.measure.fitness import Fitness


def candidates(top):
    return [stretch_candidate(power, top=t) for power in (0.3, 1, 4) for t in (top, 2 * top)]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_early_stopping_never_changes_the_winner(name, monkeypatch):
    monkeypatch.setattr(scorer, "_CPU_BATCH_TOKENS", 2 * LENGTH)  # so that there are rounds
    fitness = Fitness(load(name), questions(), Extension("longrope", length=LENGTH))
    complete = [fitness.measure(candidate) for candidate in candidates(2.0)]
    winner = min(range(len(complete)), key=lambda i: complete[i].fitness)
    for order in (range(len(complete)), reversed(range(len(complete)))):
        best, read, stopped = None, 0, 0
        for i in order:
            against = None if best is None else complete[best]
            evaluation = fitness.measure(candidates(2.0)[i], against)
            read += evaluation.tokens
            if evaluation.complete:
                assert evaluation.fitness == complete[i].fitness
                if best is None or evaluation.fitness < complete[best].fitness:
                    best = i
            else:
                stopped += 1
                assert evaluation.fitness > complete[best].fitness
                assert complete[i].fitness > complete[best].fitness
                assert None in evaluation.nll
        assert best == winner
        assert stopped >= 2
        assert read < sum(evaluation.tokens for evaluation in complete) - stopped * LENGTH


def test_a_candidate_that_cannot_win_even_without_loss_is_stopped():
    ones = [1.0] * 4
    assert predicted_deficit({0: 4.1}, ones, ones, list("abcd")) is not None
    assert predicted_deficit({0: 3.9}, ones, ones, list("abcd")) is None


def test_remaining_hard_samples_of_the_best_candidate_count():
    """A candidate that is behind on each sample so far may still win by the remaining ones."""
    best_losses = [0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0]
    losses = {i: 1.0 + 0.001 * i for i in range(4)}
    assert predicted_deficit(losses, best_losses, [1.0] * 8, list("abcdefgh")) is None
    assert predicted_deficit(losses, [0.1] * 8, [1.0] * 8, list("abcdefgh")) == pytest.approx(
        0.9, abs=0.02
    )


def test_candidates_that_would_win_are_rarely_stopped():
    generator = torch.Generator().manual_seed(0)
    groups = [str(i) for i in range(16)]
    winners, stopped_winners, stopped_losers = 0, 0, 0
    for _ in range(2000):
        best_losses, losses = (
            torch.rand(2, 16, generator=generator, dtype=torch.float64).exp().tolist()
        )
        deficits = [
            predicted_deficit(dict(enumerate(losses[:n])), best_losses, [1.0] * 16, groups)
            for n in (4, 8, 12)
        ]
        is_stopped = any(deficit is not None for deficit in deficits)
        wins = sum(losses) < sum(best_losses)
        winners += wins
        stopped_winners += is_stopped and wins
        stopped_losers += is_stopped and not wins
    assert stopped_winners <= 0.005 * winners
    assert stopped_losers > 50


def test_samples_of_one_text_count_as_one():
    """Sixteen questions about two texts are as uncertain as two samples."""
    best_losses, losses = [1.0] * 32, {i: 1.5 + 0.01 * i for i in range(16)}
    assert (
        predicted_deficit(losses, best_losses, best_losses, [str(i) for i in range(32)]) is not None
    )
    assert (
        predicted_deficit(losses, best_losses, best_losses, [str(i // 8) for i in range(32)])
        is None
    )
