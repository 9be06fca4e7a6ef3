"""Candidates without hope are given up, and that never decides who wins."""

import pytest
import torch
from helpers.search_fixtures import LENGTH, load, questions, stretched

from rope_patch.extension import Extension
from rope_patch.inference import scorer
from rope_patch.searching.measure.early_stopping import predicted_deficit
from rope_patch.searching.measure.fitness import Fitness


def exhaustive(top):
    return [stretched(power, top=t) for power in (0.3, 1, 4) for t in (top, 2 * top)]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_giving_up_never_changes_who_wins(name, monkeypatch):
    monkeypatch.setattr(scorer, "_CPU_BATCH_TOKENS", 2 * LENGTH)  # so that there are rounds
    on = Fitness(load(name), questions(), Extension("longrope", length=LENGTH))
    whole = [on.measure(candidate) for candidate in exhaustive(2.0)]
    winner = min(range(len(whole)), key=lambda i: whole[i].fitness)
    for order in (range(len(whole)), reversed(range(len(whole)))):
        best, read, stopped = None, 0, 0
        for i in order:
            against = None if best is None else whole[best]
            found = on.measure(exhaustive(2.0)[i], against)
            read += found.tokens
            if found.complete:
                assert found.fitness == whole[i].fitness
                if best is None or found.fitness < whole[best].fitness:
                    best = i
            else:
                stopped += 1
                assert found.fitness > whole[best].fitness
                assert whole[i].fitness > whole[best].fitness
                assert None in found.nll
        assert best == winner
        assert stopped >= 2
        assert read < sum(found.tokens for found in whole) - stopped * LENGTH


def test_a_candidate_that_cannot_win_even_without_loss_is_given_up_at_any_time():
    ones = [1.0] * 4
    assert predicted_deficit({0: 4.1}, ones, ones, list("abcd")) is not None
    assert predicted_deficit({0: 3.9}, ones, ones, list("abcd")) is None


def test_hard_samples_that_the_best_one_has_still_before_it_count():
    """Behind on each so far, and yet certain to win if it goes on as it does."""
    theirs = [0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0]
    mine = {i: 1.0 + 0.001 * i for i in range(4)}
    assert predicted_deficit(mine, theirs, [1.0] * 8, list("abcdefgh")) is None
    assert predicted_deficit(mine, [0.1] * 8, [1.0] * 8, list("abcdefgh")) == pytest.approx(
        0.9, abs=0.02
    )


def test_candidates_that_would_win_are_rarely_given_up():
    generator = torch.Generator().manual_seed(0)
    groups = [str(i) for i in range(16)]
    won, lost, right = 0, 0, 0
    for _ in range(2000):
        theirs, mine = torch.rand(2, 16, generator=generator, dtype=torch.float64).exp().tolist()
        looks = [
            predicted_deficit(dict(enumerate(mine[:n])), theirs, [1.0] * 16, groups)
            for n in (4, 8, 12)
        ]
        given_up = any(look is not None for look in looks)
        wins = sum(mine) < sum(theirs)
        won += wins
        lost += given_up and wins
        right += given_up and not wins
    assert lost <= 0.005 * won
    assert right > 50


def test_samples_of_one_text_are_one():
    """Sixteen questions to two texts say no more than these texts do."""
    theirs, mine = [1.0] * 32, {i: 1.5 + 0.01 * i for i in range(16)}
    assert predicted_deficit(mine, theirs, theirs, [str(i) for i in range(32)]) is not None
    assert predicted_deficit(mine, theirs, theirs, [str(i // 8) for i in range(32)]) is None
