"""What a model's rotation can reach: every rotated pair, and what a method does to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.geometry import Geometry, by_layer_type, read_geometries
from rope_patch.methods import Method, build
from rope_patch.methods.registry import get
from rope_patch.patching import current
from rope_patch.patching.request import aim, select


@dataclass(frozen=True)
class Pair:
    """Two dimensions that rotate together.

    Attributes:
        pair: Index, from the fastest.
        wavelength: Tokens per turn, unscaled.
        turns: Turns within the trained length, unscaled.
        stretch: Wavelength under the method / unscaled; infinite where it no longer rotates.
        turns_at_length: Turns within the target length under the method.
    """

    pair: int
    wavelength: float
    turns: float
    stretch: float
    turns_at_length: float

    @property
    def extrapolates(self) -> bool:
        """Whether the target length takes the pair to angles that training never showed it."""
        return self.turns < 1 and self.turns_at_length > self.turns * (1 + 1e-9)


@dataclass(frozen=True)
class Rotation:
    """The pairs of one layer type.

    Attributes:
        geometry: What the config says.
        rope_type: The scaling that the config itself asks for.
        critical_dimension: The first pair that never completed a turn in training; the number of
            pairs if all of them did.
        attention_factor: The method's multiplier of cos and sin.
        pairs: Every rotated pair.
    """

    geometry: Geometry
    rope_type: str
    critical_dimension: int
    attention_factor: float
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; print it for a table.

    Attributes:
        model_type: The architecture.
        method: The method that was asked about, with its factor.
        length: The target length in tokens.
        rotations: One a layer type, or a single one under None.
    """

    model_type: str
    method: str
    length: int
    rotations: dict[str | None, Rotation]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; a pair that no longer rotates has a stretch of None."""
        data = asdict(self)
        data["rotations"] = {kind or "all": r for kind, r in data["rotations"].items()}
        for kind, rotation in self.rotations.items():
            for row, pair in zip(
                data["rotations"][kind or "all"]["pairs"], rotation.pairs, strict=True
            ):
                row["stretch"] = pair.stretch if math.isfinite(pair.stretch) else None
                row["extrapolates"] = pair.extrapolates
        return data

    def __str__(self) -> str:
        return "\n\n".join(self._table(kind, r) for kind, r in self.rotations.items())

    def _table(self, kind: str | None, rotation: Rotation) -> str:
        g, pairs = rotation.geometry, rotation.pairs
        critical = rotation.critical_dimension
        beyond = [pair.pair for pair in pairs if pair.extrapolates]
        scaled = (
            "" if rotation.rope_type == "default" else f", config asks for {rotation.rope_type}"
        )
        lines = [
            f"{self.model_type}{f', {kind}' if kind else ''}: head_dim {g.head_dim}, rotary_dim "
            f"{g.rotary_dim}, theta {g.theta:g}, trained on {g.trained_length:,} tokens{scaled}",
            f"{self.method} to {self.length:,} tokens, attention factor "
            f"{rotation.attention_factor:.6g}",
            f"critical dimension: pair {critical} of {len(pairs)}; "
            + (
                f"pairs {critical} to {len(pairs) - 1} never completed a turn in training"
                if critical < len(pairs)
                else "every pair completed at least one turn in training"
            ),
            f"at {self.length:,} tokens {len(beyond)} of them "
            + ("meets" if len(beyond) == 1 else "meet")
            + " angles that training never showed"
            + (f": pairs {beyond[0]} to {beyond[-1]}" if beyond else ""),
            "",
            "pair  wavelength (tokens)  turns trained   stretch  turns at length",
        ]
        for p in pairs:
            mark = "  !" if p.extrapolates else ("  <- critical" if p.pair == critical else "")
            stretch = f"×{p.stretch:.4f}" if math.isfinite(p.stretch) else "stopped"
            lines.append(
                f"{p.pair:4d}  {p.wavelength:19,.1f}  {p.turns:13,.3f}  {stretch:>8}  "
                f"{p.turns_at_length:15,.3f}{mark}"
            )
        if beyond:
            lines.append("!  beyond the angles of training")
        return "\n".join(lines)


def diagnose(
    model_or_config: Any,
    method: str = "default",
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    **options: Any,
) -> Diagnosis:
    """Says what every rotated pair has seen in training, and where a method takes it.

    Args:
        model_or_config: A transformers model or its config; no weights are looked at.
        method: A name from `rope_patch.methods()`; "default" shows what happens with none.
        factor: Target length / trained length; at most one of `factor` and `length`. The trained
            length is looked at if neither is given.
        length: Target length in tokens.
        trained_length: Tokens of pretraining, if the config does not tell the truth about them.
        layer_types: As in `patch`.
        **options: The method's options.

    Returns:
        A table to print, or data.

    Raises:
        ValueError: No RoPE, or a request that cannot be met.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if hasattr(model_or_config, "modules") and (handle := current(model_or_config)):
        config = handle.original_config
    config = config.get_text_config(decoder=True)
    geometries = select(read_geometries(config, trained_length), layer_types, config)
    trained = next(iter(geometries.values())).trained_length
    if factor is None and length is None and not get(method).grows:
        factor = 1.0
    options, reached = aim(method, factor, length, trained, options)
    length = reached or trained
    chosen = build(method, **options)
    parameters = by_layer_type(config.rope_parameters)
    return Diagnosis(
        model_type=config.model_type,
        method="unscaled" if method == "default" else str(chosen),
        length=length,
        rotations={
            kind: _rotation(geometry, chosen, length, parameters[kind].get("rope_type", "default"))
            for kind, geometry in geometries.items()
        },
    )


def _rotation(geometry: Geometry, method: Method, length: int, rope_type: str) -> Rotation:
    frequencies = method.at(geometry, length)
    pairs = []
    scaled = frequencies.inv_freq.tolist()
    for i, (before, after) in enumerate(zip(geometry.inv_freq().tolist(), scaled, strict=True)):
        pairs.append(
            Pair(
                pair=i,
                wavelength=2 * math.pi / before,
                turns=geometry.trained_length * before / (2 * math.pi),
                stretch=before / after if after else math.inf,
                turns_at_length=length * after / (2 * math.pi),
            )
        )
    critical = next((pair.pair for pair in pairs if pair.turns < 1), len(pairs))
    return Rotation(geometry, rope_type, critical, frequencies.attention_factor, tuple(pairs))
