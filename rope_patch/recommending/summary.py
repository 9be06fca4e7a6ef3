"""A recommendation as text: for a terminal, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rope_patch.recommending.decision_rule import Choice
from rope_patch.recommending.variants import PLAIN
from rope_patch.utils.errors import one_line
from rope_patch.utils.escaping import escape_markdown, markdown_block, markdown_code, markdown_prose
from rope_patch.utils.plain_text import align

if TYPE_CHECKING:
    from rope_patch.recommending.result import Recommendation

_NO_VALUE = "–"
_NOTES = (
    "Intervals are 95% each, over texts, not for all comparisons together. The best of several "
    "looks better on the samples that it was chosen by than it is.",
    "A price is the difference from the plain model within its trained length, on the same "
    "samples, in nats for a token of an answer and in perplexity of prose. What follows the length "
    "leaves texts within it as they are, but needs this package or turns cached keys; lengths "
    "between the trained one and the target were not measured.",
)


def verdict_sentence(
    choice: Choice, rows: Sequence[dict[str, Any]], length: int, trained: int
) -> str:
    """Return the verdict in a sentence or two.

    Args:
        choice: The decision.
        rows: See `Recommendation.rows`.
        length: Target length in tokens.
        trained: Trained length in tokens.
    """
    by_name = {row["name"]: row for row in rows}
    at = f"at {length:,} tokens"
    if choice.verdict == "cannot answer":
        return (
            "Nothing can be recommended by these questions: the model does not answer them within "
            f"its trained {trained:,} tokens either, so no method has anything to keep. Ask what "
            "it can answer (--samples), or measure perplexity with rope-patch compare."
        )
    if choice.name is None:
        best = by_name[str(choice.best)]
        return (
            f"Nothing here holds {at}: the best, {choice.best}, gets "
            f"{_accuracy_text(best['long'])} there{_retention_text(choice)}. Fine-tune at that "
            "length (rope-patch finetune), or ask for a shorter one."
        )
    row = by_name[choice.name]
    if choice.name == PLAIN:
        return (
            f"Nothing is needed {at}: the plain model gets {_accuracy_text(row['long'])} there, "
            "and no method that was measured is shown to be better."
        )
    plain = by_name[PLAIN]["long"]
    return (
        f"Use {choice.name} {at}: it gets {_accuracy_text(row['long'])} "
        f"there{_retention_text(choice)}; the plain model gets {_accuracy_text(plain)}. "
        f"{_price_text(row, trained)}"
    )


def as_text(recommendation: Recommendation) -> str:
    """Return a recommendation as text for a terminal."""
    lines = [_title(recommendation), "", recommendation.verdict]
    if recommendation.python:
        lines += ["", f"  {recommendation.python}"]
    if recommendation.shell:
        lines += [f"  {recommendation.shell}"]
    lines += [
        "",
        *align(_table(recommendation)),
        "",
        *(f"- {reason}" for reason in recommendation.reasons),
    ]
    lines += [f"- not measured: {why}" for why in recommendation.not_measured]
    return "\n".join([*lines, "", *_NOTES, _cost_line(recommendation)])


def recommendation_markdown(recommendation: Recommendation) -> str:
    """Return a recommendation as a Markdown page."""
    head, *rows = _table(recommendation)
    lines = [
        f"# {escape_markdown(_title(recommendation))}",
        "",
        f"**{markdown_prose(recommendation.verdict)}**",
        "",
    ]
    if recommendation.python:
        shell = [recommendation.shell] if recommendation.shell else []
        lines += [markdown_block("\n".join([recommendation.python, *shell])), ""]
    lines += [
        "| " + " | ".join(map(escape_markdown, head)) + " |",
        "|:--" + "|--:" * (len(head) - 2) + "|:--|",
    ]
    lines += ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows]
    lines += ["", *(f"- {markdown_prose(reason)}" for reason in recommendation.reasons)]
    lines += [f"- not measured: {markdown_prose(why)}" for why in recommendation.not_measured]
    for note in (*_NOTES, _cost_line(recommendation)):
        lines += ["", note]
    if recommendation.command:
        lines += ["", f"Made by {markdown_code(recommendation.command)}."]
    return "\n".join(lines) + "\n"


def _title(recommendation: Recommendation) -> str:
    factor = recommendation.length / recommendation.trained_length
    return (
        f"{one_line(recommendation.model)}, from {recommendation.trained_length:,} to "
        f"{recommendation.length:,} tokens (×{factor:.4g})"
    )


def _cost_line(recommendation: Recommendation) -> str:
    text = (
        f"{recommendation.samples} samples at the length for what was compared in the end, "
        f"{recommendation.scored:,} scored in all"
    )
    if recommendation.found is not None:
        text += f", a search of {len(recommendation.found.history)} evaluations on others"
    return f"{text}; {recommendation.seconds / 60:.3g} of {recommendation.budget:g} minutes."


def _table(recommendation: Recommendation) -> list[list[str]]:
    head = [
        "method",
        f"right at {recommendation.length:,}",
        "nats",
        "behind the best",
        "right within",
        "price, nats",
        "price, prose",
        "runs without rope_patch",
        "samples",
        "",
    ]
    return [head, *(_cells(row) for row in recommendation.rows)]


def _cells(row: dict[str, Any]) -> list[str]:
    long, short = row["long"] or {}, row["short"] or {}
    price = row["price"] and _format_signed(row["price"]["nll"])
    prose = row["prose_price"] and _format_percent(row["prose_price"]["nll"])
    return [
        row["name"],
        _format_share(long.get("accuracy")),
        _format_nats(long.get("nll")),
        _format_signed(row["behind"]["nll"]) if row["behind"] else _NO_VALUE,
        _format_share(short.get("accuracy")),
        price or _NO_VALUE,
        prose or _NO_VALUE,
        "everywhere" if row["everywhere"] else ", ".join(row["engines"]) or "nowhere",
        str(long.get("samples", 0)),
        row["status"],
    ]


def _accuracy_text(scores: dict[str, Any]) -> str:
    nats = f"{_format_nats(scores['nll'])} nats a token"
    if scores["accuracy"] is None:
        return nats
    return f"{_format_share(scores['accuracy'])} of answers right ({nats})"


def _retention_text(choice: Choice) -> str:
    if choice.retained_share is None:
        return ""
    share = choice.retained_share
    return (
        f", {share.estimate:.0%} ({share.low:.0%} to {share.high:.0%}) of what the plain model "
        "gets right within its trained length"
    )


def _price_text(row: dict[str, Any], trained: int) -> str:
    if row["leaves_short"]:
        return f"Within the trained {trained:,} tokens it changes nothing."
    prices = [f"{_format_signed(row['price']['nll'])} nats a token of answers"]
    if row["prose_price"]:
        prices.append(f"{_format_percent(row['prose_price']['nll'])} perplexity of prose")
    return f"Within the trained {trained:,} tokens it costs {', '.join(prices)}."


def _format_share(interval: Sequence[float] | None) -> str:
    if interval is None:
        return _NO_VALUE
    estimate, low, high = interval
    return f"{estimate:.0%} ({low:.0%} to {high:.0%})"


def _format_nats(interval: Sequence[float] | None) -> str:
    if interval is None:
        return _NO_VALUE
    estimate, low, high = interval
    return f"{estimate:.3f} ({low:.3f} to {high:.3f})"


def _format_signed(interval: Sequence[float]) -> str:
    estimate, low, high = interval
    if estimate == low == high == 0:
        return "0"
    if math.isinf(high - low):  # too few texts
        return f"{estimate:+.3f} (no interval)"
    return f"{estimate:+.3f} ({low:+.3f} to {high:+.3f})"


def _format_percent(interval: Sequence[float]) -> str:
    """Return a difference in nats as a change of perplexity in percent."""
    if not any(interval):
        return "0"
    estimate, low, high = (100 * math.expm1(min(value, 20.0)) for value in interval)
    if math.isinf(interval[2] - interval[1]):  # too few texts
        return f"{estimate:+.1f}% (no interval)"
    return f"{estimate:+.1f}% ({low:+.1f} to {high:+.1f}%)"
