"""The summary's table: a row a method, best first; units and baselines stand in the heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rope_patch.evaluation.report.cost_tables import short_p_text
from rope_patch.evaluation.report.format import (
    NOTHING,
    n_text,
    nats_range,
    nats_text,
    percent,
    percent_range,
    points_range,
    points_text,
)
from rope_patch.evaluation.report.method_row import method_row
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.retrieval_tables import can_tell, is_informative
from rope_patch.evaluation.report.table import Cell, Row, Table, ratio_column
from rope_patch.statistics import Interval

Column = tuple[Cell, list[Cell]]


def summary_table(runs: list[tuple[str, RunStatistics, Ranking]]) -> tuple[Table | None, list[str]]:
    """Return a row for each method, of each run where there are several, and lines below them.

    A column with one value for all methods is a line.

    Args:
        runs: Titles, statistics and the order of the methods.
    """
    entries = [(stats, label) for _, stats, _ in runs for label in stats.labels]
    columns = [
        (head, cells)
        for head, cells in _columns([stats for _, stats, _ in runs], entries)
        if any(cell.text != NOTHING for cell in cells)
    ]
    lines = []
    if len(entries) > 2:
        constant = [column for column in columns if len({(c.text, c.note) for c in column[1]}) == 1]
        lines = [_line(head, cells[0]) for head, cells in constant]
        columns = [column for column in columns if column not in constant]
    if not columns:
        return None, lines
    rows: list[Row] = []
    position = 0
    for title, stats, ranking in runs:
        group = title if len(runs) > 1 else ""
        part = [
            method_row(stats, label, [cells[position + i] for _, cells in columns], group)
            for i, label in enumerate(stats.labels)
        ]
        position += len(part)
        rows += ranking.arrange(_table([], part), mark=True).rows
    if any(len(labels) > 1 for _, _, ranking in runs for labels in ranking.groups):
        times = "; times are the first's" * any(stats.results.get("cost") for _, stats, _ in runs)
        lines.append(f"= joins methods with the same numbers at every length{times}.")
    measures = {ranking.measure for _, _, ranking in runs}
    by = f", best first by {measures.pop()}" if len(measures) == 1 else ", best first"
    name = f"Methods{by}; 95% intervals in brackets"
    return replace(_table([head for head, _ in columns], rows), name=name), lines


def _table(columns: list[Cell], rows: list[Row]) -> Table:
    return Table(name="", corner="method", columns=columns, rows=rows, groups=[])


def _line(head: Cell, cell: Cell) -> str:
    value = f"{cell.text} ({cell.note})" if cell.note else cell.text
    unit = f" ({head.note})" if head.note else ""
    return f"The same with every method: {head.text}{unit}: {value}."


def _columns(
    runs: list[RunStatistics], entries: list[tuple[RunStatistics, str]]
) -> Iterator[Column]:
    """Yield the columns with a cell an entry, the deciding ones first."""
    longest = {stats.lengths[-1] for stats in runs if stats.lengths}
    decisive = {stats.verdict_length for stats in runs if stats.verdict_length}
    trained = {stats.trained_length for stats in runs}
    at = f"at {longest.pop():,}" if len(longest) == 1 else "at the longest"
    where = f"at {min(decisive):,}" if len(decisive) == 1 else "at the longest"
    of = f"{trained.pop():,}" if len(trained) == 1 else "the trained length"

    def each(cell: Callable[[RunStatistics, str], Cell]) -> list[Cell]:
        return [cell(stats, label) for stats, label in entries]

    nats = Cell(text=f"loss of right answers {where}", note="nats a token")
    yield nats, each(_loss_cell)
    if any(stats.lengths and stats.effective_length(label)[0] for stats, label in entries):
        tip = f"retention surely above {THRESHOLD:.0%} up to this length"
        yield Cell(text="usable up to", note="tokens", tip=tip), each(_effective_cell)
    if any(stats.has_ruler for stats in runs):
        yield Cell(text="RULER's 85.6% up to", note="tokens"), each(_ruler_cell)
    if any(can_tell(_retention(stats, label)) for stats, label in entries):
        retention = Cell(text=f"accuracy kept {at}", note=f"% of the plain model's up to {of}")
        yield retention, each(lambda stats, label: _share_cell(_retention(stats, label)))
    shares = [_far_accuracy(stats, label) for stats, label in entries]
    if not decisive or any(is_informative(share) for share in shares):
        yield Cell(text=f"accuracy beyond {of}", note="%"), list(map(_share_cell, shares))
    yield from _perplexity_columns(runs, entries, of)
    short = Cell(text="short tasks", note="points more than the plain model")
    yield short, each(_short_cell)
    time = Cell(text="time to read a prompt", note="times that of the first method")
    yield time, each(_time_cell)
    memory = Cell(
        text="cache and a step", note="MB", tip="the most that decoding one token allocates"
    )
    yield memory, each(_memory_cell)


def _perplexity_columns(
    runs: list[RunStatistics], entries: list[tuple[RunStatistics, str]], of: str
) -> Iterator[Column]:
    far = [stats.ratio_to_control(label) for stats, label in entries]
    contexts = {record["context"] for stats in runs if (record := stats.control_record)}
    base = "the control"
    if len(contexts) == 1:
        base = f"the text cut to {contexts.pop():,}"
    if not any(far):
        far = [_ratio_to_plain(stats, label, beyond=True) for stats, label in entries]
        base = "the plain model"
    yield ratio_column(far, f"perplexity beyond {of}", base)
    near = [_ratio_to_plain(stats, label, beyond=False) for stats, label in entries]
    yield ratio_column(near, f"perplexity up to {of}", "the plain model")


def _ratio_to_plain(stats: RunStatistics, label: str, *, beyond: bool) -> Interval | None:
    if stats.plain is None or label == stats.plain:
        return None
    return stats.ratio(label, stats.plain, beyond=beyond)


def _retention(stats: RunStatistics, label: str) -> Interval | None:
    return stats.retention(label, stats.lengths[-1]) if stats.lengths else None


def _far_accuracy(stats: RunStatistics, label: str) -> Interval | None:
    lengths = stats.lengths_beyond_training
    return stats.accuracy(label, lengths=lengths) if lengths else None


def _loss_cell(stats: RunStatistics, label: str) -> Cell:
    loss = stats.answer_loss(label, stats.verdict_length) if stats.verdict_length else None
    if loss is None:
        return Cell(text=NOTHING)
    text, span = nats_text(loss.mean.estimate), nats_range(loss.mean)
    texts = f"{loss.mean.effective_n:,.0f} texts"
    tip = f"{text} nats a token, 95% interval {span or 'unknown'}, n = {loss.mean.n:,.0f}, {texts}"
    return Cell(text=text, note=span or "no interval", tip=tip)


def _effective_cell(stats: RunStatistics, label: str) -> Cell:
    if not stats.lengths:
        return Cell(text=NOTHING)
    length, reason = stats.effective_length(label)
    text = "none shown" if length is None else f"{length:,}"
    return Cell(text=text, tip=reason, beyond=bool(length and length > stats.trained_length))


def _ruler_cell(stats: RunStatistics, label: str) -> Cell:
    if not stats.has_ruler:
        return Cell(text=NOTHING)
    length, reason = stats.ruler_effective_length(label)
    return Cell(text="none shown" if length is None else f"{length:,}", tip=reason)


def _share_cell(interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(text=NOTHING)
    text, span = percent(interval.estimate), percent_range(interval)
    tip = f"{text}, 95% interval {span}, {n_text(interval)}"
    return Cell(text=text.removesuffix("%"), note=span.removesuffix("%"), tip=tip)


def _short_cell(stats: RunStatistics, label: str) -> Cell:
    paired = stats.short_overall(label)
    if paired is None:
        return Cell(text=NOTHING)
    change = paired.difference
    text, span = points_text(change.estimate), points_range(change)
    tip = f"{text} points against the plain model, {span}, {n_text(change)}"
    return Cell(text=text, note=span, tip=f"{tip}, {short_p_text(stats, label)}")


def _time_cell(stats: RunStatistics, label: str) -> Cell:
    cost = (stats.results.get("cost") or {}).get(label)
    if not cost or not (ratio := cost.get("prompt_ratio")):
        return Cell(text=NOTHING)
    low, middle, high = (float(value) for value in ratio)
    tip = f"median ×{middle:.2f}, from {low:.2f} to {high:.2f} over the repeats"
    return Cell(text=f"{middle:.2f}", note=f"{low:.2f}–{high:.2f}", tip=tip)


def _memory_cell(stats: RunStatistics, label: str) -> Cell:
    cost = (stats.results.get("cost") or {}).get(label)
    if not cost or not (size := cost.get("peak_bytes")):
        return Cell(text=NOTHING)
    return Cell(text=f"{size / 1e6:,.1f}")
