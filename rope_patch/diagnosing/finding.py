"""One thing that was found, with the number that shows it and the line that puts it right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

# From worst to mildest: something else than the config says happens, silently; it hurts under
# conditions that are named; worth knowing.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """What is the matter with a model's rotation.

    Attributes:
        severity: One of `SEVERITIES`.
        code: A short name that stays, for programs.
        what: The fact, in a sentence.
        evidence: How it shows, with numbers.
        fix: The line to type, or what to change; empty where nothing is to be done.
        layer_type: Where it holds for one layer type only.
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
    """Data as JSON can say it: what is infinite or no number becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {("all" if key is None else key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value
