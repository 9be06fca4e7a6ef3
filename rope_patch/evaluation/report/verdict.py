"""The verdict of few answers: which method makes the right ones likelier, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.evaluation.report.format import nats_range, nats_text, p_text
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.likelihood import SIGNIFICANCE_LEVEL
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.statistics import MeanTest, texts_to_decide

_MAX_NAMES = 4  # of a sentence


def likelihood_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield what the likelihoods of the right answers decide beyond the trained length."""
    length = stats.verdict_length
    if length is None or stats.plain is None:
        return
    best = ranking.best
    comparison = stats.comparisons_with_plain(length).get(best) if best else None
    if best is None or comparison is None:
        return
    yield comparison_sentence(stats, best, length, *comparison)
    if others := _rivals(stats, ranking):
        yield others
    if floor := _floor(stats, best, length):
        yield floor


def correction_text(stats: RunStatistics, methods: int, length: int | None = None) -> str:
    """Return what a p-value is corrected for: after Holm over 3 methods and 2 looks."""
    looks = stats.looks if stats.look_factor(length) > 1 else 0
    parts = [f"Holm over {methods} methods"] * (methods > 1)
    parts += [f"{looks} look{'s' if looks > 1 else ''} at growing data"] * (looks > 0)
    return f" after {' and '.join(parts)}" if parts else ""


def texts_needed(stats: RunStatistics, length: int, difference: MeanTest) -> int | None:
    """Return how many texts would decide, if the difference is as measured; None if unknown."""
    needed = texts_to_decide(difference, stats.deciding_level(length))
    return needed if needed and needed > difference.mean.effective_n else None


def too_few_texts(stats: RunStatistics, length: int, difference: MeanTest) -> int | None:
    """Return the fewest texts that decide, where a difference rests on fewer, else None."""
    least = stats.least_texts(length)
    return None if difference.mean.effective_n >= least else least


def _interval_text(test: MeanTest) -> str:
    """Return a loss's interval, values and texts: 95% interval −4.5 to −3.6, n = 40, 8 texts."""
    mean = test.mean
    texts = f"{mean.effective_n:,.0f} text{'s' if mean.effective_n != 1 else ''}"
    rests_on = f"n = {mean.n:,.0f}, {texts}"
    if not math.isfinite(mean.half_width):
        return f"no interval, {rests_on}"
    return f"95% interval {nats_range(mean)}, {rests_on}"


def is_shown_to_help(stats: RunStatistics, label: str, length: int) -> bool:
    """Return whether a method is shown to make the right answers likelier than no patch.

    By the paired test against the plain model, corrected over all methods of the run, and, where
    the run has controls, by the test that the model reads the answers at all.
    """
    comparison = stats.comparisons_with_plain(length).get(label)
    if comparison is None:
        return False
    difference, p_value = comparison
    is_better = difference.mean.estimate < 0 and p_value < SIGNIFICANCE_LEVEL
    return is_better and (stats.floor is None or stats.reads_answers(label, length))


def comparison_sentence(
    stats: RunStatistics, best: str, length: int, difference: MeanTest, p_value: float
) -> str:
    """Return what the likelihoods of right answers say of one method, with its numbers.

    Args:
        stats: One run's statistics.
        best: The method's label.
        length: Tokens.
        difference: The method's loss less the plain model's.
        p_value: Of the difference, corrected.
    """
    mine, plain = (stats.answer_loss(label, length) for label in (best, stats.plain or ""))
    assert mine is not None
    assert plain is not None
    methods = len(stats.comparisons_with_plain(length))
    after = correction_text(stats, methods, length)
    numbers = (
        f"{nats_text(mine.mean.estimate)} against {nats_text(plain.mean.estimate)} nats a token "
        f"(difference {nats_text(difference.mean.estimate)}, {_interval_text(difference)}, "
        f"{p_text(p_value)}{after})"
    )
    who = stats.names[best]
    at, head = f"at {length:,} tokens", f"At {length:,} tokens"
    if difference.mean.low == difference.mean.high == 0:
        return f"{head} {who} changes the likelihood of no right answer: {numbers}."
    if (least := too_few_texts(stats, length, difference)) is not None:
        return (
            f"This run has too few texts to say ({least} decide) whether {who} makes the right "
            f"answers likelier than no patch {at}: {numbers}."
        )
    if p_value >= SIGNIFICANCE_LEVEL:
        more = ""
        if needed := texts_needed(stats, length, difference):
            more = f"; about {needed:,} texts would, if the difference is as measured"
        return (
            f"This run cannot decide whether {who} makes the right answers likelier than no "
            f"patch {at}: {numbers}{more}."
        )
    if difference.mean.estimate > 0:
        return (
            f"No method makes the right answers likelier than no patch {at}; under the best of "
            f"them, {who}, they are less likely: {numbers}."
        )
    return f"{head} {who} makes the right answers likelier than no patch: {numbers}."


def _rivals(stats: RunStatistics, ranking: Ranking) -> str:
    if len(stats.patched) < 2:
        return ""
    names = [stats.names[label] for label in ranking.rivals]
    if not names:
        return "Each of the other methods is shown to be worse than it."
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"Not told apart from it: {shown}{more}."


def _floor(stats: RunStatistics, best: str, length: int) -> str:
    if stats.floor is None:
        return ""
    floor = stats.floor.mean.estimate
    text = (
        "Without the answers in the text, the plain model gives them "
        f"{nats_text(floor)} nats a token"
    )
    if stats.reads_answers(best, length):
        return f"{text}: the model does read them."
    return f"{text}: it is not shown that the model reads them."
