"""Test the rules of a search with every strategy: budgets, replays, failures and candidates."""

import itertools
import math

import pytest
import torch
from synthetic_fitness import GEOMETRIES, SPACES, Landscape, proposals, run

from rope_patch.geometry import Geometry
from rope_patch.methods import build, registered_methods
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import SeenRotations
from rope_patch.searching.strategies.registry import STRATEGIES

EVOLUTIONS, SCANS = ("longrope2", "longrope"), ("yarn-rcd", "ntk-rcd")
strategies = pytest.mark.parametrize("name", STRATEGIES)


def rotations(evaluations, space):
    """Return each candidate's rotation to twelve digits, so that rounding does not count."""
    return [
        (
            *(f"{number:.12g}" for number in candidate.stretch(space)),
            f"{candidate.attention_factor(space):.12g}",
            candidate.options.get("start_tokens", 0),
        )
        for candidate, _ in evaluations
    ]


@strategies
@pytest.mark.parametrize("budget", [1, 2, 3, 14])
def test_budgets_are_kept_and_candidates_are_unique(name, budget):
    evaluations = run(proposals(name, budget=budget), Landscape(SPACES["tiny"], 0))
    assert len(evaluations) == (min(budget, 12) if name in SCANS else budget)
    rotation_keys = rotations(evaluations, SPACES["tiny"])
    assert len(set(rotation_keys)) == len(rotation_keys)


@pytest.mark.parametrize("name", EVOLUTIONS)
@pytest.mark.parametrize("model", ["llama-3", "phi-2"])
def test_large_budgets_are_kept_and_candidates_are_unique(name, model):
    space = SPACES[model]
    evaluations = run(proposals(name, model, 300), Landscape(space, 0))
    assert len(set(rotations(evaluations, space))) == len(evaluations) == 300
    assert {candidate.origin for candidate, _ in evaluations} == {"start", "mutation", "crossover"}


@strategies
def test_the_same_fitnesses_give_the_same_candidates(name):
    fitness = Landscape(SPACES["tiny"], 0)
    first = run(proposals(name, budget=12), fitness)
    # Replay as after a restart: send the stored fitnesses and measure nothing.
    remembered = iter([value for _, value in first])
    replayed = run(proposals(name, budget=12), lambda candidate: next(remembered))
    assert first == replayed
    if name not in SCANS:
        assert first != run(proposals(name, budget=12, seed=2), fitness)
        other = run(proposals(name, budget=12), lambda candidate: -fitness(candidate))
        assert [c for c, _ in first] != [c for c, _ in other]


@strategies
def test_resumable_strategies_continue_a_smaller_budget(name):
    fitness = Landscape(SPACES["tiny"], 0)
    small = run(proposals(name, budget=10), fitness)
    large = run(proposals(name, budget=12), fitness)
    if STRATEGIES[name].resumable:
        assert large[: len(small)] == small


@strategies
def test_stretches_rise_from_pair_to_pair(name):
    space = SPACES["phi-3-mini"]
    for candidate, _ in run(proposals(name, "phi-3-mini", 14), Landscape(space, 3)):
        stretch = candidate.stretch(space)
        assert all(after >= here * (1 - 1e-12) for here, after in itertools.pairwise(stretch))
        assert stretch[0] >= 1 - 1e-12
        assert all(map(math.isfinite, stretch))


@strategies
def test_failed_candidates_do_not_end_a_search(name):
    """Failed candidates have an infinite fitness."""
    fitness = Landscape(SPACES["tiny"], 0)
    odd = itertools.count()
    evaluations = run(
        proposals(name, budget=14),
        lambda candidate: fitness(candidate) if next(odd) % 2 else math.inf,
    )
    assert len(evaluations) == (12 if name in SCANS else 14)
    assert len(run(proposals(name, budget=11), lambda candidate: math.inf)) == 11


@strategies
def test_strategies_declare_whether_they_search_the_attention_factor(name):
    space = SPACES["tiny"]
    evaluations = run(proposals(name, budget=14), Landscape(space, 0))
    factors = {candidate.attention_factor(space) for candidate, _ in evaluations}
    assert (len(factors) > 1) == STRATEGIES[name].searches_attention_factor


@strategies
def test_every_candidate_builds_a_method_from_plain_data(name):
    space = SPACES["smollm2"]
    for candidate, _ in run(proposals(name, "smollm2", 12), Landscape(space, 0)):
        assert candidate.method in registered_methods()
        for value in candidate.options.values():
            assert isinstance(value, (bool, int, float, list))
        build(candidate.method, factor=space.factor, **candidate.options).frequencies(
            space.geometry
        )


@strategies
def test_a_single_pair_is_refused(name):
    space = SearchSpace(Geometry(head_dim=2, theta=1e4, trained_length=64), 4.0)
    with pytest.raises(ValueError, match="at least two rotated pairs, got 1"):
        next(STRATEGIES[name].propose(space, 10, 1))


@strategies
def test_strategies_have_a_description_and_a_paper(name):
    strategy = STRATEGIES[name]
    assert "\n" not in strategy.description
    assert "arXiv:" in strategy.paper


def test_pairs_with_frequency_0_stay_unchanged():
    """Some frequencies of a model may be 0, and stay so."""
    frequencies = GEOMETRIES["tiny"].inv_freq()
    frequencies[-4:] = 0
    geometry = Geometry(
        head_dim=32, theta=1e4, trained_length=256, base=tuple(frequencies.tolist())
    )
    space = SearchSpace(geometry, 4.0)
    for name, strategy in STRATEGIES.items():
        for candidate, _ in run(strategy.propose(space, 10, 1), lambda candidate: 1.0):
            method = build(candidate.method, factor=4.0, **candidate.options)
            inv_freq = method.frequencies(geometry).inv_freq
            assert torch.isfinite(inv_freq).all(), name
            assert (inv_freq[-4:] == 0).all(), name
            assert candidate.stretch(space)[-4:] == [1.0] * 4, name


def test_rotations_that_differ_by_rounding_alone_count_once():
    seen = SeenRotations(SPACES["tiny"])

    def candidate(stretch, **options):
        return Candidate("", "longrope", {"long_factor": [stretch] * 16, **options})

    assert seen.add_if_new(Candidate("", "linear"))
    assert not seen.add_if_new(candidate(4.0 + 1e-9, attention_factor=1.0))
    assert seen.add_if_new(candidate(4.001, attention_factor=1.0))
    assert seen.add_if_new(candidate(4.0, attention_factor=1.1))
    assert seen.add_if_new(candidate(4.0, attention_factor=1.0, start_tokens=4))
    assert len(seen) == 4
