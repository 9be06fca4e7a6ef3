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
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MultipleLocator,
    NullLocator,
    PercentFormatter,
)
from matplotlib.transforms import ScaledTranslation

from rope_patch.evaluation.report.conclusions import MAX_ROWS, Ranking
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import CONTROL, Table, filter_mark, one_line
from rope_patch.evaluation.report.tables import controls, heat_maps, uniform_tasks
from rope_patch.utils.figures import FONT, PALETTE, PAPER, STYLE, canvas, legend_label

# Heat maps from nothing found to everything found, on any background.
HEAT = ("#e9925c", "#f1ece4", "#1f66a8")

_HEAT = LinearSegmentedColormap.from_list("found", HEAT)
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

# What the intervals of a figure are.
_STUDENT = "95% Student's t intervals of the mean over texts"
_WILSON = "95% Wilson intervals of the mean over tasks, in which samples of one text are a cluster"
_BOOTSTRAP = "95% bootstrap intervals, drawn from runs of neighbouring blocks"


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
        (_ANSWERS, _answer_panels(stats, ranking), _STUDENT),
        (_ACCURACY, _accuracy_panels(stats, ranking), _WILSON),
        (_PERPLEXITY, _perplexity_panels(stats, ranking), _BOOTSTRAP),
        (_SLIDING, _sliding_panels(stats, ranking), _BOOTSTRAP),
        (_STRETCH, _stretch_panels(stats, ranking), ""),
    ]
    return {
        name: draw_panels(
            f"{prefix}{name}",
            question,
            f"{alt}, a line per method",
            panels,
            _interval_caption(panels[0], kind, stats),
        )
        for (name, question, alt), panels, kind in figures
        if panels
    }


def heat_colours(share: float) -> tuple[str, str]:
    """Return a heat map cell's background, and a text colour that stands out from it."""
    return to_hex(_HEAT(share)), "#ffffff" if share > 0.925 else "#000000"


def _interval_caption(panel: Panel, kind: str, stats: RunStatistics) -> str:
    """Return which intervals a panel shows, and of which lines."""
    if not kind:
        return ""
    drawn = [line for line in panel.lines if _shows_intervals(panel, line)]
    if not drawn:
        return f"No interval could be drawn: each would be one of {kind.removeprefix('95% ')}."
    if kind == _STUDENT and stats.looks > 1:
        kind += ", at the longest length so wide that they hold at every look"
    of_all = all(line in drawn for line in panel.lines if line.key != CONTROL)
    text = f"{'Bands' if panel.bands else 'Whiskers'} are {kind}"
    names = {line.label: line.label for line in drawn}
    names |= {stats.plain_name: f"the {stats.plain_name}"}
    leading = " and ".join(names[line.label] for line in drawn)
    return f"{text}." if of_all else f"{text}, of {leading}; the table has the others'."


def _answer_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves: dict[str, Curve] = {}
    for label in stats.labels:
        losses = {length: stats.answer_loss(label, length) for length in stats.lengths}
        curves[label] = {length: loss.mean for length, loss in losses.items() if loss is not None}
    panels = _panels(stats, ranking, curves, "length (tokens)", _PER_TOKEN, 0.0)
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
    panels = _panels(stats, ranking, curves, "length (tokens)", "accuracy, mean of tasks", 0.0)
    return [_at_lengths(replace(panel, as_percent=True)) for panel in panels]


def _perplexity_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves = {label: stats.curve(label) for label in stats.losses}
    panels = _panels(stats, ranking, curves, "position in the text (tokens)", "perplexity", 1.0)
    for name, curve in controls(stats) if panels else []:
        points = [(float(end), interval.estimate) for end, interval in curve.items()]
        panels[0].lines.append(Line(name, CONTROL, points, "o"))
    return panels


def _sliding_panels(stats: RunStatistics, ranking: Ranking) -> list[Panel]:
    curves = {label: stats.sliding(label) for label in stats.labels}
    panels = _panels(stats, ranking, curves, "context (tokens)", "perplexity", 1.0)
    return [_at_lengths(panel) for panel in panels]


def _at_lengths(panel: Panel) -> Panel:
    """Return a panel of few lengths: a tick each, logarithmic where they span a factor of eight."""
    lengths = sorted({x for line in panel.lines for x, _ in line.points})
    ends = [*lengths, panel.trained_length]  # which is marked, wherever it is
    wide = max(ends) >= 8 * min(ends)
    return replace(panel, log_x=wide, ticks=lengths, bands=False)


def _panels(
    stats: RunStatistics,
    ranking: Ranking,
    curves: Mapping[str, Curve],
    x: str,
    y: str,
    least: float,
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
    return [Panel(lines, stats.trained_length, x, y, least=least)] * bool(lines)


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
    """Return a line for each method, best first."""
    labels = [label for group in ranking.groups for label in group if points.get(label)]
    return [
        Line(
            stats.names[label],
            (look := ranking.looks[label]).colour,
            points[label],
            look.marker,
            filter_mark(label),
            (intervals or {}).get(label, []),
            look.dashes,
            look.is_hollow,
            label in (ranking.best, stats.plain),
        )
        for label in labels
    ]


WIDE_WIDTH, NARROW_WIDTH = 912, 372
METHOD = "method-"  # begins the ids of parts that belong to one method


@dataclass(frozen=True)
class Picture:
    """One figure; `svgs` are its wide and its narrow drawing, for either kind of screen."""

    name: str
    alt: str
    png: bytes
    svgs: dict[str, str]
    caption: str = ""


def render_picture(
    name: str, alt: str, paint: Callable[[int], Figure], caption: str = ""
) -> Picture:
    """Draw a figure as PNG and, in two widths in pixels, as SVG for a page.

    Args:
        name: What its file is called.
        alt: What it shows, for those who do not see it.
        paint: Makes the figure of a given width.
        caption: What stands below it.
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
    return Picture(name, alt, png.getvalue(), svgs, caption)


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
_STRIPE = 4.0  # widths of the line: the pieces of lines that are one another's equals
_FEW_LINES = 8  # so many are thick, have labels at their ends, and a whisker a point
_FEW_POINTS = 12  # so many have a marker each; of more, some have
_TICKS_OF_A_DECADE = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(range(1, 10)))


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        label: Its name.
        key: The name of its colour.
        points: x and y.
        marker: matplotlib's marker; none if empty.
        method: What filters know it by.
        intervals: x, low and high.
        dashes: Points on and off of a dashed line; none of a solid one.
        is_hollow: Whether markers are outlines.
        is_leading: Whether it has its intervals where not all lines can have them.
    """

    label: str
    key: str
    points: list[tuple[float, float]]
    marker: str = ""
    method: str = ""
    intervals: list[tuple[float, float, float]] = field(default_factory=list)
    dashes: tuple[float, ...] = ()
    is_hollow: bool = False
    is_leading: bool = False


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
        bands: Whether intervals are bands, along the leading lines; else each line has a whisker a
            point, or each leading line where more than eight lines have intervals.
        ticks: Ticks of x; chosen where there are none.
        y_limits: The ends of y, such as those of the panels beside it; chosen if None.
        least: The smallest possible y: neither intervals nor the axis reach below it.
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
    least: float = -math.inf


def draw_panels(
    name: str, question: str, alt: str, panels: list[Panel], caption: str = ""
) -> Picture:
    """Draw panels below one another, each line labelled at its end, or below if labels are long.

    Args:
        name: The picture's file name.
        question: What it answers, its title.
        alt: What it shows, for those who do not see it.
        panels: At least one.
        caption: What stands below it.
    """
    count = max(len(panel.lines) for panel in panels)
    longest = max(len(line.label) for panel in panels for line in panel.lines)

    def paint(width: int) -> Figure:
        wide = width == WIDE_WIDTH
        direct = count <= _FEW_LINES and longest <= (26 if wide else 12)
        most = 100 if wide else 38
        high, below, right = 315 if wide else 240, 52, 20 + 7 * longest
        columns = max(1, min(3, (width - 66) // (48 + 8 * longest))) if wide else 1
        if not direct:
            extra = max(
                sum(_wrap(line.label, most).count("\n") for line in panel.lines) for panel in panels
            )
            below, right = below + 12 + 21 * math.ceil(count / columns) + 17 * extra, 14
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
                    page.figure.legend(
                        handles,
                        [legend_label(_wrap(line.label, most)) for line in panel.lines],
                        bbox_to_anchor=page.share(52, top + high + 52),
                        loc="upper left",
                        borderpad=0,
                        handlelength=2.8,
                        ncols=columns,
                    )
        return page.figure

    return render_picture(name, alt, paint, caption)


def _wrap(label: str, most: int) -> str:
    """Return a label in lines of so many characters, at most three."""
    return textwrap.fill(label, most, max_lines=3, placeholder=" …")


def _shows_intervals(panel: Panel, line: Line) -> bool:
    """Return whether a line's intervals are drawn: more than two bands would hide one another."""
    few = sum(bool(each.intervals) for each in panel.lines) <= _FEW_LINES
    return bool(line.intervals) and (line.is_leading or (few and not panel.bands))


def _draw_lines(axes: Axes, panel: Panel, roof: float) -> list[Any]:
    """Draw the lines, the important ones on top, and return a handle for each."""
    handles: list[Any] = []
    aside = [] if panel.bands else [line for line in panel.lines if _shows_intervals(panel, line)]
    for number, line in enumerate(panel.lines):
        transform = axes.transData
        if line in aside:
            shift = _DODGE * (aside.index(line) - (len(aside) - 1) / 2)
            figure: Any = axes.figure
            transform = transform + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
            same = [line]
        else:
            same = [x for x in panel.lines if x not in aside and x.points == line.points]
        artists = _draw_line(axes, panel, number, roof, transform)
        handles.append(Line2D([], []))  # the legend has the look without stripes
        handles[-1].update_from(artists[0])
        if len(same) > 1:
            _stripe(artists[0], same.index(line), len(same))
        if line.method:  # marks in the SVG which method a part of it belongs to
            for artist in artists:
                artist.set_gid(f"{METHOD}{line.method}")
    return handles


def _stripe(drawn: Any, turn: int, count: int) -> None:
    """Show every so many-th piece and marker of a line, so that equal lines share its course."""
    drawn.set(
        lw=1.9, markevery=(turn % len(drawn.get_xdata()), count)
    )  # matplotlib's dashes grow with the width
    drawn.set_linestyle((_STRIPE * (count - turn), (_STRIPE, _STRIPE * (count - 1))))


def _draw_line(axes: Axes, panel: Panel, number: int, roof: float, transform: Any) -> list[Any]:
    line = panel.lines[number]
    colour, order = PAPER[line.key], 3.0 + line.is_leading - number / 1000
    thick = line.is_leading or len(panel.lines) <= _FEW_LINES
    look: Any = {"color": colour, "lw": 1.9 if thick else 1.3, "zorder": order, "markersize": 4.5}
    if line.is_hollow:
        look |= {"mfc": PAPER["paper"], "mew": 1.1}
    if line.key == CONTROL:
        # The control's rings go around the points that it is compared with.
        look |= {"ls": (0, (1, 2)), "markersize": 9.5, "mfc": "none", "mew": 1.1, "zorder": 5}
    if line.dashes:
        look |= {"ls": (0, line.dashes), "lw": 1.4}
    if len(line.points) > _FEW_POINTS:
        # At other places on each line, so that lines on one another show both.
        look |= {"markevery": (0.14 * (number * 0.381966 % 1), 0.14)}
    x = [point[0] for point in line.points]
    y = [min(value, roof) for _, value in line.points]
    artists: list[Any] = axes.plot(x, y, marker=line.marker, transform=transform, **look)
    intervals = [i for i in line.intervals if i[1] <= roof] if _shows_intervals(panel, line) else []
    if intervals:
        at, low, high = zip(*intervals, strict=True)
        bottom, top = [max(v, panel.least) for v in low], [min(v, roof) for v in high]
        if panel.bands:
            band: Any = {"color": colour, "alpha": 0.13, "lw": 0, "zorder": 2.5}
            artists.append(axes.fill_between(at, bottom, top, **band))
        else:
            whisker: Any = {"color": colour, "lw": 1.2, "alpha": 0.75, "zorder": order}
            artists.append(axes.vlines(at, bottom, top, transform=transform, **whisker))
    off = [point[0] for point in line.points if point[1] > roof]
    if off:
        artists += axes.plot(off, [roof] * len(off), "^", color=colour, ms=10, zorder=3)
        endless = math.inf in dict(line.points).values()
        text = ("infinite" if endless else f"over {_OFF_SCALE:,.0f}") + 3 * "\u00a0"
        artists.append(axes.text(off[0], roof, text, color=colour, ha="right", va="center"))
    return artists


def _scale_x(axes: Axes, panel: Panel, ticks: int) -> None:
    x = [point[0] for line in panel.lines for point in line.points]
    x += [panel.trained_length] * bool(panel.ticks)
    # Every second length or so where there is no room for all.
    some = panel.ticks[:: -(-len(panel.ticks) // ticks) or 1]
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xlim(min(x) / 1.3, max(*x, panel.trained_length) * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(some) if some else LogLocator(numticks=ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(x) * (1.08 if some else 1.01))  # whiskers stand beside each other
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
        trained = panel.trained_length
        share = math.log(trained / low, high / low) if panel.log_x else trained / high
        where = "center" if 0.15 < share < 0.85 else "left" if share < 0.5 else "right"
        offset = (0, 7)
        if panel.title and panel.trained_length <= min(x):  # there it would run into the title
            where, offset = "left", (5, -14)
        axes.annotate(
            text, (panel.trained_length, 1), offset, color=PAPER["muted"], ha=where, **place
        )


def _scale_y(axes: Axes, panel: Panel) -> float:
    """Set the y axis, logarithmic over a factor of 5; return where larger values are drawn."""
    if panel.as_percent:
        axes.set_ylim(-0.03, 1.05)
        axes.yaxis.set_major_locator(FixedLocator([n / 5 for n in range(6)]))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return 1.0
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        return panel.y_limits[1]
    values = [y for line in panel.lines for _, y in line.points]
    shown = [value for value in values if 0 < value <= _OFF_SCALE] or [1.0]
    spans = [i for line in panel.lines if _shows_intervals(panel, line) for i in line.intervals]
    bottoms = [max(bottom, panel.least) for _, bottom, _ in spans]
    low = min([*shown, *(bottom for bottom in bottoms if bottom > 0)])
    # Intervals widen the axis, but a wide one must not flatten the lines.
    high = max([*shown, *(top for _, _, top in spans if top <= 2 * max(shown))])
    off = any(value > _OFF_SCALE for value in values)
    if panel.log_y and high / low > 5:
        roof = high * 1.5 if off else high
        floor, ceiling = max(low / 1.25, panel.least), roof * (roof / low) ** 0.1
        axes.set_yscale("log")
        axes.set_ylim(floor, ceiling)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(floor, ceiling)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = max(high - low, 0.05 * high) * 0.12
        roof = high + 3 * pad if off else high
        axes.set_ylim(max(low - pad, panel.least) if panel.log_y else 0, roof + 2 * pad)
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
    for line in panel.lines:
        last = next((y for _, y in reversed(line.points) if not math.isnan(y)), roof)
        spot = axes.transAxes.inverted().transform(axes.transData.transform((1, min(last, roof))))
        ends.append((float(spot[1]), line))
    ends.sort(key=lambda end: end[0])
    # Upwards past the one below, from as far down as leaves room for those above.
    for i, (y, line) in enumerate(ends):
        at = max(min(y, 1 - gap * (len(ends) - 1 - i)), at + gap)
        look: Any = {"color": PAPER[line.key], "va": "center_baseline"}
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        label = axes.annotate(line.label, (1, at), (11, 0), **place, **look)
        if line.method:
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
