"""Tables and the picture of the kernel benchmark's results, shared by all formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from rope_patch.benchmarks.kernels.benchmark import COPIES
from rope_patch.benchmarks.kernels.problems import SHAPES, VIEWS
from rope_patch.benchmarks.kernels.timing import BACKWARD, BOTH, FORWARD, GRAPH, WALL
from rope_patch.evaluation.report.figures import Picture, render_picture
from rope_patch.evaluation.report.table import NOTHING, Cell, Row, Table
from rope_patch.utils.figures import PALETTE, canvas, legend_label

REFERENCE_LENGTH = 8192  # tokens; for the memory tables and the verdict

# Colours of figures and tables, by contender.
COLOURS = {
    "hf": "plain",
    "ours": "m0",
    "hf-compile": "m1",
    "liger": "m2",
    "unsloth": "m3",
    "flash-attn": "m4",
    "ours-output": "m5",
    "fla": "m6",
    "ours-tables": "m7",
    "ours-inplace": "rest",
    "ours-reference": "control",
    "ours-frozen": "m0",
}

PHASES = {FORWARD: "Forward", BACKWARD: "Backward", BOTH: "Forward and backward"}
_CLOCKS = {GRAPH: "in a CUDA graph", WALL: "launched one by one"}
_ERRORS = {"q": "queries", "k": "keys", "dq": "d queries", "dk": "d keys", "dw": "d weights"}

_DRAWN_PHASES = (FORWARD, BACKWARD)
_MARKERS = dict(zip(COLOURS, "osD^vPX<>*hp", strict=True))
_WIDE_WIDTH = 640  # pixels from which two panels are side by side
_HIGH, _ABOVE, _BELOW, _LINE = 200, 40, 52, 21  # pixels; the last is a line of the legend

_TALL = 160  # percent at the panel's upper end; points that a cache makes faster may leave it

Case = dict[str, Any]
Points = dict[str, list[tuple[int, float]]]


class _Column(NamedTuple):
    group: str
    head: str
    case: Case
    phase: str


def default_layout_cases(results: dict[str, Any], shape: str) -> list[Case]:
    """Return a shape's measured cases in the default layout."""
    return [case for case in _measured_cases(results, shape) if case["layout"] == VIEWS]


def row_of(case: Case, contender: str) -> dict[str, Any]:
    """Return a contender's row in a case; an empty one if it has none."""
    rows = (row for row in case["rows"] if row["contender"] == contender)
    return next(rows, {"contender": contender, "times": {}})


def is_in_l2(results: dict[str, Any], case: Case) -> bool:
    """Return whether a GPU's L2 cache holds all samples of a case, inputs and outputs."""
    l2_bytes = results.get("l2_bytes")
    return l2_bytes is not None and case["working_set"] <= l2_bytes


def launch_table(results: dict[str, Any]) -> Table:
    """Return the table of launches while one token is decoded."""
    rows = [
        Row(
            name=f"{row['model']}, {row['layers']} layers",
            cells=[
                Cell(text=f"{count:,}")
                for count in (row["hf"], row["ours"], row["whole"]["hf"], row["whole"]["ours"])
            ],
        )
        for row in results["launches"]
        if "whole" in row
    ]
    return Table(
        name="Kernels launched for one decoded token",
        corner="narrow layers",
        columns=[Cell(text=head) for head in ("transformers", "rope_patch") * 2],
        rows=rows,
        groups=[(Cell(text="norms and rotation"), 2), (Cell(text="whole step"), 2)],
    )


def shape_tables(results: dict[str, Any], shape: str) -> list[Table]:
    """Return all tables of one shape."""
    tables = [
        *_speed_tables(results, shape),
        *_memory_tables(results, shape),
        *(
            _saved_for_backward(results, case, shape)
            for case in results["kept"]
            if case["shape"] == shape
        ),
    ]
    return [table for table in (*tables, _error_table(results, shape)) if table.rows]


def step_table(results: dict[str, Any]) -> Table:
    """Return the table of whole models' steps."""
    rows = []
    for r in (row for row in results["steps"] if "token" in row):
        name = f"{r['model']}, {'transformers' if r['kernels'] == 'hf' else 'rope_patch'}"
        cells = [_ratio_cell(r["token"]), _ratio_cell(r["train"])]
        cells.append(Cell(text=_format_bytes(r["peak"])))
        rows.append(Row(name=name, key="plain" if r["kernels"] == "hf" else "m0", cells=cells))
    return Table(
        name="Steps, as multiples of the same step with transformers' own code",
        corner="model, kernels",
        columns=[Cell(text=head) for head in ("time", "time", "peak memory")],
        rows=rows,
        groups=[(Cell(text="one token decoded"), 1), (Cell(text="one training step"), 2)],
    )


def _measured_cases(results: dict[str, Any], shape: str) -> list[Case]:
    return [case for case in results["cases"] if case["shape"] == shape and case["rows"]]


def _speed_tables(results: dict[str, Any], shape: str) -> Iterator[Table]:
    default_cases = default_layout_cases(results, shape)
    for phase, title in PHASES.items():
        columns = [
            _Column(
                f"batch {case['batch']}", _head(results, case, f"{case['length']:,}"), case, phase
            )
            for case in default_cases
            if case["length"] > 1
        ]
        yield _speed_table(results, f"{title}, by tokens", columns)
    columns = [
        _Column(f"batch {case['batch']}", _head(results, case, title), case, phase)
        for case in default_cases
        for phase, title in _CLOCKS.items()
        if phase in case["rows"][0]["times"]
    ]
    yield _speed_table(results, "Forward of one token", columns)
    other_cases = [case for case in _measured_cases(results, shape) if case["layout"] != VIEWS]
    sizes = {(case["batch"], case["length"]) for case in other_cases}
    matching_cases = [case for case in default_cases if (case["batch"], case["length"]) in sizes]
    columns = [
        _Column(case["layout"], phase, case, phase)
        for case in (matching_cases + other_cases if other_cases else [])
        for phase in (FORWARD, BACKWARD)
    ]
    size_text = ", ".join(f"{length:,} tokens × {batch}" for batch, length in sizes)
    yield _speed_table(results, f"Other layouts, {size_text}", columns)


def _head(results: dict[str, Any], case: Case, text: str) -> str:
    return f"{text}, in L2" if is_in_l2(results, case) else text


def _speed_table(results: dict[str, Any], name: str, columns: list[_Column]) -> Table:
    rows = []
    for contender, title in results["titles"].items():
        cells = [_speed_cell(row_of(column.case, contender), column.phase) for column in columns]
        if any(cell.text != NOTHING for cell in cells):
            rows.append(Row(name=title, key=COLOURS.get(contender, ""), cells=cells))
    groups = groupby(columns, key=lambda column: column.group)
    return Table(
        name=name,
        corner="of a copy's bandwidth",
        columns=[Cell(text=column.head) for column in columns],
        rows=rows,
        groups=[(Cell(text=group), len(list(members))) for group, members in groups],
    )


def _speed_cell(row: dict[str, Any], phase: str) -> Cell:
    if phase not in row["times"]:
        return Cell(text=NOTHING, tip=row.get("failed", {}).get(phase, ""))
    time = row["times"][phase]
    if row.get("wrong"):
        worst = max(row["errors"].values(), key=_nan_to_inf)
        return Cell(text="wrong", note=f"error {worst:.1g}", tip=_format_time(time["ms"]))
    percent = f"{time['percent']:.{0 if time['percent'] >= 9.95 else 1}f}%"
    tip = f"{time['min']:.1f} to {time['max']:.1f}% in the repeats"
    launches = ", with launches" if time["with_launches"] else ""
    return Cell(text=percent, note=f"{_format_time(time['ms'])}{launches}", tip=tip)


def _memory_tables(results: dict[str, Any], shape: str) -> Iterator[Table]:
    """Yield the memory table of the longest case up to `REFERENCE_LENGTH` tokens."""
    cases = [
        case
        for case in default_layout_cases(results, shape)
        if 1 < case["length"] <= REFERENCE_LENGTH
    ]
    if not cases:
        return
    case = max(cases, key=lambda case: (-case["batch"], case["length"]))
    rows = []
    for contender, title in results["titles"].items():
        row = row_of(case, contender)
        if "saved" in row:
            sizes = [row["peak"][FORWARD], row["peak"][BOTH], row["saved"]["kept"]]
            cells = [_in_tensor_sizes(size, case["bytes"]) for size in sizes]
            rows.append(Row(name=title, key=COLOURS[contender], cells=cells))
    heads = ("peak of forward", "peak of both", "kept for backward")
    yield Table(
        name=f"Memory of a call, {case['length']:,} tokens × {case['batch']}, "
        f"N = {_format_bytes(case['bytes'])}",
        corner="N: queries and keys",
        columns=[Cell(text=head) for head in heads],
        rows=rows,
        groups=[],
    )


def _saved_for_backward(results: dict[str, Any], case: Case, shape: str) -> Table:
    """Return the table of saved bytes, measured once per shape and scaled to a whole model."""
    layers = SHAPES[shape].layers
    rows = []
    for row in (row for row in case["rows"] if "kept" in row):
        beside_outputs = row["kept"] - row["outputs"]
        cells = [
            _in_tensor_sizes(row["kept"], case["bytes"]),
            _in_tensor_sizes(beside_outputs, case["bytes"]),
        ]
        cells.append(
            Cell(text=_format_bytes(beside_outputs / case["length"] * REFERENCE_LENGTH * layers))
        )
        name, key = results["titles"][row["contender"]], COLOURS[row["contender"]]
        rows.append(Row(name=name, key=key, cells=cells))
    heads = (
        "all",
        "beside outputs",
        f"beside outputs, {REFERENCE_LENGTH:,} tokens × {layers} layers",
    )
    scaled = "" if case["length"] == REFERENCE_LENGTH else f", scaled from {case['length']} tokens"
    return Table(
        name=f"Kept for backward in bfloat16, N = {_format_bytes(case['bytes'])}{scaled}",
        corner="N: queries and keys",
        columns=[Cell(text=head) for head in heads],
        rows=rows,
        groups=[],
    )


def _in_tensor_sizes(size: int, queries_and_keys: int) -> Cell:
    return Cell(text=f"{size / queries_and_keys:.2f} N", note=_format_bytes(size))


def _error_table(results: dict[str, Any], shape: str) -> Table:
    """Return the table of the largest errors over all cases; NaN counts as the largest."""
    errors_by_contender = {
        contender: [
            row_of(case, contender).get("errors", {}) for case in _measured_cases(results, shape)
        ]
        for contender in results["titles"]
        if contender not in COPIES
    }
    names = [
        n
        for n in _ERRORS
        if any(n in errors for all_ in errors_by_contender.values() for errors in all_)
    ]
    rows = []
    for contender, errors in errors_by_contender.items():
        worst = [
            max((e[n] for e in errors if n in e), key=_nan_to_inf, default=None) for n in names
        ]
        if any(error is not None for error in worst):
            cells = [Cell(text=NOTHING if e is None else f"{e:.1e}") for e in worst]
            title, key = results["titles"][contender], COLOURS.get(contender, "")
            rows.append(Row(name=title, key=key, cells=cells))
    return Table(
        name="Largest error against float64, of all sizes and layouts",
        corner="relative",
        columns=[Cell(text=_ERRORS[name]) for name in names],
        rows=rows,
        groups=[],
    )


def _ratio_cell(times: dict[str, float]) -> Cell:
    spread = f"{times['min']:.3f} to {times['max']:.3f}"
    return Cell(text=f"×{times['ratio']:.3f}", note=f"{_format_time(times['ms'])}, {spread}")


def _format_time(ms: float) -> str:
    return f"{1e3 * ms:.3g} µs" if ms < 0.9995 else f"{ms:,.4g} ms"


def _format_bytes(size: float) -> str:
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:.3g} {unit}"
    return f"{size:.0f} B"


def _nan_to_inf(error: float) -> float:
    return math.inf if math.isnan(error) else error


def draw(results: dict[str, Any]) -> Picture | None:
    """Draw per cent of a copy's bandwidth for correct results of the smallest batch, if any."""
    panels = [
        (f"{shape}: {PHASES[phase].lower()}", points, _longest_in_l2(results, shape))
        for shape in results["shapes"]
        for phase in _DRAWN_PHASES
        if (points := _points(results, shape, phase))
    ]
    if not panels:
        return None
    contenders = [
        name for name in results["titles"] if any(name in points for _, points, _ in panels)
    ]

    def paint(width: int) -> Figure:
        columns = len(_DRAWN_PHASES) if width >= _WIDE_WIDTH else 1
        rows = math.ceil(len(panels) / columns)
        legend = _LINE * math.ceil(len(contenders) / (3 if columns > 1 else 1)) + 12
        high = rows * (_ABOVE + _HIGH + _BELOW) + legend
        with canvas(width, high) as page:
            for i, (title, points, cached) in enumerate(panels):
                row, column = divmod(i, columns)
                left, top = 66 + column * width / columns, row * (_ABOVE + _HIGH + _BELOW) + _ABOVE
                axes = page.add_axes(left, top, width / columns - 86, _HIGH)
                _plot_lines(axes, title, points, cached)
            page.figure.legend(
                [_legend_handle(page.figure, name) for name in contenders],
                [legend_label(results["titles"][name]) for name in contenders],
                loc="lower left",
                bbox_to_anchor=page.share(40, high),
                borderpad=0,
                ncols=3 if columns > 1 else 1,
            )
        return page.figure

    alt = "Per cent of a copy's bandwidth by length, a line for each contender"
    return render_picture("speed", alt, paint)


def _longest_in_l2(results: dict[str, Any], shape: str) -> int:
    """Return the longest length in tokens at which the L2 cache holds all samples; 0 if none."""
    cases = default_layout_cases(results, shape)
    return max((case["length"] for case in cases if is_in_l2(results, case)), default=0)


def _points(results: dict[str, Any], shape: str, phase: str) -> Points:
    cases = [case for case in default_layout_cases(results, shape) if case["length"] > 1]
    smallest = min((case["batch"] for case in cases), default=0)
    points: Points = {}
    for case in (case for case in cases if case["batch"] == smallest):
        for name in (name for name in results["titles"] if name not in COPIES):
            row = row_of(case, name)
            if phase in row["times"] and not row["wrong"]:
                points.setdefault(name, []).append((case["length"], row["times"][phase]["percent"]))
    return points


def _plot_lines(axes: Axes, title: str, points: Points, cached: int) -> None:
    for name, line in points.items():
        axes.plot(*zip(*line, strict=True), **_line_style(name))
    lengths = sorted({length for line in points.values() for length, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: _format_tokens(length))
    axes.set_xlabel("tokens")
    fastest = max(percent for line in points.values() for _, percent in line)
    axes.set_ylim(0, min(max(105, 1.05 * fastest), _TALL))
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_ylabel("of a copy's bandwidth")
    axes.axhline(100, color=PALETTE["muted"][0], lw=1.2, zorder=2)
    if cached >= lengths[0]:
        axes.axvspan(lengths[0] / 1.4, cached * 1.4, color=PALETTE["muted"][0], alpha=0.12, lw=0)
        axes.text(lengths[0] / 1.3, 3, "in L2", color=PALETTE["muted"][0], fontsize=10, va="bottom")
    axes.set_title(title, loc="left", fontsize=12.5, pad=9)


def _line_style(name: str) -> dict[str, Any]:
    colour = PALETTE[COLOURS[name]][0]
    return {"color": colour, "marker": _MARKERS[name], "markersize": 4.5, "lw": 1.7, "zorder": 3}


def _legend_handle(figure: Figure, name: str) -> Any:
    return figure.axes[0].plot([], [], **_line_style(name))[0]


def _format_tokens(length: float) -> str:
    return f"{length / 1024:.0f}k" if length >= 1024 and length % 1024 == 0 else f"{length:.0f}"
