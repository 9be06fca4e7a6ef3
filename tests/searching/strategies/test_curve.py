"""Test the curve strategy: known methods as curves, bounds, and its trust region."""

import dataclasses
import itertools
import math
import sys

import pytest
from synthetic_fitness import GEOMETRIES, SPACES, Landscape, proposals, run, scan

from rope_patch.methods import Geometry, build
from rope_patch.searching import Candidate, SearchSpace, TrustRegion
from rope_patch.searching.strategies.curve import Curve, as_curve, bounds, initial_points

optuna = pytest.importorskip("optuna")


@dataclasses.dataclass(frozen=True)
class Point:
    x: float


models = pytest.mark.parametrize("model", GEOMETRIES)


def stretches(curve, pairs):
    return pytest.approx(curve.stretch(pairs), rel=1e-12)


@models
@pytest.mark.parametrize("factor", [1.5, 4.0, 32.0])
def test_known_methods_are_curves(model, factor):
    """Compare with the written-out formulas to float64's rounding; YaRN's ramp is its authors'."""
    geometry, pairs = GEOMETRIES[model], SPACES[model].pairs
    space = SearchSpace(geometry, factor)
    assert [factor] * pairs == stretches(as_curve(space, Candidate("", "linear")), pairs)
    ntk = [factor ** (i / (pairs - 1)) for i in range(pairs)]
    assert ntk == stretches(as_curve(space, Candidate("", "ntk")), pairs)

    def end(rotations):
        length, theta = geometry.trained_length, geometry.theta
        return pairs * math.log(length / (2 * math.pi * rotations)) / math.log(theta)

    low, high = max(math.floor(end(32)), 0), min(math.ceil(end(1)), 2 * pairs - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(pairs)]
    yarn = as_curve(space, Candidate("", "yarn"))
    assert [1 / (1 - r + r / factor) for r in ramp] == stretches(yarn, pairs)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)
    # The package's methods agree.
    for method in ("linear", "ntk", "yarn"):
        assert_is_a_curve(space, method)


def assert_is_a_curve(space, method):
    candidate = Candidate("", method)
    assert candidate.stretch(space) == stretches(as_curve(space, candidate), space.pairs)


@models
def test_yarn_with_another_critical_pair_is_a_curve(model):
    space = SPACES[model]
    for pair, candidate in scan("yarn-rcd", space).items():
        curve = as_curve(space, candidate)
        assert curve.high == pytest.approx(pair, rel=1e-9)
        assert candidate.stretch(space) == stretches(curve, space.pairs)


def test_ntk_with_another_critical_pair_is_a_curve_up_to_that_pair():
    space = SPACES["llama-3"]
    ntk = scan("ntk-rcd", space)[29].stretch(space)
    curve = Curve(high=29, width=29, top=4.0, shape=0.0, attention_factor=1.0).stretch(64)
    assert curve[:30] == pytest.approx(ntk[:30], rel=1e-12)
    assert curve[30:] == pytest.approx([4.0] * 34, rel=1e-12)


def test_other_methods_are_refused_as_curves():
    with pytest.raises(ValueError, match="llama3"):
        as_curve(SPACES["llama-3"], Candidate("", "llama3"))


@pytest.mark.parametrize("shape", [-3.0, -1.0, -1e-5, 0.0, 1e-5, 1.0, 3.0])
def test_a_curve_is_a_power_mean_and_rises(shape):
    curve = Curve(high=20.5, width=13.25, top=6.0, shape=shape, attention_factor=1.0)
    stretch = curve.stretch(32)
    assert all(here <= after for here, after in itertools.pairwise(stretch))
    assert stretch[:8] == [1.0] * 8
    assert stretch[21:] == pytest.approx([6.0] * 11, rel=1e-14)
    for pair in range(8, 21):
        ramp = (pair - 7.25) / 13.25
        mean = 6.0**ramp if not shape else (1 - ramp + ramp * 6.0**shape) ** (1 / shape)
        assert stretch[pair] == pytest.approx(mean, rel=1e-9)


@models
def test_initial_points_are_known_methods_within_the_bounds(model):
    space, limits = SPACES[model], bounds(SPACES[model])
    first = initial_points(space)
    assert {"yarn", "ntk", "linear"} <= {candidate.method for candidate, _ in first}
    assert first[0][0] == Candidate("yarn", "yarn")
    for start, curve in first:
        assert start.stretch(space) == stretches(curve, space.pairs)
        for name in ("width", "top", "shape", "attention_factor"):
            low, high = limits[name]
            assert low <= getattr(curve, name) <= high, (name, start)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seed"), [("tiny", 1), ("llama-3", 0)])
def test_forty_evaluations_beat_two_hundred_of_evolution(model, seed):
    """The optimum has evolution's attention factor, so that evolution can reach it."""
    space = SPACES[model]
    attention_factor = Candidate(
        "", "longrope", {"long_factor": [1.0] * space.pairs}
    ).attention_factor(space)
    fitness = Landscape(space, seed, attention_factor)
    curve = [value for _, value in run(proposals("curve", model, 40), fitness)]
    assert len(curve) == 40
    assert min(curve) < 0.5 * min(curve[:8])
    for name in ("longrope", "longrope2"):
        evolved = [value for _, value in run(proposals(name, model, 200), fitness)]
        assert len(evolved) == 200
        assert min(curve) < min(evolved), name


def test_curves_may_start_from_running_frequencies():
    base = build("llama3", factor=8).frequencies(GEOMETRIES["llama-3"]).inv_freq
    geometry = Geometry(head_dim=128, theta=5e5, trained_length=131072, base=tuple(base.tolist()))
    space = SearchSpace(geometry, 2.0)
    for method in ("linear", "ntk", "yarn"):
        assert_is_a_curve(space, method)


def test_optuna_is_loaded_late_and_left_unchanged(capfd):
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        run(proposals("curve", budget=10), Landscape(SPACES["tiny"], 0))
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
    assert capfd.readouterr().err == ""
    module = sys.modules["rope_patch.searching.strategies.trust_region"]
    assert not hasattr(module, "optuna")


def test_a_missing_optuna_is_an_error_before_the_first_candidate(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[search\]'"):
        next(proposals("curve", budget=10))


def test_the_region_shrinks_after_failures_and_grows_after_success():
    region = TrustRegion({"x": (0.0, 10.0)})
    region.add(Point(5.0), 1.0)
    assert region._box() == {"x": (1.0, 9.0)}
    region.tell(Point(6.0), 0.5)
    assert region._box() == {"x": (2.0, 10.0)}  # of the same size, around the better point
    for _ in range(3):
        region.tell(Point(1.0), 2.0)
    low, high = region._box()["x"]
    assert (low, high) == pytest.approx((6 - 2.4, 6 + 2.4))
    region.tell(Point(6.5), 0.4)
    low, high = region._box()["x"]
    assert (low, high) == pytest.approx((6.5 - 3.12, 6.5 + 3.12))
    proposal = region.ask(1)
    assert low <= proposal.x <= high
    assert proposal == region.ask(1) != region.ask(2)
