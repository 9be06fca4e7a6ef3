"""Where each method stands: what was measured of it, and whether it may still be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.recommending.decision_rule import Contender
from rope_patch.recommending.scores import Scores, gap
from rope_patch.recommending.variants import PLAIN, Entry


@dataclass
class Row:
    """What is known of a method.

    Attributes:
        entry: The method.
        engines: That run it without this package.
        long: At the target length; None where it was not measured.
        short: Answers within the trained length.
        prose: Documents within it.
        status: "" for what may be chosen, else why it is out, in words.
    """

    entry: Entry
    engines: tuple[str, ...] = ()
    long: Scores | None = None
    short: Scores | None = None
    prose: Scores | None = None
    status: str = ""


def contender(row: Row, everywhere: Sequence[str]) -> Contender:
    """For the rule.

    Args:
        row: Measured within the trained length and beyond.
        everywhere: The engines that run the plain model.
    """
    assert row.short is not None
    assert row.long is not None
    return Contender(
        row.entry.name,
        row.long,
        row.short,
        row.prose,
        lost=len(set(everywhere) - set(row.engines)),
        options=row.entry.numbers,
        dynamic=row.entry.dynamic,
    )


def held_out(rows: Mapping[str, Row]) -> dict[str, Any]:
    """For the result of a search: how it compares with the others, on other samples than its."""
    found: dict[str, Any] = {}
    for name, row in rows.items():
        label = {PLAIN: "none"}.get(name, "found" if row.entry.searched else name)
        if label in found or row.entry.dynamic or row.long is None:
            continue
        loss, right = row.long.loss(), row.long.right()
        found[label] = {
            "nll": loss.estimate,
            "interval": [loss.low, loss.high],
            "samples": len(row.long),
            **({} if right is None else {"accuracy": right.estimate}),
        }
    ours = next((row.long for row in rows.values() if row.entry.searched), None)
    yarn = rows["yarn"].long
    if ours is not None and yarn is not None:
        behind = gap(ours, yarn).nll
        found["against yarn"] = {
            "nll": behind.estimate,
            "interval": [behind.low, behind.high],
        }
    return found
