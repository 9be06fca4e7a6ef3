"""Test both evolutions by their papers: sizes, starts, bounds, mutations and crossovers."""

import math
import random

import pytest
from synthetic_fitness import GEOMETRIES, SPACES, Landscape, proposals, run

from rope_patch.searching.candidates import Candidate
from rope_patch.searching.strategies import evolution, longrope2
from rope_patch.searching.strategies.base import critical_dimension
from rope_patch.searching.strategies.longrope import FactorOperators

EVOLUTIONS = ("longrope2", "longrope")
models = pytest.mark.parametrize("model", GEOMETRIES)


def test_population_sizes_are_published_ones_at_the_published_budget():
    assert evolution.PopulationSizes.for_budget(1344) == evolution.PopulationSizes(64, 32, 16, 16)
    assert evolution.PopulationSizes.for_budget(5000) == evolution.PopulationSizes(64, 32, 16, 16)
    # Population and 40 rounds of children, all times one number, spend the budget.
    small = evolution.PopulationSizes.for_budget(200)
    assert small.mutations == small.crossovers == small.parents / 2
    scale = small.population / 64
    assert small.population + 40 * scale * 12 == pytest.approx(200, rel=0.15)


def test_longrope_starts_from_the_methods_it_names():
    space = SPACES["llama-2"]
    evaluations = run(proposals("longrope", "llama-2", 40), Landscape(space, 0))
    starts = [candidate for candidate, _ in evaluations if candidate.origin == "start"]
    assert starts == [candidate for candidate, _ in evaluations[:3]]
    for start, method in zip(starts, ("linear", "ntk", "yarn"), strict=True):
        expected = Candidate("", method).stretch(space)
        assert start.stretch(space) == pytest.approx(expected, rel=1e-12)
    attention_factor = math.sqrt(1 + math.log(4) / math.log(4096))
    (factor,) = {c.attention_factor(space) for c, _ in evaluations}
    assert factor == pytest.approx(attention_factor, rel=1e-15)


def test_longrope_keeps_its_bounds_and_searches_start_tokens():
    space = SPACES["tiny"]
    evaluations = run(proposals("longrope", budget=300), Landscape(space, 0))
    assert max(max(c.stretch(space)) for c, _ in evaluations) <= 1.25 * 4 + 1e-9
    assert max(max(c.stretch(space)) for c, _ in evaluations) > 4
    starts = {c.options.get("start_tokens", 0) for c, _ in evaluations}
    assert starts == {0, 1, 2, 4, 8, 12, 16}  # up to a sixteenth of 256
    assert all(c.options.get("start_tokens") != 0 for c, _ in evaluations)
    plain = run(proposals("longrope", budget=50, start_tokens=False), Landscape(space, 0))
    assert not any("start_tokens" in c.options for c, _ in plain)


@models
def test_longrope2_is_ntk_below_the_critical_dimension(model):
    space = SPACES[model]
    low, top = math.floor(0.6 * critical_dimension(space)), critical_dimension(space)
    critical_pairs = set()
    for candidate, _ in run(proposals("longrope2", model, 60), Landscape(space, 0)):
        stretch = candidate.stretch(space)
        critical = next(i for i, number in enumerate(stretch) if number >= 4.0 - 1e-9)
        # Larger stretches at the critical pair reach the factor a little before it.
        fits = [
            c
            for c in range(critical, top + 1)
            if stretch[:c] == pytest.approx([stretch[c] ** (i / c) for i in range(c)], rel=1e-9)
            and stretch[c] >= 4 - 1e-9
        ]
        assert fits
        assert max(stretch) <= 8 + 1e-9
        assert low <= max(fits)
        critical_pairs.add(max(fits))
    assert len(critical_pairs) > 2


def test_mutations_redraw_three_numbers_in_ten_between_their_neighbours():
    draw = random.Random(0)
    species = FactorOperators(SPACES["llama-2"], start_tokens=False)
    genome = ([1 + 3 * i / 63 for i in range(64)], 0)
    changed = [0] * 64
    for _ in range(300):
        stretch, _ = species.mutate(genome, draw)
        assert evolution.is_monotone(stretch)
        for i, (a, b) in enumerate(zip(genome[0], stretch, strict=True)):
            changed[i] += a != b
    assert sum(changed) / (300 * 64) == pytest.approx(0.3, abs=0.02)


def test_crossovers_take_three_numbers_in_ten_from_the_second():
    draw = random.Random(0)
    species = FactorOperators(SPACES["tiny"], start_tokens=False)
    one, two = [2.0] * 16, [2.0 + 1e-9 * i for i in range(16)]
    from_second = total = 0
    for _ in range(3000):
        child = species.crossover((one, 0), (two, 0), draw)
        if child is not None:
            assert evolution.is_monotone(child[0])
    # Without the constraint in the way: from parents that are all above one another in one pair.
    for _ in range(1000):
        child = species.crossover(([1.0, 3.0], 0), ([2.0, 4.0], 0), draw)
        from_second += (child[0][0] == 2) + (child[0][1] == 4)
        total += 2
    assert from_second / total == pytest.approx(0.3, abs=0.03)


def test_mutations_of_the_critical_dimension_keep_valid_stretches():
    species = longrope2.CriticalDimensionOperators(SPACES["tiny"])
    assert [pair for pair, _ in species.initial_population(8)] == [7, 6, 5, 4]
    assert [pair for pair, _ in species.initial_population(4)] == [7, 4]
    draw = random.Random(0)
    for _ in range(200):
        pair, stretch = species.mutate((6, [4.0] * 4 + [5.0] * 6), draw)
        assert 4 <= pair <= 7
        assert pair + len(stretch) == 16
        assert evolution.is_monotone(stretch)
        assert stretch[0] >= 4
        assert stretch[-1] <= 8


@pytest.mark.parametrize("name", EVOLUTIONS)
@pytest.mark.parametrize("model", ["tiny", "llama-3"])
def test_evolution_beats_its_start(name, model):
    fitness = Landscape(SPACES[model], 1)
    values = [value for _, value in run(proposals(name, model, 200), fitness)]
    starts = values[:3]
    assert min(values) < 0.95 * min(starts)
    assert min(values) == min(values[3:])
