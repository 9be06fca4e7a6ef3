"""Tables of a report: retrieval, perplexity, costs and controls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rope_patch.evaluation.report.conclusions import PLAIN, correction_text, method_row
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.retrieval import RULER_TASKS, THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import (
    BASE,
    CONTROL,
    NOTHING,
    UNKNOWN,
    Cell,
    Row,
    Table,
    filter_mark,
    first_few,
    length_groups,
    length_heads,
    n_text,
    nats_cell,
    one_line,
    p_text,
    percent,
    percent_range,
    perplexity_cell,
    perplexity_text,
    points_range,
    points_text,
    ratio_cell,
    ratio_column,
)
from rope_patch.evaluation.results_schema import ControlKind, HarnessRecord, ShortRecord
from rope_patch.statistics import (
    SIGNIFICANCE_LEVEL,
    ClusteredMean,
    Interval,
    PairedTest,
    UsableLength,
)
from rope_patch.tasks import CHOICE, LIKELIHOOD

BETTER, WORSE, BEST, PASSED = "▲", "▼", "◆", "✓"

_MAX_RETENTION_WIDTH = 0.5  # a wider interval is not shown unless it decides something
_MAX_ACCURACY_WIDTH = 0.5


def accuracy_tables(stats: RunStatistics) -> list[Table]:
    """Return averages over all tasks, and every task by itself."""
    if not stats.tasks:
        return []
    averages = [_accuracy_averages(stats)] if len(stats.averaged_tasks) > 1 else []
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
    """Return accuracy at each length over the plain model's at the shortest length.

    A method of whose accuracy too little is known to say anything has no row.
    """
    rows = []
    for label in stats.labels:
        retentions = [stats.retention(label, length) for length in stats.lengths]
        told = [
            kept
            for length, kept in zip(stats.lengths, retentions, strict=True)
            if kept is not None and kept.low < kept.high  # else it is the reference itself
        ]
        if any(map(can_tell, told)):
            cells = [
                _retention_cell(interval, length > stats.trained_length)
                for interval, length in zip(retentions, stats.lengths, strict=True)
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    columns = length_heads(stats.lengths, stats.trained_length)
    return Table(
        name=f"Retention by length: accuracy over the {stats.plain_name}'s at "
        f"{stats.reference_length:,} tokens",
        corner="method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


def usable_table(stats: RunStatistics) -> Table | None:
    """Return usable lengths over all tasks and of each group of them; None where none is known."""
    families = list(stats.families) if len(stats.families) > 1 else []
    heads = [Cell(text="all tasks"), *(Cell(text=task_name(family)) for family in families)]
    if stats.has_ruler:
        tip = "Llama-2-7B's score at 4,096 tokens"
        heads.append(Cell(text="RULER's 85.6%", tip=tip))
    rows = []
    for label in stats.labels:
        lengths = [stats.usable_length(label, family) for family in (None, *families)]
        lengths += [stats.ruler_usable_length(label)] * stats.has_ruler
        if any(lengths):
            cells = [_usable_length_cell(stats, usable) for usable in lengths]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    name = "Usable length, in tokens"
    return Table(name=name, corner="method", columns=heads, rows=rows, groups=[])


def _usable_length_cell(stats: RunStatistics, usable: UsableLength | None) -> Cell:
    if usable is None:
        return Cell(text=UNKNOWN, tip=stats.nothing_to_keep)
    beyond = usable.is_beyond(stats.trained_length)
    return Cell(text=usable.text, note=usable.interval_text, tip=str(usable), beyond=beyond)


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


def _accuracy_averages(stats: RunStatistics) -> Table:
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
        cells += [Cell(text="") for _ in range(columns - len(cells))]
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
                        f"; against the {stats.plain_name} "
                        f"{points_text(pair.difference.estimate)} points "
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
    if retention.low == retention.high:
        return Cell(text=text, note="the reference", beyond=beyond)
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
        tip += f"; the right answer's perplexity is {_token_perplexity(nll)}"
    return Cell(text=text, note=span, tip=tip, beyond=beyond, share=accuracy.estimate)


def perplexity_tables(stats: RunStatistics) -> list[Table]:
    """Return the tables of perplexity over whole documents."""
    if not stats.losses:
        return []
    return [_by_position(stats), _perplexity_averages(stats)]


def key_token_table(stats: RunStatistics) -> Table | None:
    """Return LongPPL within and beyond the trained length."""
    return _within_and_beyond(
        stats,
        "LongPPL: perplexity of the tokens that need far context",
        lambda label, beyond: stats.key_tokens(label, beyond=beyond),
    )


def sliding_table(stats: RunStatistics) -> Table | None:
    """Return perplexity of the same tokens by the length of context before them."""
    curves = {label: stats.sliding(label) for label in stats.labels}
    if not any(curves.values()):
        return None
    lengths = stats.sliding_lengths
    return _by_length(stats, "Perplexity by length of context, sliding", lengths, curves)


def answer_table(stats: RunStatistics) -> Table | None:
    """Return how likely the right answers are, with the floor: the same without them in the text.

    The floor stands at the length where it was measured, which is the shortest.
    """
    rows = []
    columns = length_heads(stats.lengths, stats.trained_length)
    for label in stats.labels:
        losses = [stats.answer_loss(label, length) for length in stats.lengths]
        if any(losses):
            cells = [
                _answer_loss_cell(loss, beyond=head.beyond)
                for loss, head in zip(losses, columns, strict=True)
            ]
            rows.append(method_row(stats, label, cells))
    if not rows:
        return None
    if stats.floor is not None:
        cells = [_answer_loss_cell(None, beyond=head.beyond) for head in columns]
        cells[0] = _answer_loss_cell(stats.floor, beyond=columns[0].beyond)
        rows.append(Row(name="answer not in the text", key=CONTROL, cells=cells))
    return Table(
        name="Loss of the right answers (nats a token), mean of all questions' tasks",
        corner="method",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, stats.trained_length),
    )


def controls(stats: RunStatistics) -> list[tuple[str, Curve]]:
    """Return the controls of perplexity, each with its name; the first is what is compared with."""
    measured = (
        (stats.control_record, stats.control),
        (stats.short_control_record, stats.short_control),
    )
    return [(f"text cut to {r['context']:,}", curve) for r, curve in measured if r and curve]


def representative_positions(stats: RunStatistics) -> list[int]:
    """Return positions that every method has: around the trained length and on to the end."""
    curves = [set(stats.curve(label)) for label in stats.losses]
    ends = sorted(set.intersection(*curves) or set.union(*curves))
    far = [end for end in ends if end > stats.trained_length]
    targets = [ends[-1] * k / 4 for k in range(1, 5)]
    if far:  # quarters of the way from the trained length to the last position
        step = (far[-1] - stats.trained_length) / 4
        targets = [stats.trained_length / 2, stats.trained_length]
        targets += [stats.trained_length + step * k for k in range(1, 5)]
    return sorted({min(ends, key=lambda end: abs(end - target)) for target in targets})


def _answer_loss_cell(loss: ClusteredMean | None, *, beyond: bool) -> Cell:
    more = "" if loss is None else f" (perplexity {_token_perplexity(loss.mean.estimate)})"
    return nats_cell(loss, more, beyond=beyond)


def _token_perplexity(nats: float) -> str:
    return perplexity_text(math.exp(min(nats, 700)))  # above, float64 overflows


def _by_position(stats: RunStatistics) -> Table:
    curves = {label: stats.curve(label) for label in stats.losses}
    name = "Perplexity of the window that ends at a position"
    return _by_length(stats, name, representative_positions(stats), curves, controls(stats))


def _by_length(
    stats: RunStatistics,
    name: str,
    lengths: list[int],
    curves: dict[str, Curve],
    controls: Sequence[tuple[str, Curve]] = (),
) -> Table:
    columns = length_heads(lengths, stats.trained_length)

    def cells(curve: Curve) -> list[Cell]:
        return [
            perplexity_cell(curve.get(length), beyond=head.beyond)
            for length, head in zip(lengths, columns, strict=True)
        ]

    rows = [method_row(stats, label, cells(curve)) for label, curve in curves.items() if curve]
    rows += [Row(name=label, key=CONTROL, cells=cells(curve)) for label, curve in controls]
    groups = length_groups(columns, stats.trained_length)
    return Table(name=name, corner="tokens", columns=columns, rows=rows, groups=groups)


def _perplexity_averages(stats: RunStatistics) -> Table:
    labels = list(stats.losses)
    columns: list[tuple[Cell, list[Cell]]] = []
    for beyond in (False, True):
        averages = [stats.average(label, beyond=beyond) for label in labels]
        if not any(averages):
            continue
        cells = [perplexity_cell(average, beyond=beyond) for average in averages]
        columns.append((Cell(text="perplexity", beyond=beyond), cells))
        if stats.plain in labels:
            columns.append(_beside_plain_column(stats, labels, "", beyond=beyond))
        if beyond and (names := controls(stats)):
            ratios = [stats.ratio_to_control(label) for label in labels]
            columns.append(ratio_column(ratios, "", f"the {names[0][0]}", beyond=True))
    return Table(
        name="Perplexity averaged over all blocks",
        corner="method",
        columns=[head for head, _ in columns],
        rows=[
            method_row(stats, label, [cells[i] for _, cells in columns])
            for i, label in enumerate(labels)
        ],
        groups=length_groups([head for head, _ in columns], stats.trained_length),
    )


def _beside_plain_column(
    stats: RunStatistics, labels: list[str], head: str, *, beyond: bool
) -> tuple[Cell, list[Cell]]:
    """Return a column of perplexities over the plain model's, which is the base."""
    ratios = [stats.ratio_to_plain(label, beyond=beyond) for label in labels]
    cell, cells = ratio_column(ratios, head, f"the {stats.plain_name}", beyond=beyond)
    if stats.plain in labels:
        cells[labels.index(stats.plain)] = Cell(text=BASE, beyond=beyond)
    return cell, cells


def _within_and_beyond(
    stats: RunStatistics, name: str, measure: Callable[[str, bool], Interval | None]
) -> Table | None:
    measured = {
        label: [measure(label, beyond) for beyond in (False, True)] for label in stats.labels
    }
    columns = [Cell(text="perplexity"), Cell(text="perplexity", beyond=True)]
    rows = [
        method_row(
            stats,
            label,
            [perplexity_cell(v, beyond=c.beyond) for v, c in zip(values, columns, strict=True)],
        )
        for label, values in measured.items()
        if any(values)
    ]
    if not rows:
        return None
    groups = length_groups(columns, stats.trained_length)
    return Table(name=name, corner="method", columns=columns, rows=rows, groups=groups)


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
        head = Cell(text="all tasks", note=f"points more than the {stats.plain_name}")
        columns.append((head, [_overall_cell(stats, label) for label in stats.labels]))
    if stats.plain in stats.losses and len(stats.losses) > 1:
        head_text = f"perplexity up to {stats.trained_length:,}"
        columns.append(_beside_plain_column(stats, stats.labels, head_text, beyond=False))
    by_label = {label: [cells[i] for _, cells in columns] for i, label in enumerate(stats.labels)}
    rows = [
        method_row(stats, label, cells)
        for label, cells in by_label.items()
        if any(cell.text not in (NOTHING, BASE) for cell in cells)
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
    """Return what must fail: the plain model beyond its length, and questions without answers."""
    heads = ("whole text", "text without the answer", "no text")
    rows: dict[tuple[str, int], tuple[Row, dict[str, Interval]]] = {}
    for label in stats.labels:
        # A server's model may be extended, so its accuracy need not fall.
        if label == stats.plain and stats.lengths_beyond_training and not stats.is_served:
            far = stats.accuracy(label, lengths=stats.lengths_beyond_training)
            if far is not None:
                name = f"plain model beyond {stats.trained_length:,} tokens"
                row = Row(name=name, cells=[Cell(text="falls")], key=PLAIN)
                rows["", 0] = row, {heads[0]: far}
    kinds: dict[str, ControlKind] = {heads[1]: "no answer", heads[2]: "closed book"}
    for head, kind in kinds.items():
        for of in stats.controls(kind):
            name = f"{task_name(of.task)}, {of.length:,} tokens"
            expected = Cell(text=f"about {of.chance:.0%}")
            row = Row(name=name, cells=[expected], task=filter_mark(of.task))
            rows.setdefault((of.task, of.length), (row, {}))[1][head] = of.accuracy
    if not rows:
        return None
    shown = [head for head in heads if any(head in measured for _, measured in rows.values())]
    return Table(
        name="Accuracy where none is expected",
        corner="control",
        columns=[Cell(text=head) for head in (*shown, "expected")],
        rows=[
            replace(row, cells=[*(_control_cell(measured.get(h)) for h in shown), *row.cells])
            for row, measured in rows.values()
        ],
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
    return first_few(lines, _MAX_FAILURES, "{} more, in report.json")


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
    more = ""
    if against is not None:
        change = against.difference
        more = f"; against the plain model {points_text(change.estimate)} points "
        more += f"({points_range(change)})"
    return _accuracy_cell(accuracy, "", more, beyond=False)


def _overall_cell(stats: RunStatistics, label: str) -> Cell:
    against = stats.short_overall(label)
    if against is None:
        return Cell(text=BASE if label == stats.plain else NOTHING)
    change, span = against.difference, points_range(against.difference)
    text = points_text(change.estimate)
    tip = f"{text} points against the {stats.plain_name}, 95% interval {span}, {n_text(change)}"
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
        return Cell(text=UNKNOWN)
    span = f"{low:.2f} to {high:.2f}"
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


def _control_cell(interval: Interval | None) -> Cell:
    cell = _accuracy_cell(interval, "", "", beyond=False)
    return cell if interval is None else replace(cell, note=f"{cell.note}, {n_text(interval)}")
