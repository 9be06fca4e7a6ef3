"""What a search found, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_patch.searching.found import Found


def tell(found: Found) -> str:
    """A few lines for a terminal: what was found, how it compares, how to use it."""
    stretch = found.long_factor
    kept = sum(s < 1.005 for s in stretch)
    lines = [
        f"{found.model}, from {found.trained_length:,} to {found.length:,} tokens "
        f"(×{found.factor:g}): {_searched(found)}",
        f"found: {found.candidate.origin} ({found.candidate.method}); {kept} of {len(stretch)} "
        f"pairs as they were, the last ×{stretch[-1]:.4g}; attention factor "
        f"{found.attention_factor:.4g}"
        + (f"; {found.start_tokens} start tokens kept" if found.start_tokens else ""),
    ]
    rows = [
        (label, value)
        for label, value in found.held_out.items()
        if isinstance(value, dict) and not label.startswith("against ")
    ]
    if rows:
        lines += ["", "on other samples than the search's (nats a token, smaller is better):"]
        width = max(len(label) for label, _ in rows)
        lines += [f"  {label:<{width}}  {_measured(value)}" for label, value in rows]
    pairs = [(k, v) for k, v in found.held_out.items() if k.startswith("against ")]
    if pairs:
        lines += ["", "found less the other, on the same samples:"]
        width = max(len(label) for label, _ in pairs)
        lines += [f"  {label:<{width}}  {_compared(value)}" for label, value in pairs]
    return "\n".join(lines)


def _searched(found: Found) -> str:
    stopped = sum(not entry.get("complete", True) for entry in found.history)
    failed = sum(not math.isfinite(float(entry["fitness"])) for entry in found.history)
    said = [f"{found.strategy}, {len(found.history)} evaluations"]
    said += [f"{stopped} of them stopped early"] if stopped else []
    said += [f"{failed} failed"] if failed else []
    said += [f"{found.evaluations_per_minute:.3g} a minute"] if found.evaluations_per_minute else []
    return ", ".join([*said, f"seed {found.seed}"])


def _measured(value: dict[str, Any]) -> str:
    if "nll" not in value:
        return f"failed: {value.get('error')}"
    said = f"{float(value['nll']):.4f}"
    if interval := value.get("interval"):
        said += f" ({float(interval[0]):.4f} to {float(interval[1]):.4f})"
    if value.get("accuracy") is not None:
        said += f", {float(value['accuracy']):.1%} of answers right"
    return said


def _compared(value: Any) -> str:
    """The found one less another; intervals are of 95%."""
    if not isinstance(value, dict) or "nll" not in value:
        return str(value)
    said = f"{_signed(value['nll'])} nats"
    if interval := value.get("interval"):
        said += f" ({_signed(interval[0])} to {_signed(interval[1])})"
    if value.get("accuracy") is not None:
        said += f", {float(value['accuracy']):+.1%} of answers"
        if interval := value.get("accuracy interval"):
            said += f" ({float(interval[0]):+.1%} to {float(interval[1]):+.1%})"
        if value.get("p") is not None:
            said += f", p = {float(value['p']):.2g}"
    return said


def _signed(value: Any) -> str:
    return f"{float(value):+.4f}"
