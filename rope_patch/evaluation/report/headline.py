"""The headline: one plain sentence on what to use, up to where, at what price, and how sure."""

from __future__ import annotations

import math

from rope_patch.evaluation.report.format import (
    change_range,
    change_text,
    n_text,
    p_text,
    percent,
    percent_range,
    perplexity_range,
    perplexity_text,
    points_range,
    points_text,
)
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.likelihood import SIGNIFICANCE_LEVEL
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.verdict import texts_needed, too_few_texts
from rope_patch.statistics import Interval, MeanTest

_MAX_NAMES = 2  # of a sentence


def headline(stats: RunStatistics, ranking: Ranking) -> str:
    """Return the sentence that a reader of nothing else needs.

    Retrieval decides before perplexity does: accuracy where it shows a length to be usable, else
    the likelihood of the right answers, else accuracy again. What cannot be decided is said so.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
    """
    best = ranking.best
    if best is None:
        return "Nothing was measured."
    usable = stats.effective_length(best)[0] if stats.lengths else None
    if usable is not None and usable > stats.trained_length:
        return _usable(stats, ranking, best, usable)
    length = stats.verdict_length
    if length is not None and (test := stats.comparisons_with_plain(length).get(best)):
        return _likelier(stats, ranking, best, length, *test)
    if stats.lengths_beyond_training:
        return _accuracy(stats, best)
    if stats.average(best, beyond=True) is not None:
        return _perplexity(stats, best)
    if not stats.tasks and not stats.losses:
        return "Nothing was measured that tells which method to use."
    return (
        "This run cannot decide what to use: it measured nothing beyond the trained "
        f"{stats.trained_length:,} tokens."
    )


def _usable(stats: RunStatistics, ranking: Ranking, best: str, length: int) -> str:
    times = f"{length / stats.trained_length:.3g}"
    who = f"Use {_names(stats, ranking, best)}" if best != stats.plain else "Use the plain model"
    text = f"{who} up to {length:,} tokens, {times} times the trained {stats.trained_length:,}: it "
    if (retention := stats.retention(best, length)) is not None:
        numbers = f"{percent(retention.estimate)} ({percent_range(retention)}, {n_text(retention)})"
        text += f"keeps {numbers} of the plain model's accuracy there"
    return f"{text}{_price(stats, best)}{_rivals(stats, ranking)}."


def _likelier(
    stats: RunStatistics,
    ranking: Ranking,
    best: str,
    length: int,
    difference: MeanTest,
    p_value: float,
) -> str:
    who, texts = stats.names[best], f"{difference.mean.effective_n:,.0f}"
    count = f"{texts} text{'s' if texts != '1' else ''}"
    sure = f"({p_text(p_value)}, {count})"
    if difference.mean.low == difference.mean.high == 0:
        return (
            f"Use none of these methods at {length:,} tokens: with the best of them, {who}, the "
            "right answers are exactly as likely as with the plain model "
            f"({n_text(difference.mean)})."
        )
    if p_value >= SIGNIFICANCE_LEVEL:
        needed = texts_needed(stats, length, difference)
        more = f"; about {needed:,} would do" if needed else ""
        leader = who if difference.mean.estimate < 0 else "the plain model"
        likeliest = f"at {length:,} tokens: the right answers are the likeliest with {leader}, "
        if (least := too_few_texts(stats, length, difference)) is not None:
            few = "is too little" if texts == "1" else "are too few"
            return (
                f"This run cannot decide what to use {likeliest}but {count} {few} to say "
                f"({least} decide)."
            )
        return (
            f"This run cannot decide what to use {likeliest}but {count} are too few to be sure "
            f"({p_text(p_value)}{more})."
        )
    if difference.mean.estimate > 0:
        return (
            f"Use none of these methods at {length:,} tokens: even with {who}, the best of them, "
            f"the right answers are less likely than with the plain model {sure}."
        )
    if stats.floor is not None and not stats.reads_answers(best, length):
        return (
            f"This run cannot decide what to use at {length:,} tokens: with {who} the right "
            f"answers are likelier than with the plain model {sure}, but not surely likelier than "
            "where the text lacks them."
        )
    return (
        f"At {length:,} tokens use {_names(stats, ranking, best)} rather than the plain model: the "
        f"right answers are likelier with it {sure}{_price(stats, best)}{_rivals(stats, ranking)}; "
        "that the model is usable there is not shown."
    )


def _accuracy(stats: RunStatistics, best: str) -> str:
    """Return what accuracy says where no length is shown to be usable."""
    who = "the plain model" if best == stats.plain else stats.names[best]
    far = stats.accuracy(best, lengths=stats.lengths_beyond_training)
    share = "" if far is None else f"{percent(far.estimate)} ({percent_range(far)}, {n_text(far)})"
    beyond = f"beyond the trained {stats.trained_length:,} tokens"
    first = stats.lengths_beyond_training[0]
    retention = stats.retention(best, first)
    if retention is None:
        reason = stats.effective_length(best)[1]
        answers = f"; with {who} {share} of the answers are right there" if share else ""
        return f"This run cannot decide what to use {beyond}: {reason}{answers}."
    kept = f"{percent(retention.estimate)} ({percent_range(retention)}, {n_text(retention)})"
    if retention.high >= THRESHOLD:
        return (
            f"This run cannot decide what to use {beyond}: with {who} the model keeps {kept} of "
            f"its accuracy at {first:,}, which may be above or below {THRESHOLD:.0%}."
        )
    if best == stats.plain:
        return (
            f"The plain model is not usable {beyond}: at {first:,} it keeps {kept} of its accuracy."
        )
    return (
        f"Use none of these methods {beyond}: even with {who}, the best of them, the model keeps "
        f"{kept} of its accuracy at {first:,}."
    )


def _perplexity(stats: RunStatistics, best: str) -> str:
    """Return what perplexity says alone: it does not show that far text is read."""
    mine, beyond = stats.average(best, beyond=True), f"beyond {stats.trained_length:,} tokens"
    numbers = _perplexity_text(mine) if mine else ""
    head = "This run cannot decide what to use: it measured no answers, only perplexity, which "
    if best == stats.plain:
        return f"{head}{beyond} is {numbers} with the plain model."
    plain = stats.average(stats.plain, beyond=True) if stats.plain is not None else None
    text = f"{head}{beyond} is the lowest with {stats.names[best]}, {numbers}"
    if plain is not None:
        text += f" against {_perplexity_text(plain)} of the plain model"
    ratio, record = stats.ratio_to_control(best), stats.control_record
    if ratio is not None and record is not None:
        cut = f"with the text cut to its last {record['context']:,} tokens"
        sure = ", and lower than" if ratio.high < 1 else ", but not surely lower than"
        text += f"{sure} {cut}, {_change(ratio)}"
    return f"{text}."


def _names(stats: RunStatistics, ranking: Ranking, best: str) -> str:
    """Return the best method's name, and of those that are the same."""
    labels = next(labels for labels in ranking.groups if best in labels)
    return " or ".join(stats.names[label] for label in labels[: _MAX_NAMES + 1])


def _price(stats: RunStatistics, label: str) -> str:
    """Return what a method costs within the trained length; nothing where that is unknown."""
    if stats.plain is None or label == stats.plain:
        return ""
    parts = []
    ratio = stats.ratio(label, stats.plain, beyond=False)
    if ratio is not None and math.isfinite(ratio.estimate):
        parts.append(f"{_change(ratio)} in perplexity")
    if (short := stats.short_overall(label)) is not None:
        change = short.difference
        numbers = f"{points_text(change.estimate)} points ({points_range(change)})"
        parts.append(f"{numbers} at short tasks")
    if not parts:
        return ""
    return f", at the price of {' and '.join(parts)} up to {stats.trained_length:,}"


def _rivals(stats: RunStatistics, ranking: Ranking) -> str:
    if not ranking.rivals:
        return ""
    names = [stats.names[label] for label in ranking.rivals[:_MAX_NAMES]]
    more = len(ranking.rivals) - len(names)
    listed = ", ".join(names) + f" and {more} more" * bool(more)
    return f"; not told apart from it: {listed}"


def _change(ratio: Interval) -> str:
    text, span = change_text(ratio), change_range(ratio)
    return f"{text} ({span})" if span else text


def _perplexity_text(interval: Interval) -> str:
    text, span = perplexity_text(interval.estimate), perplexity_range(interval)
    return f"{text} ({span})" if span else text
