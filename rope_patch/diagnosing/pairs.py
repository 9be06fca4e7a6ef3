"""Table of rotated pairs: their rotations in training and under a method."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.diagnosing.base_bounds import base_bound, critical_base
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies
from rope_patch.methods.ntk_by_parts import yarn_mscale

# Rotations computed in float32 and in float64 differ by up to some units in float32's last place.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Pair:
    """Two dimensions that rotate together.

    Attributes:
        pair: Index, from the fastest.
        wavelength: Tokens per rotation before an extension; infinite if the pair does not rotate.
        turns: Rotations within the trained length, before.
        stretch: Wavelength under the method / before; infinite if it no longer rotates.
        turns_at_length: Rotations within the target length under the method.
    """

    pair: int
    wavelength: float
    turns: float
    stretch: float
    turns_at_length: float

    @property
    def extrapolates(self) -> bool:
        """Whether the target length takes the pair beyond its angles in training."""
        return self.turns < 1 and self.turns_at_length > self.turns * (1 + _ROUNDING)


@dataclass(frozen=True)
class PairTable:
    """The pairs of one layer type.

    Attributes:
        geometry: The geometry before the extension.
        rope_type: The config's own scaling.
        own_yarn: A phrase on the config's own YaRN and whether it was trained in; None if it has
            none.
        critical_dimension: The first pair without a full rotation in training; the number of pairs
            if there is none.
        attention_factor: The method's multiplier of cos and sin.
        yarn_attention_factor: YaRN's attention factor for the target length.
        base_bound: The smallest base for the target length (`base_bounds.base_bound`); None if
            there is none or the length is too large to search.
        critical_base: The base that keeps the critical pair within its trained angles at the target
            length (`base_bounds.critical_base`); None if the trained length is too short, or the
            geometry is already scaled.
        pairs: Every rotated pair.
    """

    geometry: Geometry
    rope_type: str
    own_yarn: str | None
    critical_dimension: int
    attention_factor: float
    yarn_attention_factor: float
    base_bound: float | None
    critical_base: float | None
    pairs: tuple[Pair, ...]


def build_pair_table(
    geometry: Geometry,
    after: Frequencies,
    length: int,
    rope_type: str,
    own_yarn: str | None = None,
    *,
    largest_distance: int | None = None,
) -> PairTable:
    """Return the table of pairs before and after an extension.

    Args:
        geometry: The geometry before.
        after: The frequencies at the target length.
        length: The target length in tokens.
        rope_type: The config's own scaling.
        own_yarn: See `PairTable`.
        largest_distance: The largest distance at which tokens are compared, if not the length.
    """
    distance = length if largest_distance is None else largest_distance
    trained = geometry.trained_length
    pairs = tuple(
        Pair(
            pair=i,
            wavelength=2 * math.pi / before if before else math.inf,
            turns=trained * before / (2 * math.pi),
            stretch=before / now if now else (math.inf if before else 1.0),
            turns_at_length=distance * now / (2 * math.pi),
        )
        for i, (before, now) in enumerate(
            zip(geometry.inv_freq().tolist(), after.inv_freq.tolist(), strict=True)
        )
    )
    return PairTable(
        geometry=geometry,
        rope_type=rope_type,
        own_yarn=own_yarn,
        critical_dimension=next((p.pair for p in pairs if p.turns < 1), len(pairs)),
        attention_factor=after.attention_factor,
        yarn_attention_factor=yarn_mscale(max(1.0, length / trained)),
        base_bound=base_bound(geometry.rotary_dim, length),
        critical_base=None if geometry.base else critical_base(geometry.theta, trained, length),
        pairs=pairs,
    )
