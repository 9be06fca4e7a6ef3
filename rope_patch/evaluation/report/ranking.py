"""Ranking: a run's methods, best first; those with the same numbers everywhere count as one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rope_patch.evaluation.report.format import filter_mark
from rope_patch.evaluation.report.results.likelihood import SIGNIFICANCE_LEVEL
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import Row, Table

MAX_ROWS = 8  # of a table before its fold

# The plain model and the best methods have a colour; all others are grey.
PLAIN, BEST, REST = "m1", "m0", "rest"
_BEST = (BEST, "m2", "m3")


class Ranking:
    """The order in which tables, figures and sentences name a run's methods.

    The deciding measure is the likelihood of the right answers at the longest length beyond the
    trained one; else how far accuracy is kept, or accuracy; else perplexity beyond the trained
    length. Methods that tie are ordered by their price within the trained length.
    """

    def __init__(self, stats: RunStatistics) -> None:
        self._stats = stats

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return all labels, best first; a list holds those with the same numbers everywhere."""
        same: dict[object, list[str]] = {}
        for label in self._stats.labels:
            numbers = None if label == self._stats.plain else _numbers(self._stats, label)
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
        comparison = stats.comparisons_with_plain(length).get(self.best)
        equals = self._equals(length)
        if comparison is None or equals >= set(stats.patched):
            return set()
        difference, p_value = comparison
        better = difference.mean.estimate < 0 and p_value < SIGNIFICANCE_LEVEL
        return equals if better else set()

    @cached_property
    def colours(self) -> dict[str, str]:
        """Return the name of each label's colour."""
        patched = [labels for labels in self.groups if labels[0] != self._stats.plain]
        colours = dict.fromkeys(self._stats.labels, REST)
        for colour, labels in zip(_BEST, patched, strict=False):
            colours |= dict.fromkeys(labels, colour)
        if self._stats.plain is not None:
            colours[self._stats.plain] = PLAIN
        return colours

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
        price = _price(stats, label)
        if (length := stats.verdict_length) is not None:
            loss = stats.answer_loss(label, length)
            return (loss.mean.estimate if loss else math.inf, price)
        if stats.tasks and stats.lengths_beyond_training:
            retention = stats.retention(label, stats.lengths[-1])
            far = stats.accuracy(label, lengths=stats.lengths_beyond_training)
            kept = retention.estimate if retention else far.estimate if far else -1
            usable = stats.effective_length(label)[0] or 0
            return (-usable, -kept, _far_loss(stats, label), price)
        return (_far_loss(stats, label), price)

    def _equals(self, length: int) -> set[str]:
        """Return the patched methods with the best one's loss, itself among them."""
        stats = self._stats
        if self.best is None:
            return set()
        loss = stats.answer_loss(self.best, length)
        return {label for label in stats.patched if stats.answer_loss(label, length) == loss}


def _price(stats: RunStatistics, label: str) -> float:
    """Return perplexity within the trained length over the plain model's; infinite if unknown."""
    if label == stats.plain:
        return 1.0
    ratio = stats.ratio(label, stats.plain, beyond=False) if stats.plain is not None else None
    ratio = ratio or stats.average(label, beyond=False)
    return math.inf if ratio is None or math.isnan(ratio.estimate) else ratio.estimate


def _far_loss(stats: RunStatistics, label: str) -> float:
    """Return perplexity beyond the trained length; infinite if unknown."""
    loss = stats.ratio_to_control(label) or stats.average(label, beyond=True)
    return math.inf if loss is None or math.isnan(loss.estimate) else loss.estimate


def _numbers(stats: RunStatistics, label: str) -> str:
    """Return everything that was measured under a method but times; empty if nothing was."""
    results: Any = stats.results
    perplexity = results.get("perplexity") or {}
    records = [perplexity, perplexity.get("sliding"), perplexity.get("key_tokens")]
    parts = [(record or {}).get("losses", {}).get(label) for record in records]
    parts += [(entry["samples"].get(label)) for entry in results.get("retrieval") or []]
    parts += [entry["samples"].get(label) for entry in results.get("short") or []]
    parts += [entry["metrics"].get(label) for entry in results.get("harness") or []]
    return repr(parts) if any(parts) else ""
