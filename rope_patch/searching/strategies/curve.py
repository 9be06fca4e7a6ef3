"""The package's own search: a smooth curve of five numbers instead of a stretch for every pair.

The stretch of pair i rises from 1 to `top` while its position on a ramp, r, rises from 0 to 1:

    stretch_i = ((1 - r_i) + r_i * top^shape)^(1 / shape),  r_i = clamp((i - high + width) / width)

This is the power mean of 1 and `top` (the geometric one at shape 0), so it never decreases from
pair to pair. The usual methods are exact members of this family: position
interpolation is a ramp that ended before the first pair; NTK is shape 0 with a ramp over all pairs;
YaRN is shape -1, the harmonic mean, with its own ramp; YaRN with another critical dimension has
another `high`. The attention factor is the fifth number.

Five numbers are few enough for Bayesian optimisation, which needs few evaluations. It starts from
the known methods and works in a trust region (see `trust_region`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rope_patch.methods import build
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.methods.yarn import YaRN
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import (
    Proposals,
    SeenRotations,
    critical_dimension,
    longrope_candidate,
)
from rope_patch.searching.strategies.trust_region import TrustRegion

MIN_WIDTH = 0.001  # pairs: a ramp that is a step, as YaRN's own
GEOMETRIC_EPS = 1e-6  # shapes closer to 0 than this are the geometric mean
CRITICAL_RATIO = 0.8  # real critical dimension / the theoretical one
TOP_MARGIN = 1.3  # stretch behind the critical dimension / the factor
MAX_DUPLICATES = 50  # known rotations in a row that end the search


@dataclass(frozen=True)
class Curve:
    """One member of the family.

    Attributes:
        high: Pair at which the ramp ends, possibly fractional.
        width: Pairs that the ramp spans.
        top: Stretch behind the ramp.
        shape: Exponent of the power mean of 1 and `top` along the ramp.
        attention_factor: Multiplier of cos and sin.
    """

    high: float
    width: float
    top: float
    shape: float
    attention_factor: float

    def stretch(self, pairs: int) -> list[float]:
        """Return the stretch of each pair."""
        return [self._mean((pair - self.high + self.width) / self.width) for pair in range(pairs)]

    def _mean(self, ramp: float) -> float:
        ramp, log = min(max(ramp, 0.0), 1.0), math.log(self.top)
        if abs(self.shape) < GEOMETRIC_EPS:
            return math.exp(ramp * log)
        return math.exp(math.log1p(ramp * math.expm1(self.shape * log)) / self.shape)


def as_curve(space: SearchSpace, candidate: Candidate) -> Curve:
    """Return the curve that equals a known method: linear, NTK or one like YaRN.

    Raises:
        ValueError: Another method.
    """
    attention_factor, last = candidate.attention_factor(space), space.pairs - 1
    if candidate.method == "linear":
        return Curve(0.0, 1.0, space.factor, -1.0, attention_factor)
    if candidate.method == "ntk":
        return Curve(last, last, space.factor, 0.0, attention_factor)
    method = build(candidate.method, factor=space.factor, **candidate.options)
    if not isinstance(method, YaRN):
        raise ValueError(f"expected linear, ntk or yarn, got {candidate.method}")
    low, high = method.ramp_bounds(space.geometry)
    return Curve(high, max(high - low, MIN_WIDTH), space.factor, -1.0, attention_factor)


def initial_points(space: SearchSpace) -> list[tuple[Candidate, Curve]]:
    """Return what is measured first: the known methods, and corrections of them.

    Published searches found critical dimensions at 0.8 of the theoretical one and stretches behind
    it above the factor (LongRoPE2, arXiv:2502.20082). So YaRN and NTK are also tried with these.
    """
    yarn, ntk, linear = (
        (candidate, as_curve(space, candidate))
        for candidate in (Candidate(name, name) for name in ("yarn", "ntk", "linear"))
    )
    law = yarn_mscale(space.factor)
    real_critical_dimension = CRITICAL_RATIO * critical_dimension(space)
    by_parts, larger_top = yarn[1], TOP_MARGIN * space.factor
    narrower = max(real_critical_dimension - (by_parts.high - by_parts.width), MIN_WIDTH)
    ntk_at_pair = Curve(real_critical_dimension, real_critical_dimension, space.factor, 0.0, law)
    corrected = [
        replace(by_parts, high=real_critical_dimension, width=narrower),
        replace(ntk_at_pair, top=larger_top),
        replace(by_parts, top=larger_top),
        ntk_at_pair,
        replace(by_parts, attention_factor=2 * law - 1),
    ]
    return [yarn, ntk, *((_to_candidate(space, curve), curve) for curve in corrected), linear]


def bounds(space: SearchSpace) -> dict[str, tuple[float, float]]:
    """Return the lower and upper bound of each number of a curve."""
    last = float(space.pairs - 1)
    return {
        "high": (0.0, last),
        "width": (min(0.5, last / 2), last),
        "top": (space.factor ** (2 / 3), 2 * space.factor),
        "shape": (-3.0, 3.0),
        "attention_factor": (1.0, 1 + 4 * (yarn_mscale(space.factor) - 1) + 0.01),
    }


def propose(space: SearchSpace, budget: int, seed: int) -> Proposals:
    """Propose curves by Bayesian optimisation.

    Args:
        space: The space that is searched.
        budget: Evaluations. A larger budget begins with the same candidates.
        seed: The sampler's seed.
    """
    seen = SeenRotations(space)
    region: TrustRegion[Curve] = TrustRegion(bounds(space))
    for candidate, curve in initial_points(space):
        if len(seen) < budget and seen.add_if_new(candidate):
            region.add(curve, (yield candidate))
    number = 0
    duplicates = 0
    while len(seen) < budget and duplicates < MAX_DUPLICATES:
        curve, number = region.ask((seed, number)), number + 1
        candidate = _to_candidate(space, curve)
        if seen.add_if_new(candidate):
            duplicates = 0
            region.tell(curve, (yield candidate))
        else:
            duplicates += 1
            region.record_failure()


def _to_candidate(space: SearchSpace, curve: Curve) -> Candidate:
    return longrope_candidate("curve", curve.stretch(space.pairs), curve.attention_factor)
