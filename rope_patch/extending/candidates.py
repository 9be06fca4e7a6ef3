"""The candidates: the methods of a recommendation that are compared, and the one to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import get_method, registered_methods


@dataclass(frozen=True)
class Candidate:
    """A method with its options, without the length.

    Attributes:
        method: The registered name.
        options: The method's options.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)


def compared_candidates(recommendation: dict[str, Any]) -> list[Candidate]:
    """Return the methods to compare with the plain model, the preferred one first.

    The recommended one, else the best at the length. If not all engines run it, the best of those
    that all of them run is second, as what people would serve instead.

    Args:
        recommendation: As `Recommendation.to_dict` returns it.
    """
    measured = _measured_rows(recommendation)
    first = next((row for row in measured if row["name"] == recommendation["method"]), None)
    first = first or next(iter(measured), None)
    if first is None:
        return []
    rows = [first]
    if not first["everywhere"]:
        rows += [row for row in measured if row["everywhere"]][:1]
    by_method = {row["method"]: row for row in reversed(rows)}  # labels are by method
    return [Candidate(row["method"], row["options"]) for row in reversed(by_method.values())]


def trained_candidate(recommendation: dict[str, Any]) -> Candidate | None:
    """Return the method to fine-tune: the best at the length of those with one set of frequencies.

    Training needs one rotation for long rows, so position maps and what follows the length are left
    out. The method's mixed form, which leaves short rows as they were, takes its place if it has
    one and no options.

    Args:
        recommendation: As `Recommendation.to_dict` returns it.
    """
    for row in _measured_rows(recommendation):
        method = get_method(row["method"])
        if issubclass(method, PositionMap) or method.is_dynamic or row["leaves_short"]:
            continue
        mixed = f"mixed-{row['method']}"
        if mixed in registered_methods() and not row["options"]:
            return Candidate(mixed)
        return Candidate(row["method"], row["options"])
    return None


def _measured_rows(recommendation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of patched methods that were measured at the length, best first."""
    rows = [
        row
        for row in recommendation["rows"]
        if row["method"] is not None and row["long"] and row["long"]["nll"]
    ]
    return sorted(rows, key=lambda row: float(row["long"]["nll"][0]))
