"""Test lower bounds of the rope base against brute force."""

import math

import numpy as np
import pytest
import torch

from rope_patch.diagnosing.base_bounds import (
    MAX_LENGTH,
    base_bound,
    critical_base,
    failing_distance,
)


def brute_force_minimum(rotary_dim, base, length):
    """Return the minimum of sum_i cos(m base^(-2i / d)) over m up to the length, by brute force."""
    pairs = range(rotary_dim // 2)
    return min(
        math.fsum(math.cos(m * base ** (-2 * i / rotary_dim)) for i in pairs)
        for m in range(length + 1)
    )


@pytest.mark.parametrize("length", [1, 100, 511, 512, 513, 1500])
@pytest.mark.parametrize("base", [20.0, 300.0, 1e4])
def test_failing_distance_matches_brute_force(base, length):
    inv_freq = base ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert (failing_distance(inv_freq, length) is None) == (
        brute_force_minimum(32, base, length) >= 0
    )


@pytest.mark.parametrize("near", [1, 30, 200, 1000])
def test_failing_distance_has_a_negative_sum_from_any_start(near):
    inv_freq = 300.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    m = failing_distance(inv_freq, 1000, near)
    assert sum(math.cos(m * f) for f in inv_freq.tolist()) < 0


@pytest.mark.parametrize(("rotary_dim", "length"), [(16, 40), (32, 200), (64, 300)])
def test_bound_is_the_smallest_base_without_negative_sums(rotary_dim, length):
    bound = base_bound(rotary_dim, length)
    assert brute_force_minimum(rotary_dim, bound, length) >= -1e-9
    for step in range(1, 300):  # smaller bases, down to two fifths of the bound
        assert brute_force_minimum(rotary_dim, bound / 1.003**step, length) < 0


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 16384])
def test_bound_of_real_heads_and_lengths(length):
    bound = base_bound(128, length)
    sums = []
    for base in (bound, bound / 1.003):
        inv_freq = base ** (-np.arange(0, 128, 2) / 128)
        sums.append(np.cos(np.outer(np.arange(length + 1), inv_freq)).sum(-1).min())
    assert sums[0] >= -1e-9 > sums[1]


def test_no_bound():
    assert base_bound(2, 100) is None  # one pair is negative at some distance for every base
    assert base_bound(128, MAX_LENGTH + 1) is None


def test_critical_base_matches_the_paper():
    # Liu et al. 2023, arXiv:2310.05209: theta^(log_{4096 / 2 pi}(16384 / 2 pi)).
    expected = 1e4 ** math.log(16384 / (2 * math.pi), 4096 / (2 * math.pi))
    assert critical_base(1e4, 4096, 16384) == pytest.approx(expected, rel=1e-12)
    assert critical_base(1e4, 4096, 4096) == pytest.approx(1e4, rel=1e-12)
    assert critical_base(1e4, 4, 4096) is None
