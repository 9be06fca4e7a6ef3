"""The summary of a run: the usable length, by which method, at what cost.

`summary_sentences` and `summary_cautions` say it in words, `summary_table` in a row for each
method, `first_screen` as plain data, and `overview` shows headline and table in a terminal.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rope_patch.evaluation.report.conclusions import (
    Ranking,
    conclude,
    correction_text,
    guessable_tasks,
    likelihood_sentences,
    method_row,
    texts_needed_clause,
)
from rope_patch.evaluation.report.results.retrieval import THRESHOLD
from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import (
    BASE,
    NOTHING,
    UNKNOWN,
    Cell,
    Row,
    Table,
    cell_text,
    change_text,
    change_with_interval,
    first_few,
    is_unknown,
    join_words,
    n_text,
    nats_cell,
    one_line,
    p_text,
    percent,
    percent_range,
    perplexity_cell,
    perplexity_with_interval,
    points_range,
    points_text,
    ratio_cell,
    ratio_column,
    share_with_interval,
)
from rope_patch.evaluation.report.tables import (
    can_tell,
    is_informative,
    short_p_text,
    size_text,
    time_ratio_cell,
)
from rope_patch.evaluation.request import SERVED
from rope_patch.evaluation.results_schema import UNREAD, FirstScreenRecord, FirstScreenRow
from rope_patch.statistics import ClusteredMean, Interval

_MAX_LISTED = 4  # items of a list before "the tables show N more"; methods with sentences on costs


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


def summary_cautions(stats: RunStatistics) -> list[str]:
    """Return what makes results doubtful."""
    return [*_cautions(stats), *map(one_line, stats.run.get("cautions") or [])]


def _cautions(stats: RunStatistics) -> Iterator[str]:
    for task, ways in guessable_tasks(stats).items():
        yield (
            f"{task_name(task)} can be answered {', and '.join(ways)}; its scores do not show "
            "retrieval."
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
    if (compared := stats.accuracy_comparisons().get(chosen)) is not None:
        test, p_value = compared
        change, count = test.difference, len(stats.accuracy_comparisons())
        yield (
            f"At {stats.lengths[-1]:,} tokens it answers {points_text(change.estimate)} points "
            f"({points_range(change)}, {n_text(change)}, {p_text(p_value)}"
            f"{correction_text(stats, count)}) more right than the {stats.plain_name}."
        )
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
                parts.append(f"{what} takes ×{middle:.2f} ({low:.2f} to {high:.2f}) of {base} time")
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
_LOSS_SCALE = "Loss in nats a token: 0 is certain, 0.69 is one in two, 2.3 is one in ten."


def summary_table(runs: list[tuple[str, RunStatistics, Ranking]]) -> tuple[Table | None, list[str]]:
    """Return a row for each method, of each run where there are several, and lines below them.

    The columns are right answers, their loss or else perplexity, the price at short context, and
    time.

    Args:
        runs: Titles, statistics and the order of the methods.
    """
    entries = [(stats, label) for _, stats, _ in runs for label in stats.labels]
    columns = [
        (head, cells)
        for head, cells in _columns([stats for _, stats, _ in runs], entries)
        if any(cell.text not in (NOTHING, BASE) for cell in cells)
    ]
    if not columns:
        return None, []
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
    heads = [head for head, _ in columns]
    lines = [_LOSS_SCALE] if any(head.text.startswith("loss") for head in heads) else []
    if any(len(labels) > 1 for _, _, ranking in runs for labels in ranking.groups):
        times = "; times are the first's" * any(stats.results.get("cost") for _, stats, _ in runs)
        lines.append(f"= joins methods with the same numbers at every length{times}.")
    measures = {ranking.measure for _, _, ranking in runs}
    by = f", best first by {measures.pop()}" if len(measures) == 1 else ", best first"
    name = f"Methods{by}, with 95% intervals"
    return Table(name=name, corner="method", columns=heads, rows=rows, groups=[]), lines


def _columns(
    runs: list[RunStatistics], entries: list[tuple[RunStatistics, str]]
) -> Iterator[Column]:
    """Yield the columns, the deciding ones first."""
    trained = {stats.trained_length for stats in runs}
    of = f"{trained.pop():,}" if len(trained) == 1 else "the trained length"
    longest = {stats.lengths[-1] for stats in runs if stats.lengths}
    at = f"at {longest.pop():,}" if len(longest) == 1 else "at the longest"
    yield (
        Cell(text=f"right answers {at}"),
        [_share_cell(_accuracy_at_longest(stats, label)) for stats, label in entries],
    )
    decisive = {length for stats in runs if (length := _loss_length(stats))}
    if decisive:
        where = f"at {decisive.pop():,}" if len(decisive) == 1 else "at the longest"
        losses = [nats_cell(_decisive_loss(stats, label)) for stats, label in entries]
        yield Cell(text=f"loss of right answers {where}", note="nats a token"), losses
    else:
        beyond = any(stats.average(label, beyond=True) for stats, label in entries)
        averages = [stats.average(label, beyond=beyond) for stats, label in entries]
        where = "beyond" if beyond else "up to"
        yield Cell(text=f"perplexity {where} {of}"), list(map(perplexity_cell, averages))
    parts = {"perplexity": any(stats.losses for stats in runs)}
    parts["short tasks"] = any(stats.results.get("short") for stats in runs)
    note = ", ".join(part for part, is_measured in parts.items() if is_measured)
    yield Cell(text=f"price up to {of}", note=note), [_price_cell(*entry) for entry in entries]
    base = next((stats.names[label] for stats, label in entries if any(_times(stats, label))), "")
    tip = "medians of the repeats"
    head = Cell(text=f"time, {base} = 1", note="to read a prompt, to write a token", tip=tip)
    yield head, [_times_cell(*entry) for entry in entries]


def first_screen(stats: RunStatistics, ranking: Ranking) -> FirstScreenRecord:
    """Return what stands above a report's folds, as plain data.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
    """
    said = conclude(stats, ranking)
    methods: dict[str, FirstScreenRow] = {}
    for label in stats.labels:
        loss, short = _decisive_loss(stats, label), stats.short_overall(label)
        prompt_time, token_time = map(_triple, _times(stats, label))
        methods[label] = {
            "right": _bounds(_accuracy_at_longest(stats, label)),
            "loss": _bounds(loss.mean if loss else None),
            "perplexity_beyond": _bounds(stats.average(label, beyond=True)),
            "price_perplexity": None
            if _is_unread(stats)
            else _bounds(stats.ratio_to_plain(label, beyond=False)),
            "price_short_tasks": _bounds(short.difference if short else None),
            "prompt_time": prompt_time,
            "token_time": token_time,
        }
    return {
        "headline": said.headline,
        "reason": said.reason,
        "usable": said.usable,
        "method": said.method,
        "measure": said.measure,
        "length": said.length,
        "right_length": stats.lengths[-1] if stats.lengths else None,
        "loss_length": _loss_length(stats),
        "methods": methods,
    }


def _bounds(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.estimate, interval.low, interval.high]


def _triple(ratio: Iterable[float] | None) -> list[float] | None:
    """Return a ratio of times like an interval: the median, the smallest and the largest."""
    if not ratio:
        return None
    low, middle, high = map(float, ratio)
    return [middle, low, high]


def _times(stats: RunStatistics, label: str) -> tuple[Sequence[float] | None, ...]:
    """Return the ratios of times to read a prompt and to write a token."""
    cost = (stats.results.get("cost") or {}).get(label)
    return (cost.get("prompt_ratio"), cost.get("token_ratio")) if cost else (None, None)


def _accuracy_at_longest(stats: RunStatistics, label: str) -> Interval | None:
    return stats.accuracy(label, lengths=(stats.lengths[-1],)) if stats.lengths else None


def _loss_length(stats: RunStatistics) -> int | None:
    """Return the longest length at which right answers have losses."""
    measured = (
        n for n in reversed(stats.lengths) if any(stats.answer_loss(x, n) for x in stats.labels)
    )
    return next(measured, None)


def _decisive_loss(stats: RunStatistics, label: str) -> ClusteredMean | None:
    length = _loss_length(stats)
    return None if length is None else stats.answer_loss(label, length)


def _share_cell(interval: Interval | None) -> Cell:
    if interval is None:
        return Cell(text=NOTHING)
    text, span = percent(interval.estimate), percent_range(interval)
    tip = f"{text}, 95% interval {span}, {n_text(interval)}"
    return Cell(text=text, note=span, tip=tip)


def _price_cell(stats: RunStatistics, label: str) -> Cell:
    """Return what a method costs within the trained length; the table on it has the intervals."""
    if label == stats.plain:
        return Cell(text=BASE)
    texts, tips = [], []
    ratio, paired = stats.ratio_to_plain(label, beyond=False), stats.short_overall(label)
    if ratio is not None:
        cell = ratio_column([ratio], "", "")[1][0]
        is_known = cell.text != UNKNOWN and not _is_unread(stats)
        texts.append(change_text(ratio) if is_known else UNKNOWN)
        tips.append(f"perplexity {ratio_cell(ratio).tip}")
    if paired is not None:
        change = paired.difference
        texts.append(f"{points_text(change.estimate)} points")
        tip = f"short tasks {texts[-1]}, {points_range(change)}, {n_text(change)}"
        tips.append(f"{tip}, {short_p_text(stats, label)}")
    return Cell(text=", ".join(texts) or NOTHING, tip="; ".join(tips))


def _is_unread(stats: RunStatistics) -> bool:
    """Return whether a caution says that perplexities tell nothing of methods."""
    return any(line.startswith(UNREAD) for line in stats.run.get("cautions") or [])


def _times_cell(stats: RunStatistics, label: str) -> Cell:
    """Return the times of a prompt and of a token; the table on them has their ranges."""
    cells = list(map(time_ratio_cell, _times(stats, label)))
    if all(cell.text == NOTHING for cell in cells):
        return cells[0]
    tips = (f"{what} {cell.tip}" for what, cell in zip(("prompt", "token"), cells, strict=True))
    return Cell(text=", ".join(cell.text for cell in cells), tip="; ".join(tips))


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
        said = run["conclusion"]
        lines.append(said.headline if alone else f"{run['title']}: {said.headline}")
        lines += [said.details] * bool(said.details)
    parts = ["\n".join(_wrap(line, width) for line in lines)]
    if page["summary"] is not None:
        parts.append(fitted_table(page["summary"], width))
    parts += [_wrap(line, width) for line in page["summary_lines"]]
    cautions = [
        f"caution: {caution}" if alone else f"caution, {run['title']}: {caution}"
        for run in runs
        for caution in run["cautions"]
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
