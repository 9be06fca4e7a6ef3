"""Figures of a report: what each shows, and the question that it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from matplotlib.colors import LinearSegmentedColormap, to_hex

from rope_patch.evaluation.report.format import filter_mark, one_line
from rope_patch.evaluation.report.panels import Line, Panel, draw_panels
from rope_patch.evaluation.report.perplexity_tables import controls
from rope_patch.evaluation.report.picture import Picture
from rope_patch.evaluation.report.ranking import PLAIN, REST, Ranking
from rope_patch.evaluation.report.results.perplexity import Curve
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.table import CONTROL

# Heat maps from nothing found to everything found, on any background.
HEAT = ("#e9925c", "#f1ece4", "#1f66a8")

_HEAT = LinearSegmentedColormap.from_list("found", HEAT)
_MARKERS = {PLAIN: "o", "m0": "s", "m2": "D", "m3": "v"}
_LONGEST_NAME = 26  # characters of a label
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
