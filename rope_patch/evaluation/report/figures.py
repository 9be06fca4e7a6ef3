"""Figures of a report: SVG that follows the page's colours, and PNG to attach elsewhere.

Lengths are in CSS pixels throughout: at 72 dots per inch one point of matplotlib is one pixel.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MultipleLocator,
    NullLocator,
    PercentFormatter,
)

from rope_patch.evaluation.report.format import filter_mark, one_line
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import CONTROL
from rope_patch.utils.plot_style import FONT, PAPER, STYLE
from rope_patch.utils.plot_style import PALETTE as PALETTE

# Heat maps from nothing found to everything found, on any background.
HEAT = ("#e9925c", "#f1ece4", "#1f66a8")

_HEAT = LinearSegmentedColormap.from_list("found", HEAT)
_MARKERS = "osD^vP"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_WIDE_WIDTH, _NARROW_WIDTH = 912, 372

# Above this no vocabulary has a perplexity that means anything; such points sit at the top.
_OFF_SCALE = 1e6
_METHOD = "method-"  # begins the ids of parts that belong to one method


@dataclass(frozen=True)
class Picture:
    """One figure; `svgs` are its wide and its narrow drawing, for either kind of screen."""

    name: str
    alt: str
    png: bytes
    svgs: dict[str, str]


@dataclass(frozen=True)
class _Line:
    label: str
    key: str
    points: list[tuple[float, float]]
    marker: str
    dash: Any
    method: str = ""  # what filters know it by
    band: list[tuple[float, float, float]] = field(default_factory=list)  # x, low, high


@dataclass(frozen=True)
class _Panel:
    lines: list[_Line]
    trained_length: int
    x: str
    y: str
    title: str = ""
    log_x: bool = False
    as_percent: bool = False  # y goes from 0 to 100%
    ticks: list[float] = field(default_factory=list)  # of x; chosen where there are none


def draw_figures(stats: RunStatistics, prefix: str = "") -> dict[str, Picture]:
    """Draw what was measured, by name.

    Args:
        stats: One run's statistics.
        prefix: The start of the file names; it separates the pictures of several runs.

    Returns:
        Some of `accuracy`, `answers`, `perplexity`, `sliding` and `stretch`.
    """
    figures_by_name = {
        "accuracy": _accuracy_figure(stats),
        "answers": _answers_figure(stats),
        "perplexity": _perplexity_figure(stats),
        "sliding": _sliding_figure(stats),
        "stretch": _stretch_figure(stats),
    }
    return {
        name: _draw_panels(f"{prefix}{name}", alt, panels)
        for name, (alt, panels) in figures_by_name.items()
        if panels
    }


def _accuracy_figure(stats: RunStatistics) -> tuple[str, list[_Panel]]:
    curves: dict[Any, Curve] = {}
    for label in stats.labels:
        at = {length: stats.accuracy(label, lengths=(length,)) for length in stats.lengths}
        curves[label] = {length: interval for length, interval in at.items() if interval}
    alt = "Accuracy against length with 95% intervals, all tasks together, a line per method"
    y = "accuracy, all tasks"
    panels = _make_panels(stats, curves, "length (tokens)", y, shares=True)
    return alt, [_log2_axis(panel) for panel in panels]


def _answers_figure(stats: RunStatistics) -> tuple[str, list[_Panel]]:
    values = {}
    for label in stats.labels:
        at = [(n, stats.answer_loss(label, n)) for n in stats.lengths]
        values[label] = [(float(n), loss.mean.estimate) for n, loss in at if loss is not None]
    alt = "Negative log-likelihood of the right answers against length, a line per method"
    lines = _make_lines(stats, values)
    panel = _Panel(lines, stats.trained_length, "length (tokens)", "nats per answer token")
    return alt, [_log2_axis(panel)] if lines else []


def _perplexity_figure(stats: RunStatistics) -> tuple[str, list[_Panel]]:
    curves = {label: stats.curve(label) for label in stats.losses}
    alt = "Perplexity by position in the text with 95% intervals, a line per method"
    panels = _make_panels(stats, curves, "position in the text (tokens)", "perplexity")
    if panels and stats.control:
        held = [(float(end), interval.estimate) for end, interval in stats.control.items()]
        panels[0].lines.append(_Line("control", CONTROL, held, "o", (0, (1, 2))))
    return alt, panels


def _sliding_figure(stats: RunStatistics) -> tuple[str, list[_Panel]]:
    curves = {label: stats.sliding(label) for label in stats.labels}
    alt = "Perplexity of the same tokens against the length of context before them"
    panels = _make_panels(stats, curves, "context (tokens)", "perplexity")
    return alt, [_log2_axis(panel) for panel in panels]


def _log2_axis(panel: _Panel) -> _Panel:
    """Return a panel with a logarithmic axis where lengths span a factor of eight."""
    lengths = sorted({x for line in panel.lines for x, _ in line.points})
    wide = lengths[-1] >= 8 * lengths[0]
    return replace(panel, log_x=True, ticks=lengths) if wide else panel


def _make_panels(
    stats: RunStatistics, curves: dict[Any, Curve], x: str, y: str, *, shares: bool = False
) -> list[_Panel]:
    """Return one panel of curves with their intervals as bands; none without a curve."""
    points = {
        label: [(float(at), i.estimate) for at, i in sorted(curve.items())]
        for label, curve in curves.items()
    }
    bands = {
        label: [(float(at), i.low, i.high) for at, i in sorted(curve.items())]
        for label, curve in curves.items()
    }
    lines = _make_lines(stats, points, bands)
    return [_Panel(lines, stats.trained_length, x, y, as_percent=shares)] * bool(lines)


def _stretch_figure(stats: RunStatistics) -> tuple[str, list[_Panel]]:
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
        if lines := _make_lines(stats, points):
            trained = geometry["trained_length"]
            panels.append(_Panel(lines, trained, x, "stretch factor", title, log_x=True))
    return "Stretch of each pair by its wavelength", panels


def heat_colours(share: float) -> tuple[str, str]:
    """Return a heat map cell's background, and a text colour that stands out from it."""
    return to_hex(_HEAT(share)), "#ffffff" if share > 0.925 else "#000000"


def _make_lines(
    stats: RunStatistics,
    points: Mapping[str, list[tuple[float, float]]],
    bands: Mapping[str, list[tuple[float, float, float]]] | None = None,
) -> list[_Line]:
    lines = []
    for i, (label, name) in enumerate(stats.names.items()):
        if points.get(label):
            dash = _DASHES[i // len(_MARKERS) % len(_DASHES)]
            key, marker = stats.colour_names[label], _MARKERS[i % len(_MARKERS)]
            method, band = filter_mark(label), (bands or {}).get(label, [])
            lines.append(_Line(name, key, points[label], marker, dash, method, band))
    return lines


def _draw_panels(name: str, alt: str, panels: list[_Panel]) -> Picture:
    """Draw panels below one another; label lines at their ends, or below if labels are long."""
    most = max(len(panel.lines) for panel in panels)
    longest = max(len(line.label) for panel in panels for line in panel.lines)

    def paint(width: int) -> Figure:
        wide = width == _WIDE_WIDTH
        direct = most <= 8 and longest <= (24 if wide else 12)
        high, below, right = 315 if wide else 240, 52, 20 + 7 * longest
        columns = max(1, min(3, (width - 66) // (48 + 8 * longest))) if wide else 1
        if not direct:
            below, right = below + 12 + 21 * math.ceil(most / columns), 14
        row = 34 + high + below
        total = row * len(panels)
        figure = Figure(figsize=(width / 72, total / 72))
        for i, panel in enumerate(panels):
            bottom = total - row * (i + 1) + below
            box = (66 / width, bottom / total, (width - 66 - right) / width, high / total)
            axes = figure.add_axes(box)
            handles, roof = _plot_lines(axes, panel)
            _scale_x(axes, panel, 8 if wide else 4)
            if direct:
                _label_line_ends(axes, panel.lines, roof, high)
            else:
                # With a space in front, because matplotlib leaves out labels that start with a _.
                texts = [" " + _abbreviate(line.label, 100 if wide else 38) for line in panel.lines]
                corner = (52 / width, (bottom - 52) / total)
                look: Any = {"loc": "upper left", "borderpad": 0, "ncols": columns}
                figure.legend(handles, texts, bbox_to_anchor=corner, **look)
        return figure

    return render_picture(name, alt, paint)


def _plot_lines(axes: Axes, panel: _Panel) -> tuple[list[Any], float]:
    roof = _scale_y(axes, panel)
    handles = []
    for line in panel.lines:
        # The control's rings go around the points that it is compared with.
        ring = {"markersize": 9.5, "mfc": "none"} if line.key == CONTROL else {}
        look: Any = {"color": PAPER[line.key], "markersize": 4.5, "zorder": 3, **ring}
        x = [point[0] for point in line.points]
        y = [min(value, roof) for _, value in line.points]
        artists: list[Any] = axes.plot(
            x, y, linestyle=line.dash, marker=line.marker, lw=1.7, mew=1.1, **look
        )
        handles += artists
        if band := [b for b in line.band if b[1] <= roof]:
            at, low, high = zip(*band, strict=True)
            top = [min(value, roof) for value in high]
            # Many bands on one spot must not hide what lies there.
            alpha = 0.16 * min(1, 5 / len(panel.lines))
            look_of_band: Any = {"color": PAPER[line.key], "alpha": alpha, "lw": 0, "zorder": 2.5}
            artists = [*artists, axes.fill_between(at, low, top, **look_of_band)]
        off = [point[0] for point in line.points if point[1] > roof]
        artists += axes.plot(off, [roof] * len(off), "^", color=look["color"], ms=10, zorder=3)
        endless = math.inf in dict(line.points).values()
        text = ("infinite" if endless else f"over {_OFF_SCALE:,.0f}") + 3 * "\u00a0"
        for x_off in off[:1]:
            artists.append(
                axes.text(x_off, roof, text, color=look["color"], ha="right", va="center")
            )
        _tag_method(line, artists)
    return handles, roof


def _tag_method(line: _Line, drawn: list[Any]) -> None:
    """Mark in the SVG which method a part of it belongs to."""
    for artist in drawn:
        if line.method:
            artist.set_gid(f"{_METHOD}{line.method}")


def _scale_x(axes: Axes, panel: _Panel, ticks: int) -> None:
    x = [point[0] for line in panel.lines for point in line.points]
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xlim(min(x) / 1.3, max(*x, panel.trained_length) * 1.3)
        # Every second length or so where there is no room for all.
        some = panel.ticks[:: -(-len(panel.ticks) // ticks) or 1]
        axes.xaxis.set_major_locator(FixedLocator(some) if some else LogLocator(numticks=ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(x) * 1.01)
        # Steps of a power of two, as lengths mostly are.
        axes.xaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(max(x) / ticks))))
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
        axes.annotate(
            text, (panel.trained_length, 1), (0, 7), color=PAPER["muted"], ha="center", **place
        )


def _scale_y(axes: Axes, panel: _Panel) -> float:
    """Set the y axis, logarithmic over a factor of 5; return where larger values are drawn."""
    if panel.as_percent:
        axes.set_ylim(-0.03, 1.05)
        axes.yaxis.set_major_locator(MultipleLocator(0.2))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return 1.0
    values = [y for line in panel.lines for _, y in line.points]
    shown = [value for value in values if 0 < value <= _OFF_SCALE] or [1.0]
    bands = [low for line in panel.lines for _, low, _ in line.band if low > 0]
    low, high = min([*shown, *bands]), max(shown)
    off = any(value > _OFF_SCALE for value in values)
    if high / low > 5:
        roof = high * 1.5 if off else high
        axes.set_yscale("log")
        axes.set_ylim(low / 1.25, roof * (roof / low) ** 0.1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 2e3 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = max(high - low, 0.05 * high) * 0.12
        roof = high + 3 * pad if off else high
        axes.set_ylim(low - pad, roof + 2 * pad)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    return roof


def _label_line_ends(axes: Axes, lines: list[_Line], roof: float, high: float) -> None:
    """Write each line's name to the right of its last point, without overlaps."""
    gap, at = 1.35 * FONT / high, -1.0
    ends = []
    for line in lines:
        last = next((y for _, y in reversed(line.points) if not math.isnan(y)), roof)
        spot = axes.transAxes.inverted().transform(axes.transData.transform((1, min(last, roof))))
        ends.append((float(spot[1]), line))
    ends.sort(key=lambda end: end[0])
    # Upwards past the one below, from as far down as leaves room for those above.
    for i, (y, line) in enumerate(ends):
        at = max(min(y, 1 - gap * (len(ends) - 1 - i)), at + gap)
        look: Any = {"color": PAPER[line.key], "va": "center_baseline"}
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        _tag_method(line, [axes.annotate(line.label, (1, at), (11, 0), **place, **look)])


def _abbreviate(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def render_picture(name: str, alt: str, paint: Callable[[int], Figure]) -> Picture:
    """Draw a figure as PNG and, in two widths in pixels, as SVG for a page.

    Args:
        name: What its file is called.
        alt: What it shows, for those who do not see it.
        paint: Makes the figure of a given width.
    """
    with rc_context(STYLE):
        png = io.BytesIO()
        paint(_WIDE_WIDTH).savefig(png, format="png", dpi=144, facecolor="white")
        svgs = {}
        for kind, width in (("wide", _WIDE_WIDTH), ("narrow", _NARROW_WIDTH)):
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
        text = re.sub(rf' id="{_METHOD}(\w+)"', r' data-method="\1"', text)
        text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', prefix, text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text)
        return re.sub(r"#[0-9a-f]{6}\b", lambda c: variables.get(c[0], c[0]), text)

    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], count=1, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", fit, svg)
