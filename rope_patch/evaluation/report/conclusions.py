"""What a run's results say of its methods, in words: the headline, the ranking, the gaps.

`headline` answers which method to use. `Ranking` orders the methods for tables, figures and
sentences. `likelihood_sentences` say what the likelihoods of the right answers decide, which few
samples are enough for. `find_gaps` lists what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rope_patch.evaluation.report.results.retrieval import THRESHOLD, RunResults
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import (
    Cell,
    Row,
    Table,
    change_with_interval,
    filter_mark,
    first_few,
    n_text,
    nats_range,
    nats_text,
    one_line,
    p_text,
    perplexity_with_interval,
    points_range,
    points_text,
    share_with_interval,
)
from rope_patch.evaluation.results_schema import RunRecord, SampleRecord
from rope_patch.statistics import SIGNIFICANCE_LEVEL, MeanTest, Outcome, UsableLength, Verdict
from rope_patch.utils.figures import BASE_LOOK, Look, line_look

MAX_ROWS = 8  # rows that a table shows of each group of methods; the rest is folded

PLAIN = BASE_LOOK.colour

# Names that a sentence lists before "and N more".
_MAX_HEADLINE_NAMES = 2
_MAX_LISTED_RIVALS = 4
_MAX_LISTED_GAPS = 6


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
    if stats.is_served and best == stats.plain:
        return _served_headline(stats, best)
    if stats.is_served and len(stats.labels) == 2:
        return _servers_headline(stats, best)
    usable = stats.usable_length(best)
    if usable is not None and usable.is_beyond(stats.trained_length):
        return _usable_length_headline(stats, ranking, best, usable)
    length = stats.verdict_length
    if length is not None and (verdict := stats.verdicts_on_plain(length).get(best)):
        return _likelihood_headline(stats, ranking, best, length, verdict)
    if stats.lengths_beyond_training:
        return _accuracy_headline(stats, best)
    if stats.average(best, beyond=True) is not None:
        return _perplexity_headline(stats, best)
    if not stats.tasks and not stats.losses:
        return "Nothing was measured that tells which method to use."
    return (
        "This run cannot decide what to use: it measured nothing beyond the trained "
        f"{stats.trained_length:,} tokens."
    )


def _served_headline(stats: RunStatistics, label: str) -> str:
    """Return how far the model of a server, the only one that was measured, is usable."""
    trained = f"the trained {stats.trained_length:,} tokens"
    usable, who = stats.usable_length(label), f"The {stats.plain_name}"
    if usable is not None and usable.is_beyond(stats.trained_length):
        return f"{who} is usable up to {_usable_length_text(stats, label, usable)}."
    first = next(
        (n for n in stats.lengths_beyond_training if stats.retention(label, n) is not None), None
    )
    if first is not None and (kept := stats.retention(label, first)) is not None:
        return (
            f"{who} is not shown to be usable beyond {trained}: at {first:,} it keeps "
            f"{share_with_interval(kept)} of its accuracy."
        )
    lengths = stats.lengths_beyond_training or tuple(stats.lengths)
    if (share := stats.accuracy(label, lengths=lengths)) is not None:
        where = "beyond" if stats.lengths_beyond_training else "up to"
        why = f" ({stats.nothing_to_keep})" if stats.lengths_beyond_training else ""
        return (
            f"{who} answers {share_with_interval(share)} right {where} {trained}; how far it is "
            f"usable is not shown{why}."
        )
    for beyond, where in ((True, "beyond"), (False, "up to")):
        if (loss := stats.average(label, beyond=beyond)) is not None:
            return (
                f"{who} has a perplexity of {perplexity_with_interval(loss)} {where} {trained}; "
                "no answers were measured, so how far it is usable is not shown."
            )
    return f"Nothing was measured that tells how far the {stats.plain_name} is usable."


def _servers_headline(stats: RunStatistics, other: str) -> str:
    """Return which of two servers does better on the same questions."""
    first, second = stats.names[str(stats.plain)], stats.names[other]
    length = stats.verdict_length
    if length is not None and (verdict := stats.verdicts_on_plain(length).get(other)):
        numbers = (
            f"difference {nats_text(verdict.test.mean.estimate)} nats a token, "
            f"{_interval_text(verdict.test)}, {p_text(verdict.p_value)}"
        )
        if verdict.is_shown:
            more = "likelier" if verdict.outcome is Outcome.BETTER else "less likely"
            return (
                f"At {length:,} tokens the right answers are {more} with {second} than with "
                f"{first}: {numbers}."
            )
        if verdict.outcome is Outcome.EQUAL:
            return (
                f"At {length:,} tokens the right answers are exactly as likely with {second} as "
                f"with {first} ({n_text(verdict.test.mean)})."
            )
        few = f" ({verdict.least_texts} texts decide)"
        few = few if verdict.outcome is Outcome.TOO_FEW_TEXTS else ""
        return (
            f"This run cannot tell {second} from {first} at {length:,} tokens by how likely the "
            f"right answers are{few}: {numbers}."
        )
    if (compared := stats.accuracy_comparisons().get(other)) is None:
        return f"No question was answered by both {first} and {second}."
    test, p_value = compared
    numbers = (
        f"{points_text(test.difference.estimate)} points ({points_range(test.difference)}, "
        f"{n_text(test.difference)}, {p_text(p_value)})"
    )
    at = f"{stats.lengths[-1]:,} tokens"
    if p_value < SIGNIFICANCE_LEVEL:
        more = "more" if test.difference.estimate > 0 else "fewer"
        return f"At {at} {second} answers {more} questions right than {first}: {numbers}."
    return f"This run cannot tell {second} from {first} at {at} by right answers: {numbers}."


def _usable_length_headline(
    stats: RunStatistics, ranking: Ranking, best: str, usable: UsableLength
) -> str:
    who = _best_names(stats, ranking, best) if best != stats.plain else "the plain model"
    return (
        f"Use {who}: usable up to {_usable_length_text(stats, best, usable)}"
        f"{_price_clause(stats, best)}{_rivals_clause(stats, ranking)}."
    )


def _usable_length_text(stats: RunStatistics, label: str, usable: UsableLength) -> str:
    """Return a length beyond the trained one, in tokens and times, and what is kept there."""
    length = usable.stated or 0
    kept = stats.retention(label, length)
    text = f"{usable}, {length / stats.trained_length:.3g} times the trained "
    text += f"{stats.trained_length:,}"
    if kept is None:
        return text
    whose = "its" if stats.is_served else f"the {stats.plain_name}'s"
    return f"{text}, with {share_with_interval(kept)} of {whose} short-context accuracy there"


def _best_names(stats: RunStatistics, ranking: Ranking, best: str) -> str:
    """Return the best method's name, and the names of methods with the same numbers."""
    labels = next(labels for labels in ranking.groups if best in labels)
    return " or ".join(stats.names[label] for label in labels[: _MAX_HEADLINE_NAMES + 1])


def _price_clause(stats: RunStatistics, label: str) -> str:
    """Return what a method costs within the trained length; nothing where that is unknown."""
    if stats.plain is None or label == stats.plain:
        return ""
    parts = []
    ratio = stats.ratio_to_plain(label, beyond=False)
    if ratio is not None and math.isfinite(ratio.estimate):
        parts.append(f"{change_with_interval(ratio)} in perplexity")
    if (short := stats.short_overall(label)) is not None:
        change = short.difference
        numbers = f"{points_text(change.estimate)} points ({points_range(change)})"
        parts.append(f"{numbers} at short tasks")
    if not parts:
        return ""
    return f", at the price of {' and '.join(parts)} up to {stats.trained_length:,}"


def _rivals_clause(stats: RunStatistics, ranking: Ranking) -> str:
    if not ranking.rivals:
        return ""
    return f"; not told apart from it: {_rival_names(stats, ranking, _MAX_HEADLINE_NAMES)}"


def _rival_names(stats: RunStatistics, ranking: Ranking, most: int) -> str:
    """Return the names of the first rivals, and how many more there are."""
    names = [stats.names[label] for label in ranking.rivals]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _likelihood_headline(
    stats: RunStatistics,
    ranking: Ranking,
    best: str,
    length: int,
    verdict: Verdict,
) -> str:
    difference, outcome = verdict.test.mean, verdict.outcome
    who, texts = stats.names[best], f"{difference.effective_n:,.0f}"
    count = f"{texts} text{'s' if texts != '1' else ''}"
    sure = f"({p_text(verdict.p_value)}, {count})"
    if outcome is Outcome.EQUAL:
        return (
            f"Use none of these methods at {length:,} tokens: with the best of them, {who}, the "
            f"right answers are exactly as likely as with the {stats.plain_name} "
            f"({n_text(difference)})."
        )
    if not verdict.is_shown:
        leader = who if difference.estimate < 0 else f"the {stats.plain_name}"
        likeliest = f"at {length:,} tokens: the right answers are the likeliest with {leader}, "
        if outcome is Outcome.TOO_FEW_TEXTS:
            few = "is too little" if texts == "1" else "are too few"
            return (
                f"This run cannot decide what to use {likeliest}but {count} {few} to say "
                f"({verdict.least_texts} decide)."
            )
        more = f"; about {verdict.texts_needed:,} would do" if verdict.texts_needed else ""
        return (
            f"This run cannot decide what to use {likeliest}but {count} are too few to be sure "
            f"({p_text(verdict.p_value)}{more})."
        )
    if outcome is Outcome.WORSE:
        return (
            f"Use none of these methods at {length:,} tokens: even with {who}, the best of them, "
            f"the right answers are less likely than with the {stats.plain_name} {sure}."
        )
    if stats.floor is not None and not stats.reads_answers(best, length):
        return (
            f"This run cannot decide what to use at {length:,} tokens: with {who} the right "
            f"answers are likelier than with the {stats.plain_name} {sure}, but not surely "
            "likelier than where the text lacks them."
        )
    return (
        f"At {length:,} tokens use {_best_names(stats, ranking, best)} rather than the "
        f"{stats.plain_name}: the right answers are likelier with it {sure}"
        f"{_price_clause(stats, best)}{_rivals_clause(stats, ranking)}; that the model is usable "
        "there is not shown."
    )


def _accuracy_headline(stats: RunStatistics, best: str) -> str:
    """Return what accuracy says where no length is shown to be usable."""
    who = f"the {stats.plain_name}" if best == stats.plain else stats.names[best]
    far = stats.accuracy(best, lengths=stats.lengths_beyond_training)
    share = "" if far is None else share_with_interval(far)
    beyond = f"beyond the trained {stats.trained_length:,} tokens"
    first = stats.lengths_beyond_training[0]
    retention = stats.retention(best, first)
    if retention is None:
        reason = stats.nothing_to_keep
        answers = f"; with {who} {share} of the answers are right there" if share else ""
        return f"This run cannot decide what to use {beyond}: {reason}{answers}."
    kept = share_with_interval(retention)
    if retention.high >= THRESHOLD:
        return (
            f"This run cannot decide what to use {beyond}: with {who} the model keeps {kept} of "
            f"its accuracy at {first:,}, which may be above or below {THRESHOLD:.0%}"
            f"{texts_needed_clause(stats, best, first)}."
        )
    if best == stats.plain:
        return (
            f"The plain model is not usable {beyond}: at {first:,} it keeps {kept} of its accuracy."
        )
    return (
        f"Use none of these methods {beyond}: even with {who}, the best of them, the model keeps "
        f"{kept} of its accuracy at {first:,}."
    )


def texts_needed_clause(stats: RunStatistics, label: str, length: int) -> str:
    """Return how many texts would decide whether a length is usable; nothing where none would."""
    usable = stats.usable_length(label)
    if usable is None or usable.undecided != length or not usable.texts_needed:
        return ""
    return f"; about {usable.texts_needed:,} texts a task would tell"


def _perplexity_headline(stats: RunStatistics, best: str) -> str:
    """Return what perplexity says alone: it does not show that far text is read."""
    mine, beyond = stats.average(best, beyond=True), f"beyond {stats.trained_length:,} tokens"
    numbers = perplexity_with_interval(mine) if mine else ""
    head = "This run cannot decide what to use: it measured no answers, only perplexity, which "
    if best == stats.plain:
        return f"{head}{beyond} is {numbers} with the plain model."
    plain = stats.average(stats.plain, beyond=True) if stats.plain is not None else None
    text = f"{head}{beyond} is the lowest with {stats.names[best]}, {numbers}"
    if plain is not None:
        text += f" against {perplexity_with_interval(plain)} of the {stats.plain_name}"
    ratio, record = stats.ratio_to_control(best), stats.control_record
    if ratio is not None and record is not None:
        cut = f"with the text cut to its last {record['context']:,} tokens"
        sure = ", and lower than" if ratio.high < 1 else ", but not surely lower than"
        text += f"{sure} {cut}, {change_with_interval(ratio)}"
    return f"{text}."


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
        verdict = stats.verdicts_on_plain(length).get(self.best)
        equals = self._equals(length)
        if verdict is None or equals >= set(stats.patched):
            return set()
        return equals if verdict.outcome is Outcome.BETTER else set()

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
    difference, outcome = verdict.test, verdict.outcome
    methods = len(stats.verdicts_on_plain(length))
    after = correction_text(stats, methods, length)
    numbers = (
        f"{nats_text(mine.mean.estimate)} against {nats_text(plain.mean.estimate)} nats a token "
        f"(difference {nats_text(difference.mean.estimate)}, {_interval_text(difference)}, "
        f"{p_text(verdict.p_value)}{after})"
    )
    who = stats.names[best]
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
    return f"Not told apart from it: {_rival_names(stats, ranking, _MAX_LISTED_RIVALS)}."


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
    """Return whether a method is shown to make the right answers likelier than no patch.

    By the paired test against the plain model, corrected over all methods of the run, and, where
    the run has controls, by the test that the model reads the answers at all.
    """
    verdict = stats.verdicts_on_plain(length).get(label)
    is_better = verdict is not None and verdict.outcome is Outcome.BETTER
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
    shown = first_few(names, _MAX_LISTED_GAPS)
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
