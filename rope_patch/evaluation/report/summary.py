"""The summary of a run: the usable length, by which method, at what cost.

`summary_sentences` and `summary_warnings` say it in words, `summary_table` in a row for each
method, and `overview` shows headline and table in a terminal.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rope_patch.evaluation.report.conclusions import (
    Ranking,
    likelihood_sentences,
    method_row,
    texts_needed_clause,
)
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import (
    NOTHING,
    Cell,
    Row,
    Table,
    cell_text,
    change_with_interval,
    first_few,
    is_unknown,
    join_words,
    n_text,
    nats_cell,
    one_line,
    percent,
    percent_range,
    perplexity_with_interval,
    points_range,
    points_text,
    ratio_column,
    share_with_interval,
)
from rope_patch.evaluation.report.tables import (
    can_tell,
    is_informative,
    short_p_text,
    size_text,
    time_ratio_cell,
    usable_length_cell,
)
from rope_patch.evaluation.request import SERVED
from rope_patch.evaluation.results_schema import ControlKind
from rope_patch.statistics import Interval

_MAX_LISTED = 4  # items of a list before "the tables show N more"; methods with sentences on costs
_GUESSABLE_ACCURACY = 0.05  # where a guess gets nothing: from here on, answers are guessable
_CONTROLS: dict[str, ControlKind] = {
    "from a text that lacks the answer": "no answer",
    "without its text": "closed book",
}


def summary_sentences(stats: RunStatistics, ranking: Ranking | None = None) -> list[str]:
    """Return what the results say in detail, each number with its interval and n.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
    """
    ranking = ranking or Ranking(stats)
    chosen = ranking.best
    by_likelihood = list(likelihood_sentences(stats, ranking))
    by_accuracy = list(_usable_length_sentences(stats, ranking))
    # Few answers decide by how likely they are before they do by how many are right.
    is_usable = chosen is not None and _is_usable_beyond(stats, chosen)
    retrieved = [*by_accuracy[:1], *by_likelihood, *by_accuracy[1:]]
    if by_likelihood and not is_usable:
        retrieved = [*by_likelihood, *by_accuracy]
    lines = [
        *retrieved,
        *_long_perplexity_sentences(stats, ranking),
        *_short_context_sentences(stats, ranking),
        *_time_memory_sentences(stats, chosen),
    ]
    return lines or ["Nothing was measured."]


def summary_warnings(stats: RunStatistics) -> Iterator[str]:
    """Yield warnings about results that are in doubt."""
    passed: dict[str, list[str]] = {}
    for how, kind in _CONTROLS.items():
        for control in stats.controls(kind):
            accuracy, chance = control.accuracy, control.chance
            if accuracy.low > chance if chance else accuracy.estimate > _GUESSABLE_ACCURACY:
                guess = f", where a guess gets {percent(chance)}" if chance else ""
                way = f"{how}, {share_with_interval(accuracy)}{guess}"
                passed.setdefault(control.task, []).append(way)
    for task, ways in passed.items():
        yield (
            f"Careful: {task_name(task)} can be answered {', and '.join(ways)}; its scores do not "
            "show retrieval."
        )
    for label, server in stats.servers.items():
        if not server["rotates_as_asked"]:
            name = f"server {label}" if label else "the server"
            yield f"How {name} rotates: {one_line(server['rotation'])}."
    if count := len(stats.failures):
        yield f"{count} sample{'s' if count > 1 else ''} failed and count in no number here."


def _usable_length_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    chosen = ranking.best
    if not stats.tasks or chosen is None:
        return
    trained = f"{stats.trained_length:,}"
    if not stats.lengths_beyond_training:
        yield f"No retrieval was measured beyond the trained {trained} tokens."
        return
    if stats.plain is None or not stats.lengths_within_training:
        far = stats.accuracy(chosen, lengths=stats.lengths_beyond_training)
        who = f"the {stats.plain_name}" if chosen == stats.plain else stats.names[chosen]
        if far is not None:
            yield (
                f"Beyond its trained {trained} tokens the model gets "
                f"{share_with_interval(far)} of the answers right with {who}; "
                f"the {stats.plain_name} was not measured within that length, so no length is "
                "called usable."
            )
    else:
        yield from _best_method_sentences(stats, ranking, chosen)
    others = [labels[0] for labels in ranking.groups if labels[0] != chosen]
    shares = {
        label: share
        for label in others
        if (share := stats.accuracy(label, lengths=stats.lengths_beyond_training)) is not None
    }
    # Likelihoods decide where accuracies could be anything.
    if shares and (not stats.verdict_length or any(map(is_informative, shares.values()))):
        texts = [
            f"{f'the {stats.plain_name}' if label == stats.plain else stats.names[label]} gets "
            f"{share_with_interval(share)} right"
            for label, share in shares.items()
        ]
        yield f"In texts beyond {trained} tokens: {'; '.join(_first_few(texts))}."


def _is_usable_beyond(stats: RunStatistics, label: str) -> bool:
    usable = stats.usable_length(label)
    return usable is not None and usable.is_beyond(stats.trained_length)


def _best_method_sentences(stats: RunStatistics, ranking: Ranking, chosen: str) -> Iterator[str]:
    """Yield up to which length the best method is usable, and why not farther."""
    is_best = chosen in ranking.shown_best
    among = f", the best of {len(stats.patched)} methods," if is_best else ""
    who = f"With {stats.names[chosen]}{among} the model"
    if chosen == stats.plain:
        who = "As it is served, the model" if stats.is_served else "Without a method, the model"
    usable, trained = stats.usable_length(chosen), f"{stats.trained_length:,}"
    if usable is None:
        yield f"No length is shown to be usable: {stats.nothing_to_keep}."
        return
    if usable.is_beyond(stats.trained_length):
        times = f"{(usable.stated or 0) / stats.trained_length:.3g}"
        text = f"{who} is usable up to {usable}, {times} times its trained {trained}"
        lengths = [usable.stated, usable.undecided or usable.high]
    else:
        text = f"{who} is not shown to be usable beyond its trained {trained} tokens; "
        text += f"usable length: {usable}"
        lengths = [usable.undecided or usable.high, *stats.lengths_beyond_training[:1]]
    # Where an end is open, the length says by itself how many texts it takes.
    needs = usable.low is not None and usable.high is not None
    clauses = [_kept_clause(stats, chosen, n, needs) for n in dict.fromkeys(lengths) if n]
    yield "; ".join([text, *filter(None, clauses)]) + "."


def _kept_clause(stats: RunStatistics, label: str, length: int, needs: bool) -> str:
    """Return how much accuracy is kept at a length, and whether that is shown to be enough."""
    kept = stats.retention(label, length)
    if kept is None:
        return ""
    needed = texts_needed_clause(stats, label, length) if needs else ""
    if not can_tell(kept):
        return (
            f"n at {length:,} ({n_text(kept)}) is too small to tell how much of the "
            f"{stats.plain_name}'s accuracy it keeps{needed}"
        )
    text = f"at {length:,} it keeps {_share_with_95_interval(kept)} of the {stats.plain_name}'s "
    text += f"accuracy at {stats.reference_length:,}"
    if kept.low < THRESHOLD <= kept.high:
        text += f", which may be above or below {THRESHOLD:.0%}{needed}"
    return text


def _long_perplexity_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield sentences on perplexity beyond the trained length."""
    if not stats.losses:
        return
    trained = f"{stats.trained_length:,}"
    labels = [labels[0] for labels in ranking.groups if labels[0] in stats.losses]
    averages = {label: stats.average(label, beyond=True) for label in labels}
    measured = {label: interval for label, interval in averages.items() if interval is not None}
    if not measured:
        yield f"No perplexity was measured beyond the trained {trained} tokens."
        return
    texts = [
        f"{perplexity_with_interval(measured[label], with_n=True)} {_method_phrase(stats, label)}"
        for label in measured
    ]
    yield f"Beyond its trained {trained} tokens the model's perplexity is {_join_first_few(texts)}."
    changes = {label: stats.ratio_to_control(label) for label in measured}
    texts = [
        f"{change_with_interval(change, with_n=True)} {_method_phrase(stats, label)}"
        for label, change in changes.items()
        if change is not None and math.isfinite(change.estimate) and not is_unknown(change)
    ]
    if texts and stats.control_record:
        context = f"{stats.control_record['context']:,}"
        control = f"the control, which reads only the last {context} tokens"
        yield f"Against {control}, it is {_join_first_few(texts)}."


def _method_phrase(stats: RunStatistics, label: str) -> str:
    if label == stats.plain:
        if not stats.is_served:
            return "without a patch"
        if label == SERVED:
            return "as it is served"
    return f"with {stats.names[label]}"


def _join_first_few(texts: list[str]) -> str:
    if len(texts) > _MAX_LISTED:
        *some, rest = _first_few(texts)
        return f"{', '.join(some)}; {rest}"
    return join_words(texts)


def _first_few(texts: list[str]) -> list[str]:
    return first_few(texts, _MAX_LISTED, "the tables show {} more")


def _short_context_sentences(stats: RunStatistics, ranking: Ranking) -> Iterator[str]:
    """Yield sentences on what methods cost within the trained length."""
    if stats.plain is None:
        return
    patched = [labels[0] for labels in ranking.groups if labels[0] != stats.plain]
    for label in patched[:_MAX_LISTED]:
        parts = []
        change = stats.ratio_to_plain(label, beyond=False)
        if change is not None and math.isfinite(change.estimate):
            parts.append(f"perplexity by {change_with_interval(change, with_n=True)}")
        if (short := stats.short_overall(label)) is not None:
            interval = short.difference
            parts.append(
                f"accuracy at ordinary tasks by {points_text(interval.estimate)} points "
                f"({points_range(interval)}, {n_text(interval)}, {short_p_text(stats, label)})"
            )
        if parts:
            place = f"Up to {stats.trained_length:,} tokens"
            yield f"{place} {stats.names[label]} changes {' and '.join(parts)}."


def _time_memory_sentences(stats: RunStatistics, chosen: str | None) -> Iterator[str]:
    """Yield a sentence on time and memory of the best method."""
    costs = stats.results.get("cost") or {}
    cost = costs.get(chosen) if chosen else None
    if not cost or chosen is None:
        return
    first = next(label for label in stats.labels if costs.get(label))
    base = "the plain model's" if first == stats.plain else f"that of {stats.names[first]}"
    parts = []
    if chosen != first:
        for ratio, what in (
            (cost.get("prompt_ratio"), "reading a prompt"),
            (cost.get("token_ratio"), "writing a token"),
        ):
            if ratio:
                low, middle, high = (float(value) for value in ratio)
                parts.append(f"{what} takes ×{middle:.2f} ({low:.2f}–{high:.2f}) of {base} time")
    if cost.get("peak_bytes"):
        tokens = cost.get("prompt_tokens")
        at = f" for {tokens:,} tokens" if tokens else ""
        size = size_text(cost["peak_bytes"])
        parts.append(f"the cache and one decoding step take {size}{at}, beside the weights")
    if parts:
        yield f"With {stats.names[chosen]} {', '.join(parts)}."


def _share_with_95_interval(interval: Interval) -> str:
    text = f"95% interval {percent_range(interval)}, {n_text(interval)}"
    return f"{percent(interval.estimate)} ({text})"


Column = tuple[Cell, list[Cell]]  # its head, and a cell for each method of each run


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
        lines = [_constant_column_line(head, cells[0]) for head, cells in constant]
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
        table = Table(name="", corner="method", columns=[], rows=part, groups=[])
        rows += ranking.arrange(table, mark=True).rows
    if any(len(labels) > 1 for _, _, ranking in runs for labels in ranking.groups):
        times = "; times are the first's" * any(stats.results.get("cost") for _, stats, _ in runs)
        lines.append(f"= joins methods with the same numbers at every length{times}.")
    measures = {ranking.measure for _, _, ranking in runs}
    by = f", best first by {measures.pop()}" if len(measures) == 1 else ", best first"
    name = f"Methods{by}; 95% intervals in brackets"
    heads = [head for head, _ in columns]
    return Table(name=name, corner="method", columns=heads, rows=rows, groups=[]), lines


def _constant_column_line(head: Cell, cell: Cell) -> str:
    return f"The same with every method: {cell_text(head)}: {cell_text(cell)}."


def _columns(
    runs: list[RunStatistics], entries: list[tuple[RunStatistics, str]]
) -> Iterator[Column]:
    """Yield the columns, the deciding ones first."""
    longest = {stats.lengths[-1] for stats in runs if stats.lengths}
    decisive = {stats.verdict_length for stats in runs if stats.verdict_length}
    trained = {stats.trained_length for stats in runs}
    plain = runs[0].plain_name
    at = f"at {longest.pop():,}" if len(longest) == 1 else "at the longest"
    where = f"at {min(decisive):,}" if len(decisive) == 1 else "at the longest"
    of = f"{trained.pop():,}" if len(trained) == 1 else "the trained length"

    def each(cell: Callable[[RunStatistics, str], Cell]) -> list[Cell]:
        return [cell(stats, label) for stats, label in entries]

    nats = Cell(text=f"loss of right answers {where}", note="nats a token")
    yield nats, each(_decisive_loss_cell)
    tip = f"{THRESHOLD:.0%} of the short-context accuracy is kept up to this length"
    usable = each(lambda stats, label: usable_length_cell(stats, stats.usable_length(label)))
    yield Cell(text="usable up to", note="tokens", tip=tip), usable
    if any(stats.has_ruler for stats in runs):
        yield Cell(text="RULER's 85.6% up to", note="tokens"), each(_ruler_cell)
    if any(can_tell(_retention_at_longest(stats, label)) for stats, label in entries):
        reference = {stats.reference_length for stats in runs if stats.reference_length}
        shortest = f"{reference.pop():,}" if len(reference) == 1 else "the shortest length"
        retention = Cell(text=f"accuracy kept {at}", note=f"% of the {plain}'s at {shortest}")
        yield retention, each(lambda stats, label: _share_cell(_retention_at_longest(stats, label)))
    shares = [_accuracy_beyond(stats, label) for stats, label in entries]
    if not decisive or any(is_informative(share) for share in shares):
        yield Cell(text=f"accuracy beyond {of}", note="%"), list(map(_share_cell, shares))
    yield from _perplexity_columns(runs, entries, of)
    short = Cell(text="short tasks", note=f"points more than the {plain}")
    yield short, each(_short_tasks_cell)
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
        far = [stats.ratio_to_plain(label, beyond=True) for stats, label in entries]
        base = f"the {runs[0].plain_name}"
    yield ratio_column(far, f"perplexity beyond {of}", base)
    near = [stats.ratio_to_plain(label, beyond=False) for stats, label in entries]
    yield ratio_column(near, f"perplexity up to {of}", f"the {runs[0].plain_name}")


def _retention_at_longest(stats: RunStatistics, label: str) -> Interval | None:
    return stats.retention(label, stats.lengths[-1]) if stats.lengths else None


def _accuracy_beyond(stats: RunStatistics, label: str) -> Interval | None:
    lengths = stats.lengths_beyond_training
    return stats.accuracy(label, lengths=lengths) if lengths else None


def _decisive_loss_cell(stats: RunStatistics, label: str) -> Cell:
    loss = stats.answer_loss(label, stats.verdict_length) if stats.verdict_length else None
    if loss is None:
        return Cell(text=NOTHING)
    cell = nats_cell(loss)
    return replace(cell, note=cell.note or "no interval")


def _ruler_cell(stats: RunStatistics, label: str) -> Cell:
    usable = stats.ruler_usable_length(label) if stats.has_ruler else None
    return Cell(text=NOTHING) if usable is None else usable_length_cell(stats, usable)


def _share_cell(interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(text=NOTHING)
    text, span = percent(interval.estimate), percent_range(interval)
    tip = f"{text}, 95% interval {span}, {n_text(interval)}"
    return Cell(text=text.removesuffix("%"), note=span.removesuffix("%"), tip=tip)


def _short_tasks_cell(stats: RunStatistics, label: str) -> Cell:
    paired = stats.short_overall(label)
    if paired is None:
        return Cell(text=NOTHING)
    change = paired.difference
    text, span = points_text(change.estimate), points_range(change)
    tip = f"{text} points against the {stats.plain_name}, {span}, {n_text(change)}"
    return Cell(text=text, note=span, tip=f"{tip}, {short_p_text(stats, label)}")


def _time_cell(stats: RunStatistics, label: str) -> Cell:
    cost = (stats.results.get("cost") or {}).get(label)
    if not cost or not (ratio := cost.get("prompt_ratio")):
        return Cell(text=NOTHING)
    cell = time_ratio_cell(ratio)
    return replace(cell, text=cell.text.removeprefix("×"))  # the head says "times"


def _memory_cell(stats: RunStatistics, label: str) -> Cell:
    cost = (stats.results.get("cost") or {}).get(label)
    if not cost or not (size := cost.get("peak_bytes")):
        return Cell(text=NOTHING)
    return Cell(text=f"{size / 1e6:,.1f}")


_DEFAULT_WIDTH = 100  # columns of text if the output is no terminal
_GAP = "  "
_MIN_NAME_WIDTH = 16  # columns of text that a method's name keeps in a narrow window
_BEST_MARK = "* "


def overview(page: dict[str, Any], width: int | None = None) -> str:
    """Return the title, each run's headline, the table and cautions.

    Args:
        page: The data of the report's templates.
        width: Columns of the terminal; asked of it if None.
    """
    width = width or shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    runs = page["runs"]
    alone = len(runs) == 1
    lines = [page["title"]]
    for run in runs:
        lines.append(run["headline"] if alone else f"{run['title']}: {run['headline']}")
    parts = ["\n".join(_wrap(line, width) for line in lines)]
    if page["summary"] is not None:
        parts.append(fitted_table(page["summary"], width))
    parts += [_wrap(line, width) for line in page["summary_lines"]]
    cautions = [
        f"caution: {caution}" if alone else f"caution, {run['title']}: {caution}"
        for run in runs
        for caution in [*run["warnings"], *run["cautions"]]
    ]
    if cautions:
        parts.append("\n".join(cautions))
    return "\n\n".join(parts)


def fitted_table(table: Table, width: int) -> str:
    """Return the rows before a table's fold as lines of at most a width.

    Heads are wrapped. Columns that do not fit are left out from the right; the last line names them
    and tells how many rows there are behind the fold.

    Args:
        table: A table.
        width: Columns of the terminal.
    """
    names = [f"{row.group}, {row.name}" if row.group else row.name for row in table.shown]
    marks = [_BEST_MARK if row.best else "" for row in table.shown]
    names = [mark + name for mark, name in zip(marks, names, strict=True)]
    columns = [[cell_text(row.cells[i]) for row in table.shown] for i in range(len(table.columns))]
    heads = [
        [*_head_lines(head, cells)] for head, cells in zip(table.columns, columns, strict=True)
    ]
    widths = [max(map(len, [*head, *cells])) for head, cells in zip(heads, columns, strict=True)]
    least_name_width = max([_MIN_NAME_WIDTH, *(min(len(name), width // 3) for name in names)])
    room = width - len(_GAP) - least_name_width
    shown = 0
    while shown < len(widths) and widths[shown] + len(_GAP) <= room:
        room -= widths[shown] + len(_GAP)
        shown += 1
    name_width = width - len(_GAP) - sum(w + len(_GAP) for w in widths[:shown])
    name_width = min(name_width, max(map(len, [table.corner, *names])))
    depth = max((len(head) for head in heads[:shown]), default=1)
    lines = []
    for i in range(depth):
        cells = [(head + [""] * depth)[i] for head in heads[:shown]]
        lines.append(_table_line(table.corner if i == 0 else "", cells, name_width, widths))
    for name, row in zip(names, range(len(names)), strict=True):
        cells = [column[row] for column in columns[:shown]]
        first, *rest = textwrap.wrap(name, name_width) or [""]
        lines.append(_table_line(first, cells, name_width, widths))
        lines += [_table_line(f"  {more}"[:name_width], [], name_width, widths) for more in rest]
    parts = [_wrap(f"{table.name}:", width), *lines]
    hints = []
    if table.folded:
        hints.append(f"{len(table.folded)} more rows")
    if missing := [head.text for head in table.columns[shown:]]:
        hints.append(f"the columns {', '.join(missing)}")
    if any(marks):
        parts.append(_wrap(f"{_BEST_MARK}all others are shown to be worse", width))
    if hints:
        parts.append(_wrap(f"In the report: {'; '.join(hints)}.", width))
    return "\n".join(parts)


def _table_line(name: str, cells: list[str], name_width: int, widths: list[int]) -> str:
    padded = [cell.ljust(w) for cell, w in zip(cells, widths, strict=False)]
    return (_GAP + _GAP.join([name.ljust(name_width), *padded])).rstrip()


def _head_lines(head: Cell, cells: list[str]) -> list[str]:
    """Return a head in lines that are about as wide as the column's cells."""
    words = [*head.text.split(), *head.note.split()]
    width = max([12, *map(len, cells), *map(len, words)])
    return [*textwrap.wrap(head.text, width), *textwrap.wrap(head.note and f"({head.note})", width)]


def _wrap(text: str, width: int) -> str:
    # An equation stays on one line: textwrap does not break at a non-breaking space.
    whole = re.sub(r"\b([pn]) ([=<]) ", "\\1\u00a0\\2\u00a0", text)
    lines = textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\u00a0", " ")
