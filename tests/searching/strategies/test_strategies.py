"""Every strategy keeps the rules of a search."""

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


def rotations(tried, space):
    """What is compared: numbers to twelve digits, so only rounding counts as equal."""
    return [
        (
            *(f"{number:.12g}" for number in candidate.stretch(space)),
            f"{candidate.attention_factor(space):.12g}",
            candidate.options.get("start_tokens", 0),
        )
        for candidate, _ in tried
    ]


@strategies
@pytest.mark.parametrize("budget", [1, 2, 3, 14])
def test_budgets_are_kept_and_nothing_comes_twice(name, budget):
    tried = run(proposals(name, budget=budget), Landscape(SPACES["tiny"], 0))
    assert len(tried) == (min(budget, 12) if name in SCANS else budget)
    found = rotations(tried, SPACES["tiny"])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", EVOLUTIONS)
@pytest.mark.parametrize("model", ["llama-3", "phi-2"])
def test_large_budgets_too(name, model):
    space = SPACES[model]
    tried = run(proposals(name, model, 300), Landscape(space, 0))
    assert len(set(rotations(tried, space))) == len(tried) == 300
    assert {candidate.origin for candidate, _ in tried} == {"start", "mutation", "crossover"}


@strategies
def test_the_same_answers_get_the_same_candidates(name):
    fitness = Landscape(SPACES["tiny"], 0)
    first = run(proposals(name, budget=12), fitness)
    # Replayed as after a restart: remembered numbers are sent, nothing is measured.
    remembered = iter([value for _, value in first])
    again = run(proposals(name, budget=12), lambda candidate: next(remembered))
    assert first == again
    if name not in SCANS:
        assert first != run(proposals(name, budget=12, seed=2), fitness)
        other = run(proposals(name, budget=12), lambda candidate: -fitness(candidate))
        assert [c for c, _ in first] != [c for c, _ in other]


@strategies
def test_who_says_so_goes_on_where_a_smaller_budget_ended(name):
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
def test_failures_are_survived(name):
    """A candidate that fails is sent infinity: the best of the others is still looked for."""
    fitness = Landscape(SPACES["tiny"], 0)
    odd = itertools.count()
    tried = run(
        proposals(name, budget=14),
        lambda candidate: fitness(candidate) if next(odd) % 2 else math.inf,
    )
    assert len(tried) == (12 if name in SCANS else 14)
    assert len(run(proposals(name, budget=11), lambda candidate: math.inf)) == 11


@strategies
def test_who_searches_the_attention_factor_says_so(name):
    space = SPACES["tiny"]
    tried = run(proposals(name, budget=14), Landscape(space, 0))
    factors = {candidate.attention_factor(space) for candidate, _ in tried}
    assert (len(factors) > 1) == STRATEGIES[name].searches_attention_factor


@strategies
def test_patching_takes_every_candidate_and_its_result_is_plain_data(name):
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
def test_they_are_described(name):
    strategy = STRATEGIES[name]
    assert "\n" not in strategy.description
    assert "arXiv:" in strategy.paper


def test_a_pair_that_stands_still_is_passed_over():
    """A model may rotate by frequencies of which some are zero: those are as they were."""
    frequencies = GEOMETRIES["tiny"].inv_freq()
    frequencies[-4:] = 0
    geometry = Geometry(
        head_dim=32, theta=1e4, trained_length=256, base=tuple(frequencies.tolist())
    )
    space = SearchSpace(geometry, 4.0)
    for name, strategy in STRATEGIES.items():
        for candidate, _ in run(strategy.propose(space, 10, 1), lambda candidate: 1.0):
            method = build(candidate.method, factor=4.0, **candidate.options)
            found = method.frequencies(geometry).inv_freq
            assert torch.isfinite(found).all(), name
            assert (found[-4:] == 0).all(), name
            assert candidate.stretch(space)[-4:] == [1.0] * 4, name


def test_rotations_that_differ_by_rounding_alone_count_once():
    tried = SeenRotations(SPACES["tiny"])

    def given(stretch, **options):
        return Candidate("", "longrope", {"long_factor": [stretch] * 16, **options})

    assert tried.add_if_new(Candidate("", "linear"))
    assert not tried.add_if_new(given(4.0 + 1e-9, attention_factor=1.0))
    assert tried.add_if_new(given(4.001, attention_factor=1.0))
    assert tried.add_if_new(given(4.0, attention_factor=1.1))
    assert tried.add_if_new(given(4.0, attention_factor=1.0, start_tokens=4))
    assert len(tried) == 4
