"""The cheapest search: one number, the critical dimension. From there on, pairs stretch in full.

In theory the critical dimension is the first pair without a full rotation in training. LongRoPE2
(arXiv:2502.20082, section 3) finds it lower in real models, because training shows too little of
slow pairs. Correcting only the critical dimension in YaRN and NTK (YaRN-rcd and NTK-rcd) raises
RULER at 128k from 49.4 to 71.5.
"""

from __future__ import annotations

import math

from rope_patch.geometry import Geometry
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import Proposals, SeenRotations, critical_dimensions

BETA_FAST = 32.0  # YaRN's: pairs with more rotations in training keep their frequency
MIN_BETA_RATIO = 2.0  # the least beta_fast / beta_slow; below 1 the ramp would invert


def yarn_rcd(space: SearchSpace, pair: float) -> Candidate:
    """Return YaRN with a ramp that ends at a pair, which may be fractional.

    The ramp starts at 32 rotations, as YaRN's does. If the pair itself makes more than 16 rotations
    in training, the ramp starts at twice the pair's.
    """
    slow = rotations_of_pair(space.geometry, pair)
    fast = max(BETA_FAST, MIN_BETA_RATIO * slow)
    options = {"beta_fast": fast, "beta_slow": slow, "truncate": False}
    return Candidate(f"pair {pair:g}", "yarn", options)


def ntk_rcd(space: SearchSpace, pair: float) -> Candidate:
    """Return the larger base that stretches a pair by exactly the factor."""
    geometry = space.geometry
    base = geometry.theta * space.factor ** (geometry.rotary_dim / (2 * pair))
    return Candidate(f"pair {pair:g}", "abf", {"new_theta": base})


def rotations_of_pair(geometry: Geometry, pair: float) -> float:
    """Return a pair's rotations within the trained length.

    This is the inverse of `Geometry.pair_with_rotations`; the pair may be fractional.
    """
    step = 2 * math.log(geometry.theta) / geometry.rotary_dim
    logs = [math.log(frequency) for frequency in geometry.base if frequency > 0]
    if not logs:
        log = -step * pair
    else:
        for index in range(1, len(logs)):
            logs[index] = min(logs[index], logs[index - 1])  # pair_with_rotations does the same
        index = min(int(pair), len(logs) - 1)
        next_log = logs[index + 1] if index + 1 < len(logs) else logs[index] - step
        log = logs[index] + (pair - index) * (next_log - logs[index])
    return math.exp(log) * geometry.trained_length / (2 * math.pi)


def propose_yarn(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """Propose YaRN with about ten critical dimensions; the seed has no effect."""
    return _propose_each(
        [yarn_rcd(space, pair) for pair in critical_dimensions(space)], space, budget
    )


def propose_ntk(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """Propose NTK with about ten critical dimensions; the seed has no effect."""
    return _propose_each(
        [ntk_rcd(space, pair) for pair in critical_dimensions(space)], space, budget
    )


def _propose_each(candidates: list[Candidate], space: SearchSpace, budget: int) -> Proposals:
    seen = SeenRotations(space)
    for candidate in candidates:
        if len(seen) < budget and seen.add_if_new(candidate):
            yield candidate
