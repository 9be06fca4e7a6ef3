"""Draw the figures of a report, each with a question as its title.

`draw_figures` takes a run's statistics and the ranking of its methods, and returns a `Picture` by
name: one drawing as PNG, to attach elsewhere, and as SVG that follows a page's colours.
`draw_heat_maps` returns the scores by length and depth as PNG.

Lengths are in CSS pixels throughout: at 72 dots per inch one point of matplotlib is one pixel.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MultipleLocator,
    NullLocator,
    PercentFormatter,
)
from matplotlib.transforms import ScaledTranslation

from rope_patch.evaluation.report.conclusions import BEST, MAX_ROWS, PLAIN, REST, Ranking
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import CONTROL, Table, filter_mark, one_line
from rope_patch.evaluation.report.tables import controls, heat_maps, uniform_tasks
from rope_patch.utils.figures import FONT, PALETTE, PAPER, STYLE, canvas, legend_label

# Heat maps from nothing found to everything found, on any background.
HEAT = ("#e9925c", "#f1ece4", "#1f66a8")

_HEAT = LinearSegmentedColormap.from_list("found", HEAT)
_MARKERS = {PLAIN: "o", "m0": "s", "m2": "D", "m3": "v"}
_LONGEST_NAME = 26  # characters of a method's name in a label; longer ones are cut
_PER_TOKEN = "nats a token"

# The file name, the question and what those see who do not see the figure.
_ANSWERS = ("answers", "How likely are the right answers? (lower is likelier)", "Loss of answers")
_ACCURACY = ("accuracy", "How many answers are right?", "Accuracy against length")
_PERPLEXITY = (
    "perplexity",
    "Does perplexity stay low beyond the trained length? (lower is better)",
    "Perplexity by position in the text",
)
_SLIDING = (
    "sliding",
    "Is a longer context worth something? (lower is better)",
    "Perplexity of the same tokens against the length of context before them",
)
_STRETCH = (
    "stretch",
    "How much does each method slow each rotated pair?",
    "Stretch of each pair by its wavelength",
)


def draw_figures(stats: RunStatistics, ranking: Ranking, prefix: str = "") -> dict[str, Picture]:
    """Draw what was measured, by name.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
        prefix: The start of the file names; it separates the pictures of several runs.

    Returns:
        Some of `answers`, `accuracy`, `perplexity`, `sliding` and `stretch`.
    """
    figures = [
        (_ANSWERS, _answer_panels(stats, ranking)),
        (_ACCURACY, _accuracy_panels(stats, ranking)),
        (_PERPLEXITY, _perplexity_panels(stats, ranking)),
        (_SLIDING, _sliding_panels(stats, ranking)),
        (_STRETCH, _stretch_panels(stats, ranking)),
    ]
    return {
        name: draw_panels(f"{prefix}{name}", question, f"{alt}, a line per method", panels)
        for (name, question, alt), panels in figures
        if panels
    }


def heat_colours(share: float) -> tuple[str, str]:
    """Return a heat map cell's background, and a text colour that stands out from it."""
    return to_hex(_HEAT(share)), "#ffffff" if share > 0.925 else "#000000"


def _answer_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves: dict[str, Curve] = {}
    for label in stats.labels:
        losses = {length: stats.answer_loss(label, length) for length in stats.lengths}
        curves[label] = {length: loss.mean for length, loss in losses.items() if loss is not None}
    panels = _panels(stats, ranking, curves, "length (tokens)", _PER_TOKEN)
    if panels and stats.floor is not None:
        floor = stats.floor.mean.estimate
        at = [(float(length), floor) for length in stats.lengths]
        panels[0].lines.append(Line("answer not in text", CONTROL, at))
    return [_at_lengths(replace(panel, log_y=False)) for panel in panels]


def _accuracy_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves: dict[str, Curve] = {}
    for label in stats.labels:
        at = {length: stats.accuracy(label, lengths=(length,)) for length in stats.lengths}
        curves[label] = {length: interval for length, interval in at.items() if interval}
    if len({i.estimate for curve in curves.values() for i in curve.values()}) < 2:
        return []  # the same accuracy everywhere is a line of text
    panels = _panels(stats, ranking, curves, "length (tokens)", "accuracy, mean of tasks")
    return [_at_lengths(replace(panel, as_percent=True)) for panel in panels]


def _perplexity_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves = {label: stats.curve(label) for label in stats.losses}
    panels = _panels(stats, ranking, curves, "position in the text (tokens)", "perplexity")
    for name, curve in controls(stats) if panels else []:
        points = [(float(end), interval.estimate) for end, interval in curve.items()]
        panels[0].lines.append(Line(name, CONTROL, points, "o"))
    return panels


def _sliding_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves = {label: stats.sliding(label) for label in stats.labels}
    panels = _panels(stats, ranking, curves, "context (tokens)", "perplexity")
    return [_at_lengths(panel) for panel in panels]


def _at_lengths(panel: Panel) -> Panel:
    """Return a panel of few lengths: a tick each, logarithmic where they span a factor of eight."""
    lengths = sorted({x for line in panel.lines for x, _ in line.points})
    wide = lengths[-1] >= 8 * lengths[0]
    return replace(panel, log_x=wide, ticks=lengths, bands=False)


def _panels(
    stats: RunStatistics, ranking: Ranking, curves: Mapping[str, Curve], x: str, y: str
) -> list[Panel]:
    """Return one panel of curves with their intervals; none without a curve."""
    points = {
        label: [(float(at), i.estimate) for at, i in sorted(curve.items())]
        for label, curve in curves.items()
    }
    intervals = {
        label: [
            (float(at), i.low, i.high)
            for at, i in sorted(curve.items())
            if math.isfinite(i.low) and i.high < math.inf
        ]
        for label, curve in curves.items()
    }
    lines = _lines(stats, ranking, points, intervals)
    return [Panel(lines, stats.trained_length, x, y)] * bool(lines)


def _stretch_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    layers: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for method in stats.results["methods"]:
        for layer, f in (method.get("frequencies") or {}).items():
            layers.setdefault(layer, {})[method["label"]] = [
                (2 * math.pi / old, old / new if new else math.inf)
                for old, new in zip(f["unscaled"], f["inv_freq"], strict=True)
                if old
            ]
    panels = []
    x = "trained wavelength of the pair (tokens per turn)"
    for layer, points in layers.items():
        geometry = (stats.run.get("geometry") or {}).get(layer) or stats.run
        title = "" if layer == "all" else one_line(layer).replace("_", " ")
        if lines := _lines(stats, ranking, points):
            trained = geometry["trained_length"]
            panels.append(Panel(lines, trained, x, "stretch factor", title, log_x=True))
    return panels


def _lines(
    stats: RunStatistics,
    ranking: Ranking,
    points: Mapping[str, list[tuple[float, float]]],
    intervals: Mapping[str, list[tuple[float, float, float]]] | None = None,
) -> list[Line]:
    """Return a line for each group of equal methods, best first."""
    lines = []
    for labels in ranking.groups:
        label = next((label for label in labels if points.get(label)), None)
        if label is None:
            continue
        key, name = ranking.colours[label], stats.names[label]
        if len(name) > _LONGEST_NAME:
            name = name[: _LONGEST_NAME - 1] + "…"
        marker = "" if key == REST else _MARKERS[key]
        spans = (intervals or {}).get(label, [])
        lines.append(Line(name, key, points[label], marker, filter_mark(label), spans))
    return lines


WIDE_WIDTH, NARROW_WIDTH = 912, 372
METHOD = "method-"  # begins the ids of parts that belong to one method


@dataclass(frozen=True)
class Picture:
    """One figure; `svgs` are its wide and its narrow drawing, for either kind of screen."""

    name: str
    alt: str
    png: bytes
    svgs: dict[str, str]


def render_picture(name: str, alt: str, paint: Callable[[int], Figure]) -> Picture:
    """Draw a figure as PNG and, in two widths in pixels, as SVG for a page.

    Args:
        name: What its file is called.
        alt: What it shows, for those who do not see it.
        paint: Makes the figure of a given width.
    """
    with rc_context(STYLE):
        png = io.BytesIO()
        paint(WIDE_WIDTH).savefig(png, format="png", dpi=144, facecolor="white")
        svgs = {}
        for kind, width in (("wide", WIDE_WIDTH), ("narrow", NARROW_WIDTH)):
            file = io.StringIO()
            bare = {"Date": None, "Creator": None, "Format": None, "Type": None}
            paint(width).savefig(file, format="svg", transparent=True, metadata=bare)
            svgs[kind] = _add_aria_label(
                _adapt_svg_to_page(file.getvalue(), f"{name}-{kind}-"), alt
            )
    return Picture(name, alt, png.getvalue(), svgs)


def _add_aria_label(svg: str, alt: str) -> str:
    """Describe a drawing for screen readers."""
    return re.sub(r"<svg([^>]*)>", rf'<svg role="img"\1><title>{escape(alt)}</title>', svg, count=1)


def _adapt_svg_to_page(svg: str, prefix: str) -> str:
    """Fit a drawing into a page: unique ids, no fonts, the page's own colours."""
    variables = {colour: f"var(--{name})" for name, colour in PAPER.items()}

    def fit(tag: re.Match[str]) -> str:
        text = re.sub(r' xmlns(:\w+)?="[^"]*"| font-family: [^;"]*;|xlink:(?=href)', "", tag[0])
        text = re.sub(rf' id="{METHOD}(\w+)"', r' data-method="\1"', text)
        text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', prefix, text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text)
        return re.sub(r"#[0-9a-f]{6}\b", lambda c: variables.get(c[0], c[0]), text)

    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", fit, svg)


# Above this no vocabulary has a perplexity that means anything; such points sit at the top.
_OFF_SCALE = 1e6
_MIN_TICKS = 3
_DODGE = 5.0  # pixels between the intervals of neighbouring lines
_TICKS_OF_A_DECADE = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(range(1, 10)))


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        label: Its name at its end.
        key: The name of its colour; lines in `REST` are thin, and share one label.
        points: x and y.
        marker: matplotlib's marker; none if empty.
        method: What filters know it by.
        intervals: x, low and high.
        dashes: Points on and off of a dashed line; none of a solid one.
    """

    label: str
    key: str
    points: list[tuple[float, float]]
    marker: str = ""
    method: str = ""
    intervals: list[tuple[float, float, float]] = field(default_factory=list)
    dashes: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        lines: The lines, the important ones first.
        trained_length: Where the shade begins, in units of x.
        x: What x is.
        y: What y is.
        title: Which of several panels it is.
        log_x: Whether x is logarithmic.
        log_y: Whether y may be logarithmic.
        as_percent: Whether y goes from 0 to 100%.
        bands: Whether intervals are bands, along the plain model's line and the best method's;
            else each line in colour has a whisker a point.
        ticks: Ticks of x; chosen where there are none.
        y_limits: The ends of y, such as those of the panels beside it; chosen if None.
    """

    lines: list[Line]
    trained_length: int
    x: str
    y: str
    title: str = ""
    log_x: bool = False
    log_y: bool = True
    as_percent: bool = False
    bands: bool = True
    ticks: list[float] = field(default_factory=list)
    y_limits: tuple[float, float] | None = None


def draw_panels(name: str, question: str, alt: str, panels: list[Panel]) -> Picture:
    """Draw panels below one another, each line labelled at its end, or below if labels are long.

    Args:
        name: The picture's file name.
        question: What it answers, its title.
        alt: What it shows, for those who do not see it.
        panels: At least one.
    """
    labels = max((_line_labels(panel) for panel in panels), key=len)
    longest = max(len(label) for panel in panels for label, _, _ in _line_labels(panel))

    def paint(width: int) -> Figure:
        wide = width == WIDE_WIDTH
        direct = len(labels) <= 8 and longest <= (26 if wide else 12)
        high, below, right = 315 if wide else 240, 52, 20 + 7 * longest
        columns = max(1, min(3, (width - 66) // (48 + 8 * longest))) if wide else 1
        if not direct:
            below, right = below + 12 + 21 * math.ceil(len(labels) / columns), 14
        title = textwrap.wrap(question, 90 if wide else 38)
        above = 22 * len(title) + 8
        row = 34 + high + below
        with canvas(width, above + row * len(panels)) as page:
            place: Any = {"ha": "left", "va": "top", "weight": "bold", "linespacing": 1.35}
            page.figure.text(*page.share(4, 2), "\n".join(title), color=PAPER["ink"], **place)
            for i, panel in enumerate(panels):
                top = above + row * i + 34
                axes = page.add_axes(66, top, width - 66 - right, high)
                roof = _scale_y(axes, panel)
                _scale_x(axes, panel, 8 if wide else 4)
                handles = _draw_lines(axes, panel, roof)
                if direct:
                    _label_line_ends(axes, panel, roof, high)
                else:
                    shown = [(handles[line.label], text) for text, _, line in _line_labels(panel)]
                    most = 100 if wide else 38
                    page.figure.legend(
                        [handle for handle, _ in shown],
                        [legend_label(_abbreviate(text, most)) for _, text in shown],
                        bbox_to_anchor=page.share(52, top + high + 52),
                        loc="upper left",
                        borderpad=0,
                        ncols=columns,
                    )
        return page.figure

    return render_picture(name, alt, paint)


def _line_labels(panel: Panel) -> list[tuple[str, str, Line]]:
    """Return each label with its colour and line; all grey lines have one together."""
    labels = [(line.label, line.key, line) for line in panel.lines if line.key != REST]
    rest = [line for line in panel.lines if line.key == REST]
    if rest:
        text = rest[0].label if len(rest) == 1 else f"{len(rest)} other methods"
        middle = sorted(rest, key=lambda line: line.points[-1][1])[len(rest) // 2]
        labels.append((text, "muted", middle))
    return labels


def _draw_lines(axes: Axes, panel: Panel, roof: float) -> dict[str, Any]:
    """Draw the lines and return a handle for each label."""
    handles: dict[str, Any] = {}
    coloured = [line for line in panel.lines if line.key != REST]
    for line in [*(line for line in panel.lines if line.key == REST), *reversed(coloured)]:
        transform = axes.transData
        if line in coloured and line.intervals and not panel.bands:
            shift = _DODGE * (coloured.index(line) - (len(coloured) - 1) / 2)
            figure: Any = axes.figure
            transform = transform + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
        artists = _draw_line(axes, panel, line, roof, transform)
        handles[line.label] = artists[0]
        if line.method:  # marks in the SVG which method a part of it belongs to
            for artist in artists:
                artist.set_gid(f"{METHOD}{line.method}")
    return handles


def _draw_line(axes: Axes, panel: Panel, line: Line, roof: float, transform: Any) -> list[Any]:
    rest, colour = line.key == REST, PAPER[line.key]
    order = 2.6 if rest else 3.0
    look: Any = {"color": colour, "lw": 0.9 if rest else 1.9, "zorder": order}
    if line.key == CONTROL:
        # The control's rings go around the points that it is compared with.
        look |= {"ls": (0, (1, 2)), "markersize": 9.5, "mfc": "none", "mew": 1.1, "zorder": 4}
    elif not rest:
        look |= {"markersize": 4.5}
    if line.dashes is not None:
        look |= {"ls": (0, line.dashes), "lw": 1.4}
    x = [point[0] for point in line.points]
    y = [min(value, roof) for _, value in line.points]
    artists: list[Any] = axes.plot(
        x, y, marker="" if rest else line.marker, transform=transform, **look
    )
    # More than two bands would hide one another.
    shown = not panel.bands or line.key in (PLAIN, BEST)
    intervals = [i for i in line.intervals if i[1] <= roof] if shown and not rest else []
    if intervals:
        at, low, high = zip(*intervals, strict=True)
        top = [min(value, roof) for value in high]
        if panel.bands:
            band: Any = {"color": colour, "alpha": 0.13, "lw": 0, "zorder": 2.5}
            artists.append(axes.fill_between(at, low, top, **band))
        else:
            whisker: Any = {"color": colour, "lw": 1.2, "alpha": 0.75, "zorder": order}
            artists.append(axes.vlines(at, low, top, transform=transform, **whisker))
    off = [point[0] for point in line.points if point[1] > roof]
    if off and not rest:
        artists += axes.plot(off, [roof] * len(off), "^", color=colour, ms=10, zorder=3)
        endless = math.inf in dict(line.points).values()
        text = ("infinite" if endless else f"over {_OFF_SCALE:,.0f}") + 3 * "\u00a0"
        artists.append(axes.text(off[0], roof, text, color=colour, ha="right", va="center"))
    return artists


def _scale_x(axes: Axes, panel: Panel, ticks: int) -> None:
    x = [point[0] for line in panel.lines for point in line.points]
    # Every second length or so where there is no room for all.
    some = panel.ticks[:: -(-len(panel.ticks) // ticks) or 1]
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xlim(min(x) / 1.3, max(*x, panel.trained_length) * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(some) if some else LogLocator(numticks=ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(x) * (1.04 if some else 1.01))
        # Steps of a power of two, as lengths mostly are.
        steps = MultipleLocator(2 ** math.ceil(math.log2(max(x) / ticks)))
        axes.xaxis.set_major_locator(FixedLocator(some) if some else steps)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(_abbreviate(panel.title, 60), loc="left", fontsize=FONT, pad=9)
    low, high = axes.get_xlim()
    if low < panel.trained_length < high:
        axes.axvspan(panel.trained_length, high, color=PAPER["shade"], lw=0, zorder=0)
        axes.axvline(panel.trained_length, color=PAPER["muted"], lw=1.2, zorder=2)
        text = f"trained on {panel.trained_length:,}"
        place: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        where, offset = "center", (0, 7)
        if panel.title and panel.trained_length <= min(x):  # there it would run into the title
            where, offset = "left", (5, -14)
        axes.annotate(
            text, (panel.trained_length, 1), offset, color=PAPER["muted"], ha=where, **place
        )


def _scale_y(axes: Axes, panel: Panel) -> float:
    """Set the y axis, logarithmic over a factor of 5; return where larger values are drawn."""
    if panel.as_percent:
        axes.set_ylim(-0.03, 1.05)
        axes.yaxis.set_major_locator(MultipleLocator(0.2))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return 1.0
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        return panel.y_limits[1]
    values = [y for line in panel.lines for _, y in line.points]
    shown = [value for value in values if 0 < value <= _OFF_SCALE] or [1.0]
    coloured = [i for line in panel.lines if line.key != REST for i in line.intervals]
    low = min([*shown, *(bottom for _, bottom, _ in coloured if bottom > 0)])
    # Intervals widen the axis, but a wide one must not flatten the lines.
    high = max([*shown, *(top for _, _, top in coloured if top <= 2 * max(shown))])
    off = any(value > _OFF_SCALE for value in values)
    if panel.log_y and high / low > 5:
        roof = high * 1.5 if off else high
        floor, ceiling = low / 1.25, roof * (roof / low) ** 0.1
        axes.set_yscale("log")
        axes.set_ylim(floor, ceiling)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(floor, ceiling)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = max(high - low, 0.05 * high) * 0.12
        roof = high + 3 * pad if off else high
        axes.set_ylim(0 if not panel.log_y else low - pad, roof + 2 * pad)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return roof


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic axis: few, but at least three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _TICKS_OF_A_DECADE:
        ticks = [t for d in decades for s in steps if low <= (t := float(f"{s}e{d}")) <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    return ticks


def _label_line_ends(axes: Axes, panel: Panel, roof: float, high: float) -> None:
    """Write each label to the right of its line's last point, without overlaps."""
    gap, at = 1.35 * FONT / high, -1.0
    ends = []
    for text, key, line in _line_labels(panel):
        last = next((y for _, y in reversed(line.points) if not math.isnan(y)), roof)
        spot = axes.transAxes.inverted().transform(axes.transData.transform((1, min(last, roof))))
        ends.append((float(spot[1]), text, key, line))
    ends.sort(key=lambda end: end[0])
    # Upwards past the one below, from as far down as leaves room for those above.
    for i, (y, text, key, line) in enumerate(ends):
        at = max(min(y, 1 - gap * (len(ends) - 1 - i)), at + gap)
        look: Any = {"color": PAPER[key], "va": "center_baseline"}
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        label = axes.annotate(text, (1, at), (11, 0), **place, **look)
        if line.method and key == line.key:
            label.set_gid(f"{METHOD}{line.method}")


def _abbreviate(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


_INK, _MUTED = PALETTE["ink"][0], PALETTE["muted"][0]
_CELL, _ROW = 0.85, 0.5  # inches


def draw_heat_maps(stats: RunStatistics, ranking: Ranking) -> dict[str, bytes]:
    """Return a PNG for each task whose depths differ, by file name without ending.

    It has a panel for each of the best methods.
    """
    maps = {task: depth_maps(stats, ranking, task)[0] for task in stats.tasks}
    return {
        picture_name(task): _png(tables[:MAX_ROWS])
        for task, tables in maps.items()
        if tables and not single_samples(stats, task)
    }


def single_samples(stats: RunStatistics, task: str) -> bool:
    """Return whether each cell of a task's heat maps has at most one sample, too few for a rate."""
    counts = Counter(
        (label, s["length"], s.get("depth"))
        for label in stats.labels
        for s in stats.samples(label, task)
    )
    return max(counts.values(), default=0) < 2


def depth_maps(stats: RunStatistics, ranking: Ranking, task: str) -> tuple[list[Table], list[str]]:
    """Return a task's heat maps, best method first, and lines on methods without a difference.

    A map that is the same in each cell, none right or all, says no more than a line does.

    Args:
        stats: One run's statistics.
        ranking: The order of its methods.
        task: The task's name.
    """
    if task in uniform_tasks(stats):
        return [], []
    by_name = {table.name: table for table in heat_maps(stats, task)}
    tables: list[Table] = []
    uniform: dict[str, list[str]] = {}
    for labels in ranking.groups:
        name = next((n for label in labels if (n := stats.names[label]) in by_name), None)
        if name is None:
            continue
        table, joined = by_name[name], " = ".join(stats.names[label] for label in labels)
        shares = {cell.share for row in table.rows for cell in row.cells if cell.share is not None}
        if shares in ({0.0}, {1.0}):
            uniform.setdefault("All" if shares == {1.0} else "None", []).append(joined)
        else:
            colour = ranking.colours[labels[0]]
            tables.append(replace(table, name=joined, key=colour))
    lines = [
        f"{share} right at every length and depth: {', '.join(names)}."
        for share, names in uniform.items()
    ]
    return tables, lines


def picture_name(task: str) -> str:
    """Return the file name of a task's picture, safe for any task name."""
    return "retrieval-" + re.sub(r"[^\w-]", "_", str(task))


def _png(heat_maps: list[Table]) -> bytes:
    columns, rows = len(heat_maps[0].columns), len(heat_maps[0].rows)
    panel, margin = _CELL * columns + 0.35, 0.65
    height = _ROW * rows + 1.0
    width = panel * len(heat_maps) + margin
    figure = Figure(figsize=(width, height))
    for i, heat_map in enumerate(heat_maps):
        left = (margin + panel * i) / width
        box = (left, 0.5 / height, _CELL * columns / width, _ROW * rows / height)
        _draw_panel(figure.add_axes(box), heat_map, labelled=i == 0)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=144, facecolor="white")
    return file.getvalue()


def _draw_panel(axes: Axes, heat_map: Table, *, labelled: bool) -> None:
    for y, row in enumerate(heat_map.rows):
        for x, cell in enumerate(row.cells):
            fill, text = ("#ffffff", _MUTED) if cell.share is None else heat_colours(cell.share)
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor="white", lw=1.5))
            axes.text(x + 0.5, y + 0.42, cell.text, ha="center", va="center", color=text)
            axes.text(x + 0.5, y + 0.74, cell.note, ha="center", va="center", color=text, size=7)
    axes.set(xlim=(0, len(heat_map.columns)), ylim=(len(heat_map.rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(heat_map.columns))])
    axes.set_xticklabels([cell.text for cell in heat_map.columns], color=_MUTED, size=9)
    beyond = [x for x, cell in enumerate(heat_map.columns) if cell.beyond]
    if (first := min(beyond, default=0)) > 0:
        axes.axvline(first, color=_INK, lw=2)  # the trained length lies between these columns
    axes.set_yticks([y + 0.5 for y in range(len(heat_map.rows))])
    names = [row.name for row in heat_map.rows] if labelled else [""] * len(heat_map.rows)
    axes.set_yticklabels(names, color=_MUTED, size=9)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(heat_map.name, loc="left", color=_INK, size=11, parse_math=False)
