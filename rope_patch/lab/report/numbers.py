"""Losses, shares and differences as text; numbers that mean nothing are left out."""

from __future__ import annotations

from rope_patch.evaluation.report.format import NOTHING, n_text, percent, percent_range
from rope_patch.evaluation.report.table import Cell
from rope_patch.lab.recall_task import PAIRS
from rope_patch.statistics import Interval

CHANCE = 1 / PAIRS  # of a guess among the values of a sequence
WIDEST = 0.25  # nats; a loss that is not known to within this tells nothing


def loss_cell(interval: Interval | None, *, beyond: bool = False, missing: str = NOTHING) -> Cell:
    """Return a loss in nats with its interval.

    Args:
        interval: The loss.
        beyond: Whether it is of texts beyond the trained length.
        missing: What stands where there is none.
    """
    if interval is None:
        return Cell(text=missing, beyond=beyond)
    span = f"{interval.low:.2f}–{interval.high:.2f}"
    if interval.half_width > WIDEST:
        return Cell(text="unclear", note=span, tip=_tip(interval, span), beyond=beyond)
    return Cell(text=f"{interval.estimate:.2f}", note=span, tip=_tip(interval, span), beyond=beyond)


def share_cell(interval: Interval | None, *, beyond: bool = False, missing: str = NOTHING) -> Cell:
    """Return a share of answers with its interval; one that may be a guess says so.

    Args:
        interval: The share.
        beyond: Whether it is of texts beyond the trained length.
        missing: What stands where there is none.
    """
    if interval is None:
        return Cell(text=missing, beyond=beyond)
    span = percent_range(interval)
    tip = _tip(interval, span)
    text = percent(interval.estimate) if interval.low > CHANCE else "chance or less"
    if interval.low <= CHANCE and interval.estimate > CHANCE:
        text = "maybe chance"
    return Cell(text=text, note=span, tip=tip, beyond=beyond)


def difference_text(value: float, *, is_share: bool) -> str:
    """Return a difference with its sign: +0.12 nats, or −4 points."""
    return f"{_signed(value, is_share)} {'points' if is_share else 'nats'}"


def difference_range(interval: Interval, *, is_share: bool) -> str:
    """Return the interval of a difference: −0.02 to +0.05."""
    return f"{_signed(interval.low, is_share)} to {_signed(interval.high, is_share)}"


def _signed(value: float, is_share: bool) -> str:
    text = f"{100 * value:+.0f}" if is_share else f"{value:+.2f}"
    return text.replace("-", "−") if float(text) else text[1:]


def _tip(interval: Interval, span: str) -> str:
    return f"95% interval {span}, {n_text(interval)}"
