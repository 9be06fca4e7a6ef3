"""What a run's results say of its methods, in words: the headline, the ranking, the gaps.

`conclude` answers which method to use. `Ranking` orders the methods for tables, figures and
sentences. `likelihood_sentences` say what the likelihoods of the right answers decide, which few
samples are enough for. `find_gaps` lists what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rope_patch.evaluation.report.results.retrieval import THRESHOLD, RunResults
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import (
    Cell,
    Row,
    Table,
    filter_mark,
    first_few,
    join_words,
    nats_range,
    nats_text,
    one_line,
    p_text,
    percent,
    share_with_interval,
)
from rope_patch.evaluation.results_schema import ControlKind, RunRecord, SampleRecord
from rope_patch.statistics import SIGNIFICANCE_LEVEL, MeanTest, Outcome, Verdict
from rope_patch.utils.figures import BASE_LOOK, Look, line_look

MAX_ROWS = 8  # rows that a table shows of each group of methods; the rest is folded

PLAIN = BASE_LOOK.colour

# Names that a sentence lists before "and N more".
_MAX_HEADLINE_NAMES = 2
_MAX_LISTED_GAPS = 6


_GUESSABLE_ACCURACY = 0.05  # where a guess gets nothing: from here on, answers are guessable
_CONTROLS: dict[str, ControlKind] = {
    "from a text that lacks the answer": "no answer",
    "without its text": "closed book",
}


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What a reader of nothing else learns.

    Attributes:
        headline: Which method to use, in at most 14 words.
        reason: Why none is shown to help, or which others are not told apart from the method.
        usable: The usable lengths of the best method and of the plain model.
        method: The label of the method to use; None where none is shown to help.
        measure: What the headline is in: "accuracy" or "loss"; empty where it has no number.
        length: Tokens that the headline is about; None where nothing was measured beyond the
            trained length.
    """

    headline: str
    reason: str = ""
    usable: str = ""
    method: str | None = None
    measure: str = ""
    length: int | None = None

    @property
    def details(self) -> str:
        """Return the line below the headline."""
        return " ".join(filter(None, (self.reason, self.usable)))


def conclude(stats: RunStatistics, ranking: Ranking) -> Conclusion:
    """Return which method to use, which needs a method that is shown to help.

    It is shown at the longest length, or up to where the best method is usable: there it has to
    pass the test of that, too.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
    """
    best = ranking.best
    if best is None or not (stats.tasks or stats.losses):
        return Conclusion(headline="Nothing was measured that tells which method to use")
    if not stats.lengths_beyond_training and not (stats.tasks and best == stats.plain):
        return _conclude_without_answers(stats)
    length = stats.verdict_length or stats.lengths[-1]
    lengths, usable = [length], stats.usable_length(best)
    if usable is not None and usable.low is not None and usable.is_beyond(stats.trained_length):
        lengths.append(usable.low)
    helped = next((n for n in lengths if is_shown_to_help(stats, best, n)), None)
    method = None if helped is None else best
    measure = ""
    if best == stats.plain or stats.plain is None:
        headline, measure = _shares_of_one(stats, best, length), "accuracy"
    elif helped is not None:
        numbers, measure = _beside_plain(stats, best, helped)
        use = "" if stats.is_served else "Use "
        headline = _capital(f"{use}{stats.names[best]}: {numbers}")
    else:
        headline = _headline_without_help(stats, best, length)
    reason = _rivals_text(stats, ranking) if method else _doubt(stats, best, length)
    return Conclusion(
        headline=headline,
        reason=reason,
        usable=_usable_text(stats, best),
        method=method,
        measure=measure,
        length=helped or length,
    )


def _conclude_without_answers(stats: RunStatistics) -> Conclusion:
    """Return what perplexity alone leaves to say: it does not show that far text is read."""
    beyond = f"beyond {stats.trained_length:,} tokens"
    if not any(stats.average(label, beyond=True) for label in stats.labels):
        return Conclusion(headline=f"No answers and no perplexity were measured {beyond}")
    no_method = "No method is shown to help: only" if stats.patched else "Only"
    return Conclusion(
        headline=f"{no_method} perplexity was measured {beyond}",
        reason="Perplexity does not show that far text is read.",
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _shares_of_one(stats: RunStatistics, label: str, length: int) -> str:
    """Return how many answers are right where nothing is compared: far, and at the shortest."""
    share = stats.accuracy(label, lengths=(length,))
    right = "no answers scored" if share is None else f"{percent(share.estimate)} right"
    text = _capital(f"{stats.names[label]}: {right} at {length:,} tokens")
    if stats.plain is None:
        return f"{text}, no plain model beside it"
    near = stats.accuracy(label, lengths=stats.lengths_within_training[:1] or (length,))
    if near is None or stats.lengths[0] in (length, *stats.lengths_beyond_training):
        return text
    return f"{text}, {percent(near.estimate)} at {stats.lengths[0]:,}"


def _beside_plain(stats: RunStatistics, label: str, length: int) -> tuple[str, str]:
    """Return a method's right answers beside the plain model's, or their loss, and which it is."""
    plain = stats.plain or ""
    base = stats.plain_name.removesuffix(" model")
    test, p_value = stats.accuracy_comparisons(length).get(label, (None, 1.0))
    shares = [stats.accuracy(each, lengths=(length,)) for each in (label, plain)]
    # Shares say more to a reader, where they are shown to differ by themselves.
    if test and p_value < SIGNIFICANCE_LEVEL and all(shares) and not _averaged_guesses(stats):
        mine, theirs = (percent(share.estimate) for share in shares if share is not None)
        return f"{mine} right at {length:,} tokens, {base} {theirs}", "accuracy"
    losses = [stats.answer_loss(each, length) for each in (label, plain)]
    mine, theirs = (nats_text(loss.mean.estimate) for loss in losses if loss is not None)
    return f"right answers likelier at {length:,} tokens (loss {mine}, {base} {theirs})", "loss"


def _headline_without_help(stats: RunStatistics, best: str, length: int) -> str:
    """Return that no method helps, or is shown to."""
    at, who = f"at {length:,} tokens", stats.names[best]
    verdict = stats.verdicts_on_plain(length).get(best)
    if verdict is not None:
        is_worse = verdict.outcome is Outcome.WORSE
    else:
        test, p_value = stats.accuracy_comparisons(length).get(best, (None, 1.0))
        is_shown = test is not None and p_value < SIGNIFICANCE_LEVEL
        is_worse = is_shown and test is not None and test.difference.estimate < 0
        if is_shown and not is_worse:
            return f"No claim {at}: {_averaged_guesses(stats)[0]} can be answered without reading"
    if stats.is_served and len(stats.labels) == 2:
        verb = "is worse than" if is_worse else "is not told apart from"
        return _capital(f"{who} {verb} {stats.plain_name} {at}")
    if is_worse:
        return f"No method helps {at}: the best, {who}, does worse"
    return f"No method is shown to help {at}"


def _doubt(stats: RunStatistics, best: str, length: int) -> str:
    """Return why the best method is not shown to help; nothing where it is shown to be worse."""
    verdict = stats.verdicts_on_plain(length).get(best)
    who, plain = stats.names[best], f"{'' if stats.is_served else 'the '}{stats.plain_name}"
    if verdict is None:
        test, p_value = stats.accuracy_comparisons(length).get(best, (None, 1.0))
        shares = [stats.accuracy(each, lengths=(length,)) for each in (best, stats.plain or "")]
        if test is None or p_value < SIGNIFICANCE_LEVEL or not all(shares):
            return ""
        mine, theirs = (percent(share.estimate) for share in shares if share is not None)
        return f"With {who} {mine} are right and with {plain} {theirs}: that may be chance."
    mean, outcome = verdict.test.mean, verdict.outcome
    texts = f"{mean.effective_n:,.0f} text{'s' if round(mean.effective_n) != 1 else ''}"
    if outcome is Outcome.EQUAL:
        return f"With {who} each right answer is exactly as likely as with {plain}."
    if outcome is Outcome.WORSE:
        return ""
    if outcome is Outcome.BETTER:
        return (
            f"With {who} the right answers are likelier than with {plain}, but not surely likelier "
            "than where the text lacks them."
        )
    leader = who if mean.estimate < 0 else plain
    text = f"The right answers are the likeliest with {leader}, but {texts} cannot tell"
    if outcome is Outcome.TOO_FEW_TEXTS:
        return f"{text}: {verdict.least_texts} can."
    return f"{text}{f': about {n:,} would' if (n := verdict.texts_needed) else ''}."


def _rivals_text(stats: RunStatistics, ranking: Ranking) -> str:
    """Return which methods are as good as the best one for all that is known."""
    names = [stats.names[label] for label in ranking.rivals]
    if names:
        shown = first_few(names, _MAX_HEADLINE_NAMES, "{} more, named below")
        return f"Not told apart from it: {join_words(shown)}."
    by_accuracy = stats.best_by_accuracy() if stats.verdict_length is None else None
    if by_accuracy is not None and by_accuracy[1] >= SIGNIFICANCE_LEVEL:
        return "That it is better than each other method is not shown."
    return ""


def _usable_text(stats: RunStatistics, best: str) -> str:
    """Return the usable lengths of the best method and the plain model, and what that means."""
    labels = dict.fromkeys([best, *([] if stats.plain is None else [stats.plain])])
    lengths = {label: stats.usable_length(label) for label in labels}
    texts = [f"{stats.names[label]} {each}" for label, each in lengths.items() if each is not None]
    if not texts:
        return f"Usable length: cannot be told: {stats.nothing_to_keep}."
    return (
        f"Usable length, up to which {THRESHOLD:.0%} of the {stats.plain_name}'s right answers at "
        f"{stats.reference_length:,} tokens are kept: {'; '.join(texts)}."
    )


def guessable_tasks(stats: RunStatistics) -> dict[str, list[str]]:
    """Return the tasks whose control is passed, each with how it can be answered."""
    passed: dict[str, list[str]] = {}
    for how, kind in _CONTROLS.items():
        for control in stats.controls(kind):
            accuracy, chance = control.accuracy, control.chance
            if accuracy.low > chance if chance else accuracy.estimate > _GUESSABLE_ACCURACY:
                guess = f", where a guess gets {percent(chance)}" if chance else ""
                way = f"{how}, {share_with_interval(accuracy)}{guess}"
                passed.setdefault(control.task, []).append(way)
    return passed


def _averaged_guesses(stats: RunStatistics) -> list[str]:
    """Return the names of the tasks whose control is passed, of those whose mean is compared."""
    return [task_name(task) for task in guessable_tasks(stats) if task in stats.averaged_tasks]


def texts_needed_clause(stats: RunStatistics, label: str, length: int) -> str:
    """Return how many texts would decide whether a length is usable; nothing where none would."""
    usable = stats.usable_length(label)
    if usable is None or usable.undecided != length or not usable.texts_needed:
        return ""
    return f"; about {usable.texts_needed:,} texts a task would tell"


class Ranking:
    """The order in which tables, figures and sentences name a run's methods.

    The deciding measure is the likelihood of the right answers at the longest length beyond the
    trained one; else how far accuracy is kept, or accuracy; else perplexity beyond the trained
    length. Methods that tie are ordered by their perplexity within the trained length.
    """

    def __init__(self, stats: RunStatistics) -> None:
        self._stats = stats

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return all labels, best first; a list holds those with the same numbers everywhere."""
        same: dict[object, list[str]] = {}
        for label in self._stats.labels:
            numbers = None if label == self._stats.plain else _all_results(self._stats, label)
            same.setdefault(numbers or label, []).append(label)
        return sorted(same.values(), key=lambda labels: self._key(labels[0]))

    @property
    def best(self) -> str | None:
        """Return the first of the patched methods; the plain model if there is none."""
        labels = [labels[0] for labels in self.groups]
        patched = [label for label in labels if label != self._stats.plain]
        return next(iter([*patched, *labels]), None)

    @property
    def measure(self) -> str:
        """Return what the order goes by, in words."""
        stats = self._stats
        if (length := stats.verdict_length) is not None:
            return f"how likely the right answers are at {length:,} tokens"
        if stats.tasks and stats.lengths_beyond_training:
            return f"accuracy beyond {stats.trained_length:,} tokens"
        if any(stats.average(label, beyond=True) for label in stats.labels):
            return f"perplexity beyond {stats.trained_length:,} tokens"
        return f"perplexity up to {stats.trained_length:,} tokens"

    @cached_property
    def rivals(self) -> list[str]:
        """Return the methods that the likelihoods do not tell apart from the best one.

        Those under which all answers are as likely as under the best one are not among them.
        """
        length = self._stats.verdict_length
        if length is None or self.best is None:
            return []
        not_worse = {self._stats.best_by_likelihood(length), *self._stats.rivals_of_best(length)}
        return [
            labels[0]
            for labels in self.groups
            if labels[0] in not_worse and labels[0] not in self._equals(length)
        ]

    @cached_property
    def shown_best(self) -> set[str]:
        """Return the best method's label, and those that equal it; none unless all others lose.

        The likelihoods must show each other method to be worse, and the plain model, too.
        """
        stats, length = self._stats, self._stats.verdict_length
        if length is None or self.best is None or self.rivals:
            return set()
        equals = self._equals(length)
        if equals >= set(stats.patched) or not is_shown_to_help(stats, self.best, length):
            return set()
        return equals

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Return how each label's line is drawn in every figure: each has a look of its own."""
        labels = [label for group in self.groups for label in group if label != self._stats.plain]
        looks = {label: line_look(number) for number, label in enumerate(labels)}
        return looks if self._stats.plain is None else {self._stats.plain: BASE_LOOK, **looks}

    @property
    def colours(self) -> dict[str, str]:
        """Return the name of each label's colour."""
        return {label: look.colour for label, look in self.looks.items()}

    @cached_property
    def names(self) -> dict[str, str]:
        """Return the name of each group by its first label: its methods with = between them."""
        names = self._stats.names
        return {labels[0]: " = ".join(names[label] for label in labels) for labels in self.groups}

    def arrange(self, table: Table, *, merge: bool = True, mark: bool = False) -> Table:
        """Return a table with its methods best first, and what is beyond its length folded.

        Args:
            table: A table with a row a method, in one or several groups.
            merge: Whether methods with the same numbers everywhere become one row. Times differ
                even so.
            mark: Whether to mark the best method, which the deciding measure names.
        """
        rows: list[Row] = []
        for _, group in groupby(table.rows, key=lambda row: row.group):
            rows += self._arranged(list(group), merge, mark)
        return replace(table, rows=rows)

    def _arranged(self, rows: list[Row], merge: bool, mark: bool) -> list[Row]:
        by_mark = {row.method: row for row in rows if row.method}
        others = [row for row in rows if not row.method]  # such as controls
        arranged: list[Row] = []
        for labels in self.groups:
            measured = [label for label in labels if filter_mark(label) in by_mark]
            for label in measured[:1] if merge else measured:
                merged = measured if merge else [label]
                arranged.append(self._row(by_mark[filter_mark(label)], merged, mark))
        room = MAX_ROWS - len(others)
        if len(arranged) > room:
            plain = next((row for row in arranged if row.key == PLAIN), None)
            shown = arranged[:room]
            if plain is not None and plain not in shown:
                shown = [*arranged[: room - 1], plain]
            folded = [replace(row, folded=True) for row in arranged if row not in shown]
            arranged = [*shown, *folded]
        return [*(row for row in arranged if not row.folded), *others, *arranged[room:]]

    def _row(self, row: Row, labels: list[str], mark: bool) -> Row:
        names = self._stats.names
        return replace(
            row,
            name=" = ".join(names[label] for label in labels),
            key=self.colours[labels[0]],
            method=" ".join(map(filter_mark, labels)),
            best=mark and labels[0] in self.shown_best,
        )

    def _key(self, label: str) -> tuple[float, ...]:
        """Return what sorts a method: smaller is better."""
        stats = self._stats
        within = _perplexity_within(stats, label)
        if (length := stats.verdict_length) is not None:
            loss = stats.answer_loss(label, length)
            return (loss.mean.estimate if loss else math.inf, within)
        if stats.tasks and stats.lengths_beyond_training:
            retention = stats.retention(label, stats.lengths[-1])
            far = stats.accuracy(label, lengths=stats.lengths_beyond_training)
            kept = retention.estimate if retention else far.estimate if far else -1
            usable = stats.usable_length(label)
            shown = usable.low or 0 if usable else 0
            return (-shown, -kept, _perplexity_beyond(stats, label), within)
        return (_perplexity_beyond(stats, label), within)

    def _equals(self, length: int) -> set[str]:
        """Return the patched methods with the best one's loss, itself among them."""
        stats = self._stats
        if self.best is None:
            return set()
        loss = stats.answer_loss(self.best, length)
        return {label for label in stats.patched if stats.answer_loss(label, length) == loss}


def _perplexity_within(stats: RunStatistics, label: str) -> float:
    """Return perplexity within the trained length over the plain model's; infinite if unknown."""
    if label == stats.plain:
        return 1.0
    ratio = stats.ratio_to_plain(label, beyond=False) or stats.average(label, beyond=False)
    return math.inf if ratio is None or math.isnan(ratio.estimate) else ratio.estimate


def _perplexity_beyond(stats: RunStatistics, label: str) -> float:
    """Return perplexity beyond the trained length, over the control's if there is one."""
    loss = stats.ratio_to_control(label) or stats.average(label, beyond=True)
    return math.inf if loss is None or math.isnan(loss.estimate) else loss.estimate


def _all_results(stats: RunStatistics, label: str) -> str:
    """Return everything that was measured under a method but times; empty if nothing was."""
    results: Any = stats.results
    perplexity = results.get("perplexity") or {}
    records = [perplexity, perplexity.get("sliding"), perplexity.get("key_tokens")]
    parts = [(record or {}).get("losses", {}).get(label) for record in records]
    parts += [(entry["samples"].get(label)) for entry in results.get("retrieval") or []]
    parts += [entry["samples"].get(label) for entry in results.get("short") or []]
    parts += [entry["metrics"].get(label) for entry in results.get("harness") or []]
    return repr(parts) if any(parts) else ""


def likelihood_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield what the likelihoods of the right answers decide beyond the trained length."""
    length = stats.verdict_length
    if length is None or stats.plain is None:
        return
    best = ranking.best
    verdict = stats.verdicts_on_plain(length).get(best) if best else None
    if best is None or verdict is None:
        return
    yield verdict_sentence(stats, best, length, verdict)
    if others := _rivals_sentence(stats, ranking):
        yield others
    if floor := _floor_sentence(stats, best, length):
        yield floor


def verdict_sentence(stats: RunStatistics, best: str, length: int, verdict: Verdict) -> str:
    """Return what the likelihoods of right answers say of one method, with its numbers.

    Args:
        stats: One run's statistics.
        best: The method's label.
        length: Tokens.
        verdict: On the method beside the plain model.
    """
    mine, plain = (stats.answer_loss(label, length) for label in (best, stats.plain or ""))
    assert mine is not None
    assert plain is not None
    after = correction_text(stats, len(stats.verdicts_on_plain(length)), length)
    losses = (mine.mean.estimate, plain.mean.estimate)
    return verdict_text(verdict, stats.names[best], length, losses, after)


def verdict_text(
    verdict: Verdict, who: str, length: int, losses: tuple[float, float], after: str
) -> str:
    """Return a verdict on a method beside the plain model as a sentence, with its numbers.

    Args:
        verdict: The verdict.
        who: The method's name.
        length: Tokens.
        losses: Nats a token of right answers, with the method and without.
        after: What the p-value is corrected for, with a space before it.
    """
    difference, outcome = verdict.test, verdict.outcome
    mine, plain = map(nats_text, losses)
    numbers = (
        f"{mine} against {plain} nats a token "
        f"(difference {nats_text(difference.mean.estimate)}, {_interval_text(difference)}, "
        f"{p_text(verdict.p_value)}{after})"
    )
    at, head = f"at {length:,} tokens", f"At {length:,} tokens"
    if outcome is Outcome.EQUAL:
        return f"{head} {who} changes the likelihood of no right answer: {numbers}."
    if outcome is Outcome.TOO_FEW_TEXTS:
        return (
            f"This run has too few texts to say ({verdict.least_texts} decide) whether {who} makes "
            f"the right answers likelier than no patch {at}: {numbers}."
        )
    if outcome is Outcome.NOT_TOLD_APART:
        more = ""
        if needed := verdict.texts_needed:
            more = f"; about {needed:,} texts would, if the difference is as measured"
        return (
            f"This run cannot decide whether {who} makes the right answers likelier than no "
            f"patch {at}: {numbers}{more}."
        )
    if outcome is Outcome.WORSE:
        return (
            f"No method makes the right answers likelier than no patch {at}; under the best of "
            f"them, {who}, they are less likely: {numbers}."
        )
    return f"{head} {who} makes the right answers likelier than no patch: {numbers}."


def _interval_text(test: MeanTest) -> str:
    """Return a loss's interval, values and texts: 95% interval −4.5 to −3.6, n = 40, 8 texts."""
    mean = test.mean
    texts = f"{mean.effective_n:,.0f} text{'s' if mean.effective_n != 1 else ''}"
    rests_on = f"n = {mean.n:,.0f}, {texts}"
    if not math.isfinite(mean.half_width):
        return f"no interval, {rests_on}"
    return f"95% interval {nats_range(mean)}, {rests_on}"


def _rivals_sentence(stats: RunStatistics, ranking: Ranking) -> str:
    if len(stats.patched) < 2:
        return ""
    if not ranking.rivals:
        return "Each of the other methods is shown to be worse than it."
    return f"Not told apart from it: {join_words([stats.names[each] for each in ranking.rivals])}."


def _floor_sentence(stats: RunStatistics, best: str, length: int) -> str:
    if stats.floor is None:
        return ""
    floor = stats.floor.mean.estimate
    text = (
        f"Without the answers in the text, the {stats.plain_name} gives them "
        f"{nats_text(floor)} nats a token"
    )
    if stats.reads_answers(best, length):
        return f"{text}: the model does read them."
    return f"{text}: it is not shown that the model reads them."


def is_shown_to_help(stats: RunStatistics, label: str, length: int) -> bool:
    """Return whether a method is shown to do better than the plain model at a length.

    Where right answers have likelihoods, those decide: by the paired test against the plain model,
    corrected over all methods of the run, and, where the run has controls, by the test that the
    model reads the answers at all. Else right answers decide, unless they can be guessed.
    """
    verdict = stats.verdicts_on_plain(length).get(label)
    if verdict is None:
        test, p_value = stats.accuracy_comparisons(length).get(label, (None, 1.0))
        is_better = test is not None and test.difference.estimate > 0
        return is_better and p_value < SIGNIFICANCE_LEVEL and not _averaged_guesses(stats)
    is_better = verdict.outcome is Outcome.BETTER
    return is_better and (stats.floor is None or stats.reads_answers(label, length))


def correction_text(stats: RunStatistics, methods: int, length: int | None = None) -> str:
    """Return what a p-value is corrected for: after Holm over 3 methods and 2 looks."""
    looks = stats.looks if stats.look_factor(length) > 1 else 0
    parts = [f"Holm over {methods} methods"] * (methods > 1)
    parts += [f"{looks} look{'s' if looks > 1 else ''} at growing data"] * (looks > 0)
    return f" after {' and '.join(parts)}" if parts else ""


def find_gaps(results: RunRecord) -> list[str]:
    """Return what is missing from one run's results, each with the reason.

    A part that failed is missing. So is a task's score at a length under a method if all of its
    samples failed. A failed sample among others is no gap: the report lists it without counting it.

    Args:
        results: One run's results.
    """
    missing = [one_line(note) for note in results["run"].get("not_run") or []]
    tasks = [(entry["task"], entry["samples"]) for entry in results.get("retrieval") or []]
    tasks += [
        (f"the control of {entry['task']} ({entry.get('kind', 'no answer')})", entry["samples"])
        for entry in results.get("control") or []
    ]
    for name, samples in tasks:
        for label, rows in samples.items():
            missing += _lengths_without_score(f"{name}, {label}", rows)
    for entry in results.get("short") or []:
        for label, scores in entry["samples"].items():
            if scores and all(score is None for score in scores):
                missing.append(one_line(f"{entry['task']}, {label}: all of its samples failed"))
    return missing


def _lengths_without_score(task: str, rows: Sequence[SampleRecord]) -> list[str]:
    """Return the lengths at which no sample has a score; one entry if that is so at all lengths."""
    by_length: dict[int, list[SampleRecord]] = {}
    for row in rows:
        by_length.setdefault(row["length"], []).append(row)
    empty = {
        length: at[0].get("error")
        for length, at in by_length.items()
        if all(row["score"] is None for row in at)
    }
    if len(empty) == len(by_length) > 1:
        return [one_line(f"{task}: {next(iter(empty.values()))}")]
    return [
        one_line(f"{task}, {length:,} tokens: {reason}") for length, reason in sorted(empty.items())
    ]


def gap_sentence(missing: list[str]) -> str:
    """Return one sentence that names the gaps and how to fill them.

    Args:
        missing: From `find_gaps`; not empty.
    """
    names = [note.partition(": ")[0] for note in missing]
    shown = first_few(names, _MAX_LISTED_GAPS, "{} more, under Not run")
    parts = "1 part was" if len(names) == 1 else f"{len(names)} parts were"
    return (
        f"Incomplete: {parts} not measured ({'; '.join(shown)}); the same command tries again, and "
        "keeps what was measured."
    )


def method_row(
    run: RunResults, label: str, cells: list[Cell], group: str = "", task: str = ""
) -> Row:
    """Return the row of a method in a table of one run.

    Args:
        run: The run.
        label: The method's label.
        cells: The row's cells.
        group: The head above the row; none if empty.
        task: The task that filters know the row by; none if empty.
    """
    return Row(
        name=run.names[label],
        key=run.colour_names[label],
        cells=cells,
        group=group,
        method=filter_mark(label),
        task=filter_mark(task) if task else "",
    )
