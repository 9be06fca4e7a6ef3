"""Retrieval as tables: accuracy by task and length, averages, retention, depth x length."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.evaluation.report.format import (
    NOTHING,
    filter_mark,
    n_text,
    p_text,
    percent,
    percent_range,
    perplexity_text,
    points_range,
    points_text,
)
from rope_patch.evaluation.report.method_row import method_row
from rope_patch.evaluation.report.results.retrieval import RULER_TASKS, THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import Cell, Row, Table, length_groups, length_heads
from rope_patch.evaluation.report.verdict import correction_text
from rope_patch.statistics import Interval
from rope_patch.tasks import CHOICE, LIKELIHOOD

SIGNIFICANCE_LEVEL = 0.05
BETTER, WORSE, BEST, PASSED = "▲", "▼", "◆", "✓"

_MAX_RETENTION_WIDTH = 0.5  # of an interval that is shown though it decides nothing
_MAX_ACCURACY_WIDTH = 0.5


def accuracy_tables(stats: RunStatistics) -> list[Table]:
    """Return averages over all tasks, and every task by itself."""
    if not stats.tasks:
        return []
    averages = [_averages(stats)] if len(stats.averaged_tasks) > 1 else []
    return [*averages, *filter(None, [_by_task(stats)])]


def uniform_tasks(stats: RunStatistics) -> dict[str, str]:
    """Return a line for each task whose answers are all wrong, or all right, by task."""
    lines = {}
    for task in stats.tasks:
        scores = [s["score"] for label in stats.labels for s in stats.samples(label, task)]
        if len(scores) > 1 and set(scores) in ({0.0}, {1.0}):
            hits = f"{sum(scores):,.0f} of {len(scores):,}"
            lines[task] = (
                f"{task_name(task)}: all {hits} answers are right, with every method, at every "
                "length and depth."
                if scores[0]
                else f"{task_name(task)}: {hits} answers are right, whatever the method, length "
                "and depth."
            )
    return lines


def can_tell(retention: Interval | None) -> bool:
    """Return whether an interval is narrow, or on one side of what is called usable."""
    if retention is None:
        return False
    is_decided = retention.low >= THRESHOLD or retention.high < THRESHOLD
    return is_decided or retention.high - retention.low < _MAX_RETENTION_WIDTH


def is_informative(share: Interval | None) -> bool:
    """Return whether an accuracy's interval leaves out half of all accuracies."""
    return share is not None and share.high - share.low < _MAX_ACCURACY_WIDTH


def retention_table(stats: RunStatistics) -> Table | None:
    """Return accuracy at each length over the plain model's within its trained length.

    A method of whose accuracy too little is known to say anything has no row.
    """
    rows = []
    for label in stats.labels:
        retentions = [stats.retention(label, length) for length in stats.lengths]
        if any(map(can_tell, retentions)):
            cells = [
                _retention_cell(interval, length > stats.trained_length)
                for interval, length in zip(retentions, stats.lengths, strict=True)
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    columns = length_heads(stats.lengths, stats.trained_length)
    return Table(
        name="Retention by length: accuracy over the plain model's up to "
        f"{stats.trained_length:,} tokens",
        corner="method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


def heat_maps(stats: RunStatistics, task: str) -> list[Table]:
    """Return a depth x length heat map for each method; none for a task without depths."""
    depths, heads = (
        stats.depths(task),
        length_heads(_task_lengths(stats, task), stats.trained_length),
    )
    maps = []
    for label in stats.labels if depths else []:
        if not stats.samples(label, task):
            continue
        rows = [
            Row(
                name=f"{depth:g}%",
                cells=[
                    _heat_cell(stats, label, task, length, depth)
                    for length in _task_lengths(stats, task)
                ],
            )
            for depth in depths
        ]
        maps.append(
            Table(
                name=stats.names[label],
                corner="depth",
                columns=heads,
                rows=rows,
                groups=length_groups(heads, stats.trained_length),
                key=stats.colour_names[label],
                method=filter_mark(label),
            )
        )
    return maps


def _task_lengths(stats: RunStatistics, task: str) -> list[int]:
    return sorted({s["length"] for label in stats.labels for s in stats.samples(label, task)})


def _by_task(stats: RunStatistics) -> Table | None:
    columns = length_heads(stats.lengths, stats.trained_length)
    uniform = uniform_tasks(stats)
    tasks = [task for task in stats.tasks if task not in uniform]
    rows = [row for task in tasks for row in _task_rows(stats, task, task_name(task))]
    if not rows:
        return None
    return Table(
        name="Accuracy by task and length",
        corner="task, method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


def _averages(stats: RunStatistics) -> Table:
    columns = length_heads(stats.lengths, stats.trained_length)
    rows = list(_task_rows(stats, None, ""))
    groups = length_groups(columns, stats.trained_length)
    if len(stats.lengths) > 1:
        columns = [*columns, Cell(text="increasing"), Cell(text="decreasing")]
        groups.append((Cell(text="weighted average"), 2))
        for label, row in zip(_measured_labels(stats, None), rows, strict=True):
            for increasing in (True, False):
                value = stats.ruler_weighted_average(label, increasing=increasing)
                text = NOTHING if value is None else percent(value)
                more = "more" if increasing else "less"
                tip = f"{text} if longer lengths weigh {more} (weighted as in RULER)"
                row.cells.append(Cell(text=text, tip=tip))
    if stats.has_ruler and len(stats.averaged_tasks) > RULER_TASKS:
        rows += _ruler_rows(stats, len(columns))
    return Table(
        name=f"Accuracy by length, mean of {len(stats.averaged_tasks)} tasks"
        + _scoring_note(stats),
        corner="method",
        columns=columns,
        rows=rows,
        groups=groups,
    )


def _ruler_rows(stats: RunStatistics, columns: int) -> Iterator[Row]:
    """Yield the mean of RULER's 13 tasks at each length, a row a method."""
    for label in _measured_labels(stats, None):
        cells = [
            _accuracy_cell(
                stats.ruler_average(label, length), "", "", length > stats.trained_length
            )
            for length in stats.lengths
        ]
        cells += [Cell(text=NOTHING) for _ in range(columns - len(cells))]
        yield method_row(stats, label, cells, f"RULER-like, {RULER_TASKS} tasks")


def _scoring_note(stats: RunStatistics) -> str:
    """Return how the averaged tasks are scored, where others of their questions ran, too."""
    if len(stats.averaged_tasks) == len(stats.tasks):
        return ""
    first = stats.averaged_tasks[0]
    if first.endswith(LIKELIHOOD):
        return ", the right answer the likeliest; choices are not among them"
    if first.endswith(CHOICE):
        return ", answers chosen"
    return ", answers written; twins by likelihood and choice are not among them"


def _measured_labels(stats: RunStatistics, task: str | None) -> list[str]:
    return [label for label in stats.labels if stats.samples(label, task)]


def _task_rows(stats: RunStatistics, task: str | None, group: str) -> Iterator[Row]:
    # Only one row a method is tested, at the longest length: else marks would come by chance.
    tested = task is None or stats.averaged_tasks == [task]
    comparisons = stats.accuracy_comparisons() if tested else {}
    best = stats.best_by_accuracy() if tested else None
    for label in _measured_labels(stats, task):
        cells = []
        for length in stats.lengths:
            accuracy = stats.accuracy(label, task, (length,))
            marks, more, at_longest = "", "", length == stats.lengths[-1]
            if label != stats.plain and stats.plain is not None:
                pair = stats.difference(label, stats.plain, task, (length,))
                if pair is not None:
                    more = (
                        f"; against the plain model {points_text(pair.difference.estimate)} points "
                        f"({points_range(pair.difference)})"
                    )
            if at_longest and label in comparisons:
                test, p = comparisons[label]
                marks += _significance_mark(test.difference, p)
                more += f", {p_text(p)}{correction_text(stats, len(comparisons))}"
            if at_longest and best and best[0] == label and best[1] < SIGNIFICANCE_LEVEL:
                marks += BEST
                others = len(stats.patched) - 1
                after = correction_text(stats, others)
                more += f"; better than each other method, {p_text(best[1])}{after}"
            cells.append(_accuracy_cell(accuracy, marks, more, length > stats.trained_length))
        yield method_row(stats, label, cells, group, task or "")


def _significance_mark(difference: Interval, p: float) -> str:
    if p >= SIGNIFICANCE_LEVEL or not difference.estimate:
        return ""
    return BETTER if difference.estimate > 0 else WORSE


def _accuracy_cell(accuracy: Interval | None, marks: str, more: str, beyond: bool) -> Cell:
    if accuracy is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = percent(accuracy.estimate), percent_range(accuracy)
    tip = f"{text} right, 95% interval {span}, {n_text(accuracy)}{more}"
    return Cell(text=f"{marks} {text}".strip(), note=span, tip=tip, beyond=beyond)


def _retention_cell(retention: Interval | None, beyond: bool) -> Cell:
    if retention is None:
        return Cell(text=NOTHING, tip="not measured", beyond=beyond)
    text, span = percent(retention.estimate), percent_range(retention)
    sure = retention.low >= THRESHOLD
    verdict = (
        "surely above" if sure else "surely below" if retention.high < THRESHOLD else "unsure if"
    )
    tip = f"{text} kept, 95% interval {span}, {n_text(retention)}: {verdict} {THRESHOLD:.0%}"
    return Cell(text=f"{PASSED} {text}" if sure else text, note=span, tip=tip, beyond=beyond)


def _heat_cell(stats: RunStatistics, label: str, task: str, length: int, depth: int) -> Cell:
    beyond = length > stats.trained_length
    samples = stats.samples(label, task, (length,), depth)
    accuracy = stats.accuracy(label, task, (length,), depth)
    if accuracy is None:
        return Cell(text=NOTHING, beyond=beyond, tip="not measured")
    hits = math.fsum(sample["score"] for sample in samples)
    text = f"{hits:.0f}/{len(samples)}" if hits == int(hits) else percent(accuracy.estimate)
    span = percent_range(accuracy)
    tip = (
        f"{stats.names[label]}: {hits:.3g} of {len(samples)} right at depth {depth:g}% of "
        f"{length:,} tokens, 95% interval {span}, {n_text(accuracy)}"
    )
    nll = stats.answer_nll(label, (length,), task, depth)
    if nll is not None:
        tip += f"; the right answer's perplexity is {perplexity_text(math.exp(min(nll, 700)))}"
    return Cell(text=text, note=span, tip=tip, beyond=beyond, share=accuracy.estimate)
