"""Test the rules of a search with every strategy, and scans and evolutions by their papers."""

import functools
import itertools
import math
import random

import pytest
import torch
from synthetic_fitness import GEOMETRIES, SPACES, Landscape, proposals, run, scan

from rope_patch.methods import Geometry, build, registered_methods
from rope_patch.searching import (
    STRATEGIES,
    Candidate,
    CriticalDimensionOperators,
    FactorOperators,
    PopulationSizes,
    SearchSpace,
)

EVOLUTIONS, SCANS = ("longrope2", "longrope"), ("yarn-rcd", "ntk-rcd")
BUDGET = 10  # the curve begins with eight known rotations; each other one takes it a while
strategies = pytest.mark.parametrize("name", STRATEGIES)
models = pytest.mark.parametrize("model", GEOMETRIES)


@functools.cache
def finished(name):
    """Return the candidates of a search of the tiny model's space, with their fitnesses."""
    return run(proposals(name, budget=BUDGET), Landscape(SPACES["tiny"], 0))


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


def rises(stretch):
    return all(after >= here * (1 - 1e-12) for here, after in itertools.pairwise(stretch))


@strategies
def test_candidates_are_new_rotations_by_plain_data_that_rise_from_pair_to_pair(name):
    strategy, space = STRATEGIES[name], SPACES["tiny"]
    evaluations = finished(name)
    assert len(evaluations) == BUDGET
    assert len(set(rotations(evaluations, space))) == BUDGET
    for candidate, _ in evaluations:
        assert candidate.method in registered_methods()
        assert all(isinstance(x, bool | int | float | list) for x in candidate.options.values())
        method = build(candidate.method, factor=space.factor, **candidate.options)
        assert torch.isfinite(method.frequencies(space.geometry).inv_freq).all()
        stretch = candidate.stretch(space)
        assert rises(stretch)
        assert stretch[0] >= 1 - 1e-12
        assert all(map(math.isfinite, stretch))
    factors = {candidate.attention_factor(space) for candidate, _ in evaluations}
    assert (len(factors) > 1) == strategy.searches_attention_factor
    assert "\n" not in strategy.description
    assert "arXiv:" in strategy.paper


@strategies
@pytest.mark.parametrize("budget", [1, 3, 10])
def test_budgets_are_kept(name, budget):
    """A third of the candidates fails, which is an infinite fitness."""
    fitness, number = Landscape(SPACES["phi-3-mini"], 3), itertools.count()
    evaluations = run(
        proposals(name, "phi-3-mini", budget=budget),
        lambda candidate: fitness(candidate) if next(number) % 3 else math.inf,
    )
    most = len(scan(name, SPACES["phi-3-mini"])) if name in SCANS else budget
    assert len(evaluations) == min(budget, most)
    assert all(rises(candidate.stretch(SPACES["phi-3-mini"])) for candidate, _ in evaluations)


@strategies
def test_a_search_without_a_success_goes_on_to_its_budget(name):
    assert len(run(proposals(name, budget=9), lambda candidate: math.inf)) == 9


@strategies
def test_the_same_fitnesses_give_the_same_candidates(name):
    """Replay as after a restart: send the stored fitnesses and measure nothing."""
    remembered = iter([value for _, value in finished(name)])
    assert run(proposals(name, budget=BUDGET), lambda candidate: next(remembered)) == finished(name)
    fitness = Landscape(SPACES["tiny"], 0)
    if STRATEGIES[name].resumable:  # a smaller budget begins with the same
        assert run(proposals(name, budget=9), fitness) == finished(name)[:9]
    if name not in SCANS:
        other_seed = run(proposals(name, budget=BUDGET, seed=2), fitness)
        worse = run(proposals(name, budget=BUDGET), lambda candidate: -fitness(candidate))
        for other in (other_seed, worse):
            assert [c for c, _ in other] != [c for c, _ in finished(name)]


@strategies
def test_a_single_pair_is_refused(name):
    space = SearchSpace(Geometry(head_dim=2, theta=1e4, trained_length=64), 4.0)
    with pytest.raises(ValueError, match="two rotated pairs, got 1"):
        next(STRATEGIES[name].propose(space, 10, 1))


@strategies
def test_pairs_with_frequency_0_stay_unchanged(name):
    frequencies = GEOMETRIES["tiny"].inv_freq()
    frequencies[-4:] = 0
    geometry = Geometry(
        head_dim=32, theta=1e4, trained_length=256, base=tuple(frequencies.tolist())
    )
    space = SearchSpace(geometry, 4.0)
    for candidate, _ in run(STRATEGIES[name].propose(space, 9, 1), lambda candidate: 1.0):
        inv_freq = build(candidate.method, factor=4.0, **candidate.options).frequencies(geometry)
        assert torch.isfinite(inv_freq.inv_freq).all()
        assert (inv_freq.inv_freq[-4:] == 0).all()
        assert candidate.stretch(space)[-4:] == [1.0] * 4


def test_rotations_that_differ_by_rounding_alone_have_one_key():
    def key(stretch, **options):
        options = {"long_factor": [stretch] * 16, "attention_factor": 1.0} | options
        return Candidate("", "longrope", options).rotation_key(SPACES["tiny"], digits=6)

    same = key(4.0 + 1e-9)
    assert Candidate("", "linear").rotation_key(SPACES["tiny"], digits=6) == same
    others = [key(4.001), key(4.0, attention_factor=1.1), key(4.0, start_tokens=4)]
    assert len({same, *others}) == 4


# -- scans over critical dimensions ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "pair"),
    [
        # LongRoPE2's Phi-3-mini has a trained length of 2,048 tokens; its Llama-3 is the 8B model.
        (SearchSpace(Geometry(head_dim=96, theta=1e4, trained_length=2048), 64.0), 31),
        (SPACES["llama-3"], 35),
    ],
)
def test_a_scan_begins_at_the_critical_dimension_published_by_longrope2(space, pair):
    assert next(iter(scan("yarn-rcd", space))) == pair


@models
def test_a_scan_has_about_ten_evenly_spaced_pairs_from_the_critical_one_down(model):
    geometry, pairs = GEOMETRIES[model], list(scan("ntk-rcd", SPACES[model]))
    is_rotated = (geometry.inv_freq() * geometry.trained_length / (2 * math.pi) >= 1).tolist()
    top = is_rotated.index(False)  # the first pair without a full rotation
    assert pairs[0] == top
    assert 8 <= len(pairs) <= 14
    ordered = sorted(pairs, reverse=True)
    (step,) = {round(a - b, 9) for a, b in itertools.pairwise(ordered)}
    assert step == 2 ** round(math.log2(step))
    assert 0.6 * top <= ordered[-1] < 0.6 * top + step
    assert sorted(pairs[:2]) == [ordered[-1], top]  # a budget of two sees both ends


@models
def test_ntk_stretches_the_critical_dimension_by_the_factor(model):
    space = SPACES[model]
    for pair, candidate in scan("ntk-rcd", space).items():
        # All pairs by the same base: a power of the pair's index.
        expected = [4.0 ** (i / pair) for i in range(space.pairs)]
        assert candidate.stretch(space) == pytest.approx(expected, rel=1e-12)


@models
def test_yarn_ends_its_ramp_at_the_critical_dimension(model):
    space, geometry = SPACES[model], GEOMETRIES[model]
    attention_factor = 0.1 * math.log(4) + 1
    for pair, candidate in scan("yarn-rcd", space).items():
        stretch = candidate.stretch(space)
        full = [s == pytest.approx(4.0, rel=1e-9) for s in stretch]
        assert full == [i >= pair for i in range(space.pairs)]
        assert candidate.attention_factor(space) == pytest.approx(attention_factor, rel=1e-15)
        # By the authors' formula in float64: the ramp starts where YaRN's does.
        low = geometry.rotary_dim * math.log(geometry.trained_length / (32 * 2 * math.pi))
        low = max(low / (2 * math.log(geometry.theta)), 0)
        if pair - low < 4:
            continue
        ramp = [min(max((i - low) / (pair - low), 0), 1) for i in range(space.pairs)]
        expected = [1 / (1 - r + r / 4) for r in ramp]
        assert stretch == pytest.approx(expected, rel=1e-9)


def test_a_ramp_never_inverts():
    """With so long a trained length, scanned pairs rotate more than 32 times, YaRN's beta_fast."""
    space = SearchSpace(Geometry(head_dim=128, theta=1e6, trained_length=131072), 4.0)
    options = [candidate.options for candidate in scan("yarn-rcd", space).values()]
    assert all(each["beta_fast"] >= 2 * each["beta_slow"] for each in options)
    assert min(each["beta_fast"] for each in options) == 32
    assert max(each["beta_fast"] for each in options) > 64


def test_rotations_are_those_of_the_running_frequencies():
    start = build("llama3", factor=8).frequencies(GEOMETRIES["llama-3"]).inv_freq
    geometry = Geometry(head_dim=128, theta=5e5, trained_length=131072, base=tuple(start.tolist()))
    candidates = scan("yarn-rcd", SearchSpace(geometry, 2.0))
    for pair, candidate in candidates.items():
        rotations = candidate.options["beta_slow"]
        assert geometry.pair_with_rotations(rotations) == pytest.approx(pair, abs=1e-9)
        if pair == int(pair):
            expected = start[int(pair)].item() * 131072 / (2 * math.pi)
            assert rotations == pytest.approx(expected, rel=1e-12)
    assert any(pair == int(pair) for pair in candidates)


# -- evolutions ------------------------------------------------------------------------------------


def test_population_sizes_are_published_ones_at_the_published_budget():
    assert PopulationSizes.for_budget(1344) == PopulationSizes(64, 32, 16, 16)
    assert PopulationSizes.for_budget(5000) == PopulationSizes(64, 32, 16, 16)
    # Population and 40 rounds of children, all times one number, spend the budget.
    small = PopulationSizes.for_budget(200)
    assert small.mutations == small.crossovers == small.parents / 2
    scale = small.population / 64
    assert small.population + 40 * scale * 12 == pytest.approx(200, rel=0.15)


@pytest.mark.parametrize(("name", "model"), [("longrope2", "llama-3"), ("longrope", "phi-2")])
def test_evolution_beats_its_start_by_new_rotations(name, model):
    space = SPACES[model]
    evaluations = run(proposals(name, model, 200), Landscape(space, 1))
    assert len(set(rotations(evaluations, space))) == len(evaluations) == 200
    assert {candidate.origin for candidate, _ in evaluations} == {"start", "mutation", "crossover"}
    values = [value for _, value in evaluations]
    assert min(values) < 0.95 * min(values[:3])


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
    largest = max(max(c.stretch(space)) for c, _ in evaluations)
    assert 4 < largest <= 1.25 * 4 + 1e-9
    starts = {c.options.get("start_tokens", 0) for c, _ in evaluations}
    assert starts == {0, 1, 2, 4, 8, 12, 16}  # up to a sixteenth of 256
    assert all(c.options.get("start_tokens") != 0 for c, _ in evaluations)
    plain = run(proposals("longrope", budget=50, start_tokens=False), Landscape(space, 0))
    assert not any("start_tokens" in c.options for c, _ in plain)


@pytest.mark.parametrize("model", ["tiny", "llama-3", "phi-2"])
def test_longrope2_is_ntk_below_the_critical_dimension(model):
    space = SPACES[model]
    top = int(next(iter(scan("ntk-rcd", space))))
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
        assert math.floor(0.6 * top) <= max(fits)
        critical_pairs.add(max(fits))
    assert len(critical_pairs) > 2


def test_mutations_redraw_three_numbers_in_ten_between_their_neighbours():
    draw = random.Random(0)
    species = FactorOperators(SPACES["llama-2"], start_tokens=False)
    genome = ([1 + 3 * i / 63 for i in range(64)], 0)
    changed = 0
    for _ in range(300):
        stretch, _ = species.mutate(genome, draw)
        assert stretch == sorted(stretch)
        changed += sum(a != b for a, b in zip(genome[0], stretch, strict=True))
    assert changed / (300 * 64) == pytest.approx(0.3, abs=0.02)


def test_crossovers_take_three_numbers_in_ten_from_the_second():
    draw = random.Random(0)
    species = FactorOperators(SPACES["tiny"], start_tokens=False)
    one, two = [2.0] * 16, [2.0 + 1e-9 * i for i in range(16)]
    for _ in range(3000):
        child = species.crossover((one, 0), (two, 0), draw)
        if child is not None:
            assert child[0] == sorted(child[0])
    # Without the constraint in the way: from parents that are all above one another in one pair.
    from_second = 0
    for _ in range(1000):
        child = species.crossover(([1.0, 3.0], 0), ([2.0, 4.0], 0), draw)
        from_second += (child[0][0] == 2) + (child[0][1] == 4)
    assert from_second / 2000 == pytest.approx(0.3, abs=0.03)


def test_mutations_of_the_critical_dimension_keep_valid_stretches():
    species = CriticalDimensionOperators(SPACES["tiny"])
    assert [pair for pair, _ in species.initial_population(8)] == [7, 6, 5, 4]
    assert [pair for pair, _ in species.initial_population(4)] == [7, 4]
    draw = random.Random(0)
    for _ in range(200):
        pair, stretch = species.mutate((6, [4.0] * 4 + [5.0] * 6), draw)
        assert 4 <= pair <= 7
        assert pair + len(stretch) == 16
        assert stretch == sorted(stretch)
        assert 4 <= stretch[0] <= stretch[-1] <= 8
