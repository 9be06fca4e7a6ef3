"""The figure "loss and recall against length": a panel for each family of encodings."""

from __future__ import annotations

from dataclasses import replace

from rope_patch.evaluation.report.panels import Line, Panel, draw_panels
from rope_patch.evaluation.report.picture import Picture
from rope_patch.lab.interval import seeded_mean
from rope_patch.lab.measurement import PLAIN
from rope_patch.lab.recall_task import PAIRS
from rope_patch.lab.results import LOSS, RIGHT, LabResults, unit
from rope_patch.lab.settings import RECALL, TEXT

# Titles of families, and their encodings. Those without positions are in every panel, to compare.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Vectors added to embeddings": ("sinusoidal", "learned", "binary", "normalised", "integer"),
    "Biases by distance": ("alibi", "t5", "kerple", "fire", "sandwich"),
    "Rotations": ("rope", "rnope", "xpos"),
}
REFERENCE = "none"
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7")
_MARKERS = ("o", "s", "D", "v", "^", "P", "X", "h")
_DASHES = ((4.0, 2.0), (1.0, 1.5))  # of an encoding's first extension, and of others
_QUESTIONS = {
    TEXT: "Loss against length: who reads on beyond the trained length? (lower is better)",
    RECALL: "Recall against length: who finds a value again? (higher is better)",
}


def draw_length_figure(results: LabResults, task: str) -> Picture:
    """Draw one line an encoding, extensions dashed, and the trained length as a bar.

    Args:
        results: The results.
        task: "text" or "recall".
    """
    quantity = LOSS if task == TEXT else RIGHT
    panels = [
        _panel(results, task, quantity, title, names)
        for title, names in _families(results, task).items()
    ]
    if task == TEXT:
        values = [y for panel in panels for line in panel.lines for _, y in line.points]
        pad = 0.06 * (max(values) - min(values)) + 0.01
        limits = (min(values) - pad, max(values) + pad)
        panels = [replace(panel, y_limits=limits) for panel in panels]
    alt = f"{unit(task, quantity)} against test length, a line per encoding, extensions dashed"
    return draw_panels(f"length-{task}", _QUESTIONS[task], alt, panels)


def colour_of(name: str) -> str:
    """Return the colour of an encoding in the figures."""
    if name == REFERENCE:
        return "plain"
    for names in FAMILIES.values():
        if name in names:
            return _COLOURS[names.index(name)]
    return _COLOURS[-1]


def _families(results: LabResults, task: str) -> dict[str, list[str]]:
    """Return the measured encodings of each family, with the reference behind them."""
    measured = results.encodings_of(task)
    known = {name for names in FAMILIES.values() for name in names}
    families = {
        title: [name for name in names if name in measured] for title, names in FAMILIES.items()
    }
    families["Others"] = [name for name in measured if name not in known | {REFERENCE}]
    families = {title: names for title, names in families.items() if names}
    if REFERENCE in measured:
        families = families or {"No positions": []}
        families = {title: [*names, REFERENCE] for title, names in families.items()}
    return families


def _panel(results: LabResults, task: str, quantity: str, title: str, names: list[str]) -> Panel:
    lines = []
    for name in names:
        key = colour_of(name)
        marker = _MARKERS[_COLOURS.index(key)] if key in _COLOURS else "."
        for nth, method in enumerate(results.methods(task, name)):
            points, intervals = [], []
            for length in results.tests:
                if method != PLAIN and length == results.length:
                    continue  # a line's start is the encoding's own
                scores = results.scores(task, name, length, method, quantity)
                if scores is None:
                    continue
                mean = seeded_mean(scores, is_share=quantity == RIGHT)
                points.append((float(length), mean.estimate))
                intervals.append((float(length), mean.low, mean.high))
            dashed = method != PLAIN
            if dashed and name == REFERENCE and title != next(iter(_families(results, task))):
                continue
            if points:
                label = f"{name} + {method}" if dashed else name
                spans = [] if dashed else intervals
                dashes = _DASHES[min(nth, len(_DASHES)) - 1] if dashed else None
                lines.append(Line(label, key, points, marker, "", spans, dashes))
    return Panel(
        lines,
        results.length,
        "test length (tokens, log2)" if task == RECALL else "test length (characters, log2)",
        "recalled" if quantity == RIGHT else unit(task),
        title + (f"; a guess is right in {1 / PAIRS:.0%}" if quantity == RIGHT else ""),
        log_x=True,
        log_y=False,
        as_percent=quantity == RIGHT,
        bands=False,
        ticks=[float(n) for n in results.tests],
    )
