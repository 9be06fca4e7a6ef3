"""Where each method stands: what was measured of it, and whether it may still be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.recommending.decision_rule import MeasuredVariant
from rope_patch.recommending.scores import Scores, score_difference
from rope_patch.recommending.variants import PLAIN, Variant


@dataclass
class VariantScores:
    """What is known of a method.

    Attributes:
        variant: The method.
        engines: That run it without this package.
        long: At the target length; None where it was not measured.
        short: Answers within the trained length.
        prose: Documents within it.
        status: "" for what may be chosen, else why it is out, in words.
    """

    variant: Variant
    engines: tuple[str, ...] = ()
    long: Scores | None = None
    short: Scores | None = None
    prose: Scores | None = None
    status: str = ""


def to_measured_variant(row: VariantScores, everywhere: Sequence[str]) -> MeasuredVariant:
    """For the rule.

    Args:
        row: Measured within the trained length and beyond.
        everywhere: The engines that run the plain model.
    """
    assert row.short is not None
    assert row.long is not None
    return MeasuredVariant(
        row.variant.name,
        row.long,
        row.short,
        row.prose,
        lost=len(set(everywhere) - set(row.engines)),
        options=row.variant.option_count,
        dynamic=row.variant.dynamic,
    )


def held_out_table(rows: Mapping[str, VariantScores]) -> dict[str, Any]:
    """For the result of a search: how it compares with the others, on other samples than its."""
    found: dict[str, Any] = {}
    for name, row in rows.items():
        label = {PLAIN: "none"}.get(name, "found" if row.variant.from_search else name)
        if label in found or row.variant.dynamic or row.long is None:
            continue
        loss, right = row.long.loss_interval(), row.long.accuracy_interval()
        found[label] = {
            "nll": loss.estimate,
            "interval": [loss.low, loss.high],
            "samples": len(row.long),
            **({} if right is None else {"accuracy": right.estimate}),
        }
    ours = next((row.long for row in rows.values() if row.variant.from_search), None)
    yarn = rows["yarn"].long
    if ours is not None and yarn is not None:
        behind = score_difference(ours, yarn).nll
        found["against yarn"] = {
            "nll": behind.estimate,
            "interval": [behind.low, behind.high],
        }
    return found
