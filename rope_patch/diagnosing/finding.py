"""Findings of a diagnosis: fact, evidence in numbers, and fix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

# From worst to mildest: the model silently differs from its config; harmful under the named
# conditions; worth knowing.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A fact about a model's rotation that the user should know.

    Attributes:
        severity: One of `SEVERITIES`.
        code: A stable short name, for programs.
        what: The fact, in a sentence.
        evidence: The evidence, with numbers.
        fix: The line to type, or what to change; empty if nothing is to be done.
        layer_type: The layer type it applies to; None for all.
        numbers: The numbers of the evidence.
    """

    severity: str
    code: str
    what: str
    evidence: str
    fix: str = ""
    layer_type: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)


def json_safe(value: Any) -> Any:
    """Return data for JSON: infinite numbers and NaN become None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {("all" if key is None else key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value
