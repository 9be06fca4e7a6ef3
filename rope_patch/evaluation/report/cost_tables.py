"""Tables of costs (short context, time, memory) and of controls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from rope_patch.evaluation.harness_schema import HarnessRecord
from rope_patch.evaluation.report.format import (
    NOTHING,
    filter_mark,
    n_text,
    one_line,
    p_text,
    percent,
    percent_range,
    points_range,
    points_text,
)
from rope_patch.evaluation.report.method_row import method_row
from rope_patch.evaluation.report.ranking import PLAIN
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.retrieval_tables import SIGNIFICANCE_LEVEL
from rope_patch.evaluation.report.table import (
    Cell,
    Row,
    Table,
    perplexity_cell,
    ratio_cell,
    ratio_column,
)
from rope_patch.evaluation.results_schema import ShortRecord
from rope_patch.statistics import Interval, PairedTest

_MAX_FAILURES = 50  # failures that are listed one by one


def short_table(stats: RunStatistics) -> Table | None:
    """Return short tasks and perplexity within the trained length, against the plain model."""
    tasks = stats.results.get("short") or []
    columns = [
        (
            Cell(text=one_line(task["task"])),
            [_short_cell(stats, task, label) for label in stats.labels],
        )
        for task in tasks
    ]
    if len(tasks) > 1:
        head = Cell(text="all tasks", note="points more than the plain model")
        columns.append((head, [_overall_cell(stats, label) for label in stats.labels]))
    if stats.plain in stats.losses and len(stats.losses) > 1:
        ratios = [
            None
            if stats.plain is None or label == stats.plain
            else stats.ratio(label, stats.plain, beyond=False)
            for label in stats.labels
        ]
        head_text = f"perplexity up to {stats.trained_length:,}"
        columns.append(ratio_column(ratios, head_text, "the plain model"))
    by_label = {label: [cells[i] for _, cells in columns] for i, label in enumerate(stats.labels)}
    rows = [
        method_row(stats, label, cells)
        for label, cells in by_label.items()
        if any(cell.text != NOTHING for cell in cells)
    ]
    if not rows:
        return None
    name = "The price within the trained length"
    heads = [head for head, _ in columns]
    return Table(name=name, corner="method", columns=heads, rows=rows, groups=[])


def chance_text(stats: RunStatistics) -> str:
    """Return the accuracy of guessing at the ordinary tasks, as a sentence."""
    texts = [
        f"{one_line(task['task'])} {percent(chance)}"
        for task in stats.results.get("short") or []
        if (chance := task.get("chance")) is not None
    ]
    return f"By chance: {', '.join(texts)}." if texts else ""


def cost_table(stats: RunStatistics) -> Table | None:
    """Return time and memory of each method."""
    rows = []
    costs = stats.results.get("cost") or {}
    for label in stats.labels:
        if cost := costs.get(label):
            cells = [
                _time_cell(cost.get("prompt_seconds"), cost.get("prompt_tokens")),
                time_ratio_cell(cost.get("prompt_ratio")),
                _time_cell(cost.get("token_seconds"), 1),
                time_ratio_cell(cost.get("token_ratio")),
                Cell(text=size_text(cost.get("cache_bytes"))),
                Cell(text=size_text(cost.get("peak_bytes"))),
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    first = next(label for label in stats.labels if costs.get(label))
    heads = ("time", f"of {stats.names[first]}", "time", f"of {stats.names[first]}")
    return Table(
        name="Medians of time, and bytes",
        corner="method",
        columns=[
            *(Cell(text=head) for head in heads),
            Cell(text="cache"),
            Cell(text="cache and a step", tip="the most that decoding one token allocates"),
        ],
        rows=rows,
        groups=[
            (Cell(text="reading the prompt"), 2),
            (Cell(text="writing a token"), 2),
            (Cell(text="memory beside the weights"), 2),
        ],
    )


def harness_table(stats: RunStatistics) -> Table | None:
    """Return lm-eval's tasks, and users', whose samples have lengths of their own."""
    columns = [
        (entry, metric)
        for entry in stats.results.get("harness") or []
        for metric in dict.fromkeys(m for values in entry["metrics"].values() for m in values)
    ]
    rows = []
    for label in stats.labels:
        cells = [_harness_cell(stats, entry, metric, label) for entry, metric in columns]
        if any(cell.text != NOTHING for cell in cells):
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    return Table(
        name="Tasks of lm-eval: 95% interval of scores and perplexities, else ± standard error",
        corner="method",
        columns=[
            Cell(text=one_line(entry["task"]), note=one_line(metric)) for entry, metric in columns
        ],
        rows=rows,
        groups=[],
    )


def control_table(stats: RunStatistics) -> Table | None:
    """Return what must fail: the plain model beyond its length, and texts without a needle."""
    rows = []
    for label in stats.labels:
        if label == stats.plain and stats.lengths_beyond_training:
            far = stats.accuracy(label, lengths=stats.lengths_beyond_training)
            if far is not None:
                name = f"plain model beyond {stats.trained_length:,} tokens"
                rows.append(Row(name=name, cells=_control_cells(far, "falls"), key=PLAIN))
    for task, length, interval, chance in stats.controls:
        expected = f"about {chance:.0%}"
        name = f"{task_name(task)} without its needle, {length:,} tokens"
        rows.append(
            Row(name=name, cells=_control_cells(interval, expected), task=filter_mark(task))
        )
    if not rows:
        return None
    columns = [Cell(text="accuracy"), Cell(text="expected")]
    return Table(
        name="Accuracy where none is expected",
        corner="control",
        columns=columns,
        rows=rows,
        groups=[],
    )


def failure_lines(stats: RunStatistics) -> list[str]:
    """Return a line for each reason why samples failed."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for task, label, sample, reason in stats.failures:
        grouped.setdefault((task, label, reason), []).append(sample)
    lines = []
    for (task, label, reason), samples in grouped.items():
        count = f"{len(samples)} sample{'s' if len(samples) > 1 else ''}"
        names = ", ".join(samples[:3]) + (", …" if len(samples) > 3 else "")
        lines.append(
            one_line(f"{task_name(task)}, {stats.names[label]}: {count} ({names}): {reason}")
        )
    return lines[:_MAX_FAILURES] + [f"{len(lines) - _MAX_FAILURES} more"] * (
        len(lines) > _MAX_FAILURES
    )


def size_text(size: int | None) -> str:
    """Return a number of bytes as text."""
    if not size:
        return NOTHING
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _short_cell(stats: RunStatistics, task: ShortRecord, label: str) -> Cell:
    measured = stats.short(task, label)
    if measured is None:
        return Cell(text=NOTHING, tip="not measured")
    cell = _scored_cell(measured)
    if measured[1] is not None and len(stats.results.get("short") or []) == 1:
        # It is all tasks together.
        star = _significance_star(stats, label)
        return replace(
            cell, text=f"{cell.text}{star}", tip=f"{cell.tip}, {short_p_text(stats, label)}"
        )
    return cell


def _scored_cell(measured: tuple[Interval, PairedTest | None]) -> Cell:
    """Return an accuracy with its interval, and its difference from the plain model's."""
    accuracy, against = measured
    text, span = percent(accuracy.estimate), percent_range(accuracy)
    tip = f"{text} right, 95% interval {span}, {n_text(accuracy)}"
    if against is not None:
        change = against.difference
        tip += f"; against the plain model {points_text(change.estimate)} points "
        tip += f"({points_range(change)})"
    return Cell(text=text, note=span, tip=tip)


def _overall_cell(stats: RunStatistics, label: str) -> Cell:
    against = stats.short_overall(label)
    if against is None:
        return Cell(text=NOTHING)
    change, span = against.difference, points_range(against.difference)
    text = points_text(change.estimate)
    tip = f"{text} points against the plain model, 95% interval {span}, {n_text(change)}"
    star = _significance_star(stats, label)
    return Cell(text=f"{text}{star}", note=span, tip=f"{tip}, {short_p_text(stats, label)}")


def _significance_star(stats: RunStatistics, label: str) -> str:
    return " *" * (stats.short_p_values[label] < SIGNIFICANCE_LEVEL)


def short_p_text(stats: RunStatistics, label: str) -> str:
    """Return p of a method at all ordinary tasks: p = 0.03 after Holm over 3 methods."""
    methods = len(stats.short_p_values)
    after = f" after Holm over {methods} methods" * (methods > 1)
    return f"{p_text(stats.short_p_values[label])}{after}"


def _time_cell(seconds: float | None, tokens: int | None) -> Cell:
    if seconds is None:
        return Cell(text=NOTHING)
    text = f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
    note = f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds else ""
    return Cell(text=text, note=note)


def time_ratio_cell(ratio: Iterable[float] | None) -> Cell:
    """Return a ratio of times: the smallest, the median and the largest over the repeats."""
    if not ratio:
        return Cell(text=NOTHING)
    low, middle, high = (float(value) for value in ratio)
    if not math.isfinite(middle):
        return Cell(text=NOTHING)
    span = f"{low:.2f}–{high:.2f}"
    return Cell(
        text=f"×{middle:.2f}",
        note=span,
        tip=f"median ×{middle:.2f}, from {low:.2f} to {high:.2f} over the repeats",
    )


def _harness_cell(stats: RunStatistics, entry: HarnessRecord, metric: str, label: str) -> Cell:
    record = (entry["metrics"].get(label) or {}).get(metric)
    if record is None or (value := record.get("value")) is None:
        return Cell(text=NOTHING)
    if (measured := stats.harness(entry, metric, label)) is not None:
        return _scored_cell(measured)
    if (perplexities := stats.harness_perplexity(entry, metric, label)) is not None:
        return _perplexity_cell(*perplexities)
    error = record.get("stderr")
    note = "" if error in (None, "N/A") else f"± {float(str(error)):.3g}"
    return Cell(text=f"{float(value):.4g}", note=note)


def _perplexity_cell(interval: Interval, ratio: Interval | None) -> Cell:
    """Return a perplexity with its interval, and its ratio to the plain model's."""
    cell = perplexity_cell(interval)
    if ratio is None:
        return cell
    star = "" if ratio.low <= 1 <= ratio.high else " *"
    tip = f"{cell.tip}; against the plain model {ratio_cell(ratio).tip}"
    return replace(cell, text=cell.text + star, tip=tip)


def _control_cells(interval: Interval, expected: str) -> list[Cell]:
    text, span = percent(interval.estimate), percent_range(interval)
    tip = f"{text} right, 95% interval {span}, {n_text(interval)}"
    return [Cell(text=text, note=f"{span}, {n_text(interval)}", tip=tip), Cell(text=expected)]
