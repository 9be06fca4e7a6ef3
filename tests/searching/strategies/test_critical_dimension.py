"""Test critical dimensions and the scans over them by their formulas."""

import itertools
import math

import pytest
from synthetic_fitness import GEOMETRIES, SPACES

from rope_patch.geometry import Geometry
from rope_patch.methods import build
from rope_patch.searching.candidates import SearchSpace
from rope_patch.searching.strategies.base import critical_dimension, critical_dimensions
from rope_patch.searching.strategies.critical_dimension import (
    ntk_rcd,
    rotations_of_pair,
    yarn_rcd,
)

models = pytest.mark.parametrize("model", GEOMETRIES)


def test_critical_dimensions_are_those_published_by_longrope2():
    # LongRoPE2's Phi-3-mini has a trained length of 2,048 tokens; its Llama-3 is the 8B model.
    assert (
        critical_dimension(SearchSpace(Geometry(head_dim=96, theta=1e4, trained_length=2048), 64.0))
        == 31
    )
    assert critical_dimension(SPACES["llama-3"]) == 35


@models
def test_the_critical_dimension_is_the_first_without_a_full_rotation(model):
    geometry, space = GEOMETRIES[model], SPACES[model]
    is_rotated = (geometry.inv_freq() * geometry.trained_length / (2 * math.pi) >= 1).tolist()
    assert critical_dimension(space) == is_rotated.index(False)


@models
def test_a_scan_has_about_ten_evenly_spaced_pairs(model):
    pairs, top = critical_dimensions(SPACES[model]), critical_dimension(SPACES[model])
    assert pairs[0] == top
    assert 8 <= len(set(pairs)) == len(pairs) <= 14
    ordered = sorted(pairs, reverse=True)
    (step,) = {round(a - b, 9) for a, b in itertools.pairwise(ordered)}
    assert step == 2 ** round(math.log2(step))
    assert 0.6 * top <= ordered[-1] < 0.6 * top + step
    assert sorted(pairs[:2]) == [ordered[-1], top]  # a budget of two sees both ends


@models
def test_ntk_stretches_the_critical_dimension_by_the_factor(model):
    space = SPACES[model]
    for pair in (p for p in critical_dimensions(space) if p == int(p)):
        stretch = ntk_rcd(space, pair).stretch(space)
        assert stretch[int(pair)] == pytest.approx(4.0, rel=1e-12)
        # All others by the same base: a power of the pair's index.
        expected = [4.0 ** (i / pair) for i in range(space.pairs)]
        assert stretch == pytest.approx(expected, rel=1e-12)


@models
def test_yarn_ends_its_ramp_at_the_critical_dimension(model):
    space, geometry = SPACES[model], GEOMETRIES[model]
    attention_factor = 0.1 * math.log(4) + 1
    for pair in critical_dimensions(space):
        candidate = yarn_rcd(space, pair)
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
    fast = []
    for pair in critical_dimensions(space):
        options = yarn_rcd(space, pair).options
        fast.append(options["beta_fast"])
        assert options["beta_fast"] >= 2 * options["beta_slow"]
    assert min(fast) == 32
    assert max(fast) > 64


def test_rotations_are_those_of_the_running_frequencies():
    start = build("llama3", factor=8).frequencies(GEOMETRIES["llama-3"]).inv_freq
    geometry = Geometry(head_dim=128, theta=5e5, trained_length=131072, base=tuple(start.tolist()))
    for pair in (0.5, 3.0, 20.25, 40.0, 63.0):
        rotations = rotations_of_pair(geometry, pair)
        assert geometry.pair_with_rotations(rotations) == pytest.approx(pair, abs=1e-9)
    for pair in (3, 20, 40, 63):
        expected = start[pair].item() * 131072 / (2 * math.pi)
        assert rotations_of_pair(geometry, pair) == pytest.approx(expected, rel=1e-12)
