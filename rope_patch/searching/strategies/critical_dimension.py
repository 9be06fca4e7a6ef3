"""The cheapest search: one number, the pair from which on everything is interpolated in full.

In theory that is the first pair that made no whole turn in training. LongRoPE2 (arXiv:2502.20082,
section 3) finds it lower in real models, since slow pairs are seen too little of in training, and
corrects only it in YaRN and NTK (its YaRN-rcd and NTK-rcd): RULER at 128k rises from 49.4 to 71.5.
"""

from __future__ import annotations

import math

from rope_patch.geometry import Geometry
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import Proposals, SeenRotations, critical_pairs

BETA_FAST = 32.0  # YaRN's: pairs with more turns in training are kept
MIN_BETA_RATIO = 2.0  # the least beta_fast / beta_slow, where a ramp would otherwise invert


def yarn_rcd(space: SearchSpace, pair: float) -> Candidate:
    """YaRN whose ramp ends at a pair, not necessarily a whole one.

    The ramp starts where YaRN's does, at 32 turns. Where models were trained on so many tokens that
    the pair itself makes nearly as many, it starts at twice the pair's.
    """
    slow = rotations_of_pair(space.geometry, pair)
    fast = max(BETA_FAST, MIN_BETA_RATIO * slow)
    options = {"beta_fast": fast, "beta_slow": slow, "truncate": False}
    return Candidate(f"pair {pair:g}", "yarn", options)


def ntk_rcd(space: SearchSpace, pair: float) -> Candidate:
    """The larger base with which a pair is stretched by exactly the factor."""
    geometry = space.geometry
    base = geometry.theta * space.factor ** (geometry.rotary_dim / (2 * pair))
    return Candidate(f"pair {pair:g}", "abf", {"new_theta": base})


def rotations_of_pair(geometry: Geometry, pair: float) -> float:
    """Turns within the trained length, the inverse of `Geometry.pair_with_rotations`."""
    step = 2 * math.log(geometry.theta) / geometry.rotary_dim
    logs = [math.log(frequency) for frequency in geometry.base if frequency > 0]
    if not logs:
        log = -step * pair
    else:
        for place in range(1, len(logs)):
            logs[place] = min(logs[place], logs[place - 1])  # as pair_with_turns reads them
        place = min(int(pair), len(logs) - 1)
        after = logs[place + 1] if place + 1 < len(logs) else logs[place] - step
        log = logs[place] + (pair - place) * (after - logs[place])
    return math.exp(log) * geometry.trained_length / (2 * math.pi)


def propose_yarn(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """YaRN with about ten critical pairs; the seed makes no difference."""
    return _propose_each([yarn_rcd(space, pair) for pair in critical_pairs(space)], space, budget)


def propose_ntk(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """NTK with about ten critical pairs; the seed makes no difference."""
    return _propose_each([ntk_rcd(space, pair) for pair in critical_pairs(space)], space, budget)


def _propose_each(candidates: list[Candidate], space: SearchSpace, budget: int) -> Proposals:
    tried = SeenRotations(space)
    for candidate in candidates:
        if len(tried) < budget and tried.add_if_new(candidate):
            yield candidate
