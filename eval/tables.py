"""Results to numbers and tables, once for HTML and Markdown, so that both show the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

# Names of colours, next to m0, m1, ... for the methods.
PLAIN = "plain"
CONTROL = "control"
NOTHING = "–"

# The figures have this many colours; further methods start again with another dash.
COLOURS = 8

# One point of a perplexity curve, as measured: end, tokens, nll, perplexity.
Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell, or one column's head."""

    text: str
    note: str = ""  # a second, quieter line
    tip: str = ""  # the whole story, on hovering
    beyond: bool = False  # of a position or length that the model was not trained on
    share: float | None = None  # what a heat map colours, 0 to 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row; `key` names the colour that its method has in the figures."""

    name: str
    cells: list[Cell]
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; `groups` are the heads above the columns, each with how many of them it spans."""

    name: str
    corner: str
    columns: list[Cell]
    rows: list[Row]
    groups: list[tuple[Cell, int]]
    key: str = ""


def one_line(text: Any) -> str:
    """Any text as one printable line."""
    kept = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(kept.split())


def names(results: dict[str, Any]) -> dict[str, str]:
    """How each method's label reads in a sentence, in order of the methods."""
    return {
        m["label"]: "plain model" if m.get("method") is None else one_line(m["label"])
        for m in results["methods"]
    }


def keys(results: dict[str, Any]) -> dict[str, str]:
    """The colour's name of each label: `plain` without a method, else m0, m1, ..."""
    patched = [m["label"] for m in results["methods"] if m.get("method") is not None]
    found = {label: f"m{i % COLOURS}" for i, label in enumerate(patched)}
    return {label: found.get(label, PLAIN) for label in names(results)}


def curves(results: dict[str, Any]) -> dict[str, dict[int, Point]]:
    """Perplexity points by label, then by the position where their window ends."""
    measured = (results.get("perplexity") or {}).get("curves") or {}
    return {
        label: {point["end"]: point for point in measured[label]}
        for label in names(results)
        if measured.get(label)
    }


def control(results: dict[str, Any]) -> dict[int, Point]:
    """The control's points by position; empty where there is none."""
    measured = (results.get("perplexity") or {}).get("control") or {}
    return {point["end"]: point for point in measured.get("points") or []}


def shared_ends(results: dict[str, Any], *, beyond: bool) -> list[int]:
    """Positions that every curve has, so that averages over them compare like with like.

    Args:
        results: The results.
        beyond: Positions beyond the trained length (of these only the control's, where it has
            some), or those up to it.
    """
    trained = results["run"]["trained_length"]
    found = [set(points) for points in curves(results).values()]
    ends = set.intersection(*found) if found else set()
    ends = {end for end in ends if (end > trained) == beyond}
    return sorted((ends & set(control(results)) if beyond else ends) or ends)


def headline_end(results: dict[str, Any]) -> int | None:
    """The farthest position that all curves share and that some method is meant to reach."""
    ends = shared_ends(results, beyond=True)
    lengths = [m["length"] for m in results["methods"] if m.get("length")]
    reached = [end for end in ends if not lengths or end <= max(lengths)]
    return max(reached, default=None)


def average(points: dict[int, Point], ends: Iterable[int]) -> float | None:
    """Perplexity over several windows: every token counts alike."""
    chosen = [points[end] for end in ends if end in points]
    tokens = sum(point["tokens"] for point in chosen)
    if not tokens:
        return None
    nll = sum(float(point["nll"]) * point["tokens"] for point in chosen) / tokens
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def perplexity_text(value: Any) -> str:
    """A perplexity to three digits or so: 8.03, 15.2, 397."""
    if value is None:
        return NOTHING
    value = float(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞"
    for limit, digits in ((10, 2), (100, 1)):
        if round(value, digits) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def ratio(value: float | None, reference: float | None) -> float | None:
    """value / reference, where that says anything."""
    if value is None or reference is None or not 0 < reference < math.inf or math.isnan(value):
        return None
    return value / reference


def change_text(change: float | None) -> str:
    """A ratio as people say it: +0.7%, −3.0%, and ×3.0 from a factor of two on."""
    if change is None:
        return NOTHING
    if not math.isfinite(change):
        return "×∞"
    if not 0.5 < change < 2:
        return f"×{change:,.0f}" if change >= 10 else f"×{change:.{1 if change >= 2 else 2}f}"
    percent = f"{abs(change - 1):.1%}"
    sign = "±" if percent == "0.0%" else "+" if change > 1 else "−"
    return sign + percent


def perplexity_tables(results: dict[str, Any]) -> list[Table]:
    """Perplexity at several positions, and over all windows up to and beyond the trained length."""
    return [_by_position(results), _averages(results)] if curves(results) else []


def retrievals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The retrieval tasks that were run: results hold one, a list of them, or none."""
    found = results.get("retrieval") or []
    found = [found] if isinstance(found, dict) else found
    return [task for task in found if any((task.get("cells") or {}).values())]


def retrieval_tables(results: dict[str, Any], task: dict[str, Any]) -> list[Table]:
    """One depth x length heat map a method."""
    trained = results["run"]["trained_length"]
    lengths = [Cell(text=f"{length:,}", beyond=length > trained) for length in task["lengths"]]
    tables = []
    for label, name in names(results).items():
        if not task["cells"].get(label):
            continue
        cells = {(cell["depth"], cell["length"]): cell for cell in task["cells"][label]}
        rows = []
        for depth in task["depths"]:
            found = [cells.get((depth, length)) for length in task["lengths"]]
            row = [_heat_cell(c, head.beyond) for c, head in zip(found, lengths, strict=True)]
            rows.append(Row(name=f"{depth:g}%", cells=row))
        groups = _groups(lengths, trained)
        table = Table(name=name, corner="depth", columns=lengths, rows=rows, groups=groups)
        tables.append(replace(table, key=keys(results)[label]))
    return tables


def _heat_cell(cell: dict[str, Any] | None, beyond: bool) -> Cell:
    if cell is None or not cell["n"]:
        return Cell(text=NOTHING, beyond=beyond, tip="not measured")
    p = cell.get("answer_probability")
    found = f"{cell['hits']} of {cell['n']} found at depth {cell['depth']:g}% of"
    tip = f"{found} {cell['length']:,} tokens (n = {cell['n']})"
    if p is not None:
        tip += f"; the answer's probability per token is {float(p):.3g}"
    return Cell(
        text=f"{cell['hits']}/{cell['n']}",
        note="" if p is None else "p <0.01" if float(p) < 0.005 else f"p {float(p):.2f}",
        tip=tip,
        beyond=beyond,
        share=cell["hits"] / cell["n"],
    )


def _by_position(results: dict[str, Any]) -> Table:
    trained = results["run"]["trained_length"]
    ends = _positions(results)
    columns = [Cell(text=f"{end:,}", beyond=end > trained) for end in ends]
    rows = []
    for name, key, points in _rows(results):
        values = [points.get(end, {}).get("perplexity") for end in ends]
        cells = [
            Cell(text=perplexity_text(value), beyond=column.beyond)
            for value, column in zip(values, columns, strict=True)
        ]
        rows.append(Row(name=name, key=key, cells=cells))
    return Table(
        name="Perplexity of the window that ends at a position",
        corner="position",
        columns=columns,
        rows=rows,
        groups=_groups(columns, trained),
    )


def _averages(results: dict[str, Any]) -> Table:
    rows = [Row(name=name, key=key, cells=[]) for name, key, _ in _rows(results)]
    columns = []
    for beyond in (False, True):
        ends = shared_ends(results, beyond=beyond)
        if not ends:
            continue
        against = CONTROL if beyond and set(ends) <= set(control(results)) else PLAIN
        bases = [average(points, ends) for _, key, points in _rows(results) if key == against]
        columns += [Cell(text="perplexity", beyond=beyond)]
        columns += [Cell(text=f"vs {against}", beyond=beyond) for _ in bases]
        for row, (_, key, points) in zip(rows, _rows(results), strict=True):
            # Up to the trained length, the control's few points would be another average.
            value = None if key == CONTROL and not beyond else average(points, ends)
            row.cells.append(Cell(text=perplexity_text(value), beyond=beyond))
            for base in bases:
                change = None if key == against else ratio(value, base)
                row.cells.append(Cell(text=change_text(change), beyond=beyond))
    return Table(
        name="Perplexity averaged over the windows that all rows share",
        corner="average",
        columns=columns,
        rows=rows,
        groups=_groups(columns, results["run"]["trained_length"]),
    )


def _positions(results: dict[str, Any]) -> list[int]:
    trained = results["run"]["trained_length"]
    # Those that every row has, as far as there are any.
    near, far = (shared_ends(results, beyond=beyond) for beyond in (False, True))
    ends = near + far or sorted({end for points in curves(results).values() for end in points})
    wanted = [trained / 2, trained] if far else [ends[-1] * k / 4 for k in range(1, 5)]
    if far:  # quarters of the way from the trained length to the last position
        wanted += [trained + (far[-1] - trained) * k / 4 for k in range(1, 5)]
    chosen = {min(ends, key=lambda end: abs(end - want)) for want in wanted}
    headline = headline_end(results)
    return sorted(chosen | ({headline} if headline else set()))


def _rows(results: dict[str, Any]) -> list[tuple[str, str, dict[int, Point]]]:
    rows = [
        (names(results)[label], keys(results)[label], points)
        for label, points in curves(results).items()
    ]
    if control(results):
        context = results["perplexity"]["control"]["context"]
        rows.append((f"control (last {context:,} tokens)", CONTROL, control(results)))
    return rows


def _groups(columns: list[Cell], trained: int) -> list[tuple[Cell, int]]:
    groups = []
    for beyond, text in ((False, f"up to {trained:,}"), (True, f"beyond {trained:,}")):
        if count := sum(column.beyond == beyond for column in columns):
            groups.append((Cell(text=text, beyond=beyond), count))
    return groups
