"""The scoreboard: the scores of each variant, and whether it may still be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.recommending.decision_rule import MeasuredVariant
from rope_patch.recommending.scores import Scores, score_difference
from rope_patch.recommending.variants import PLAIN, Variant


@dataclass
class VariantScores:
    """The scores of a variant.

    Attributes:
        variant: The variant.
        engines: Engines that run it without this package.
        long: Scores at the target length; None if not measured.
        short: Scores of answers within the trained length; None if not measured.
        prose: Scores of documents within the trained length; None if not measured.
        status: "" if the variant may be chosen, else why it is out.
    """

    variant: Variant
    engines: tuple[str, ...] = ()
    long: Scores | None = None
    short: Scores | None = None
    prose: Scores | None = None
    status: str = ""


def to_measured_variant(row: VariantScores, plain_engines: Sequence[str]) -> MeasuredVariant:
    """Return a variant for the decision rule.

    Args:
        row: The variant's scores, at the target length and within the trained length.
        plain_engines: Engines that run the plain model.
    """
    assert row.short is not None
    assert row.long is not None
    return MeasuredVariant(
        row.variant.name,
        row.long,
        row.short,
        row.prose,
        engines_lost=len(set(plain_engines) - set(row.engines)),
        option_count=row.variant.option_count,
        dynamic=row.variant.dynamic,
    )


def held_out_table(rows: Mapping[str, VariantScores]) -> dict[str, Any]:
    """Return the held-out comparison for the search's result, see `SearchResult.held_out`."""
    table: dict[str, Any] = {}
    for name, row in rows.items():
        label = {PLAIN: "none"}.get(name, "found" if row.variant.from_search else name)
        if label in table or row.variant.dynamic or row.long is None:
            continue
        loss, accuracy = row.long.loss_interval(), row.long.accuracy_interval()
        table[label] = {
            "nll": loss.estimate,
            "interval": [loss.low, loss.high],
            "samples": len(row.long),
            **({} if accuracy is None else {"accuracy": accuracy.estimate}),
        }
    searched = next((row.long for row in rows.values() if row.variant.from_search), None)
    yarn = rows["yarn"].long
    if searched is not None and yarn is not None:
        difference = score_difference(searched, yarn).nll
        table["against yarn"] = {
            "nll": difference.estimate,
            "interval": [difference.low, difference.high],
        }
    return table
