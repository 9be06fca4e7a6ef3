"""Numbers and names as text, for tables and sentences alike."""

from __future__ import annotations

import math
from typing import Any

from rope_patch.statistics import Interval
from rope_patch.utils import errors
from rope_patch.utils.checksums import digest

NOTHING = "–"


def one_line(text: Any) -> str:
    """Return any text as one printable line, however long."""
    return errors.one_line(text, max_length=None)


def filter_mark(text: str) -> str:
    """Return a name's mark for filters, free of special characters."""
    return f"f{digest(text.encode('utf-8', 'replace'), 8)}"


def percent(share: float) -> str:
    """Return a share as a percentage: 92%; never 100% or 0% where a little is missing."""
    whole = 100 * share
    digits = 0 if round(whole) not in (0, 100) or math.isclose(whole, round(whole)) else 1
    return f"{whole:.{digits}f}%"


def percent_range(interval: Interval) -> str:
    """Return an interval of shares: 84–96%."""
    high = f"{100 * interval.high:.0f}%" if math.isfinite(interval.high) else "∞"
    return f"{100 * interval.low:.0f}–{high}"


def n_text(interval: Interval) -> str:
    """Return how many samples an interval rests on, and as how many they count."""
    unit = "" if interval.unit == "samples" else interval.unit
    text = f"n = {interval.n:,.0f}{' ' * bool(unit)}{unit}"
    if interval.effective_n < 0.95 * interval.n:
        text += f", effectively {interval.effective_n:,.0f}"
    return text


def perplexity_text(value: Any) -> str:
    """Return a perplexity to three digits or so: 8.03, 15.2, 397."""
    if value is None:
        return NOTHING
    value = float(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞"
    for limit, digits in ((10, 2), (100, 1)):
        if round(value, digits) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def perplexity_range(interval: Interval) -> str:
    """Return an interval of perplexities: 14.8–15.9; nothing without bounds."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    return f"{perplexity_text(interval.low)}–{perplexity_text(interval.high)}"


def change_text(change: float | None) -> str:
    """Return a ratio as a change: +0.7%, −3.0%, and ×3.0 from a factor of two on."""
    if change is None or math.isnan(change):
        return NOTHING
    if not math.isfinite(change):
        return "×∞"
    if not 0.5 < change < 2:
        return f"×{change:,.0f}" if change >= 10 else f"×{change:.{1 if change >= 2 else 2}f}"
    percent = f"{abs(change - 1):.1%}"
    sign = "±" if percent == "0.0%" else "+" if change > 1 else "−"
    return sign + percent


def change_range(interval: Interval) -> str:
    """Return an interval of ratios: −0.2 to +1.6%; nothing without bounds."""
    if interval.low <= 0 and interval.high == math.inf:
        return ""
    low, high = change_text(interval.low), change_text(interval.high)
    return f"{low.removesuffix('%') if high.endswith('%') else low} to {high}"


def points_text(difference: float) -> str:
    """Return a difference of shares in points: +1.2, −3.0."""
    text = f"{abs(100 * difference):.1f}"
    return ("±" if text == "0.0" else "+" if difference > 0 else "−") + text


def points_range(interval: Interval) -> str:
    """Return an interval of differences in points: −1.0 to +3.2."""
    return f"{points_text(interval.low)} to {points_text(interval.high)}"


def p_text(p: float) -> str:
    """Return a p-value: p = 0.03, p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
