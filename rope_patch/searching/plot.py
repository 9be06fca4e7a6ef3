"""The picture of a search: its stretches beside PI, NTK and YaRN, and below the history."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.utils.figures import (
    PAPER,
    Canvas,
    canvas,
    legend_label,
    mark_critical_dimension,
    require_plot_path,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# CSS pixels: width and heights of the panels, and the space below and above their axes.
_WIDTH, _UPPER_HEIGHT, _LOWER_HEIGHT = 912, 460, 350
_SPACE_BELOW, _SPACE_ABOVE = 84, 42

# Reference methods: name, method, colour, marker, dashes.
_KNOWN_METHODS: list[tuple[str, str, str, str, Any]] = [
    ("PI", "linear", "plain", "v", (0, (1, 1.5))),
    ("NTK", "ntk", "m2", "^", (0, (5, 2))),
    ("YaRN", "yarn", "m1", "o", (0, (3, 1.2, 1, 1.2))),
]


def draw_search(
    path: str | os.PathLike[str],
    space: SearchSpace,
    history: Sequence[Mapping[str, Any]] = (),
    *,
    candidate: Candidate | None = None,
    title: str = "",
) -> None:
    """Draw a search, finished or not; the file is replaced atomically.

    In browsers an .svg follows the page's light or dark colours.

    Args:
        path: An .svg or .png file.
        space: The space that is searched.
        history: As `SearchResult.history`; the lower panel is left out if it is empty.
        candidate: The search's result; the best of the history so far unless given.
        title: The title, to which the target length is added.

    Raises:
        ValueError: Another kind of file, or matplotlib is not installed.
    """
    require_plot_path(path)
    write_figure(make_figure(space, history, candidate=candidate, title=title), path)


def make_figure(
    space: SearchSpace,
    history: Sequence[Mapping[str, Any]] = (),
    *,
    candidate: Candidate | None = None,
    title: str = "",
) -> Figure:
    """Return what `draw_search` draws as a matplotlib figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    best = candidate or best_of(history)
    with canvas(_WIDTH, _UPPER_HEIGHT + (_LOWER_HEIGHT if history else 0)) as page:
        upper = _add_panel(page, 0, _UPPER_HEIGHT)
        _draw_stretches(upper, space, best)
        target = f"{space.length:,} tokens (×{space.factor:g})"
        upper.set_title(
            f"{title}, at {target}" if title else target, loc="left", fontsize="medium", pad=10
        )
        if history:
            _draw_history(_add_panel(page, _UPPER_HEIGHT, _LOWER_HEIGHT), history)
    return page.figure


def best_of(history: Sequence[Mapping[str, Any]]) -> Candidate | None:
    """Return the best candidate of those that were scored on all samples, or None."""
    complete = [
        e for e in history if e.get("complete", True) and math.isfinite(float(e["fitness"]))
    ]
    if not complete:
        return None
    best = min(complete, key=lambda entry: float(entry["fitness"]))
    return Candidate(best["origin"], best["method"], dict(best["options"]))


def _add_panel(page: Canvas, top: float, height: float) -> Axes:
    high = height - _SPACE_BELOW - _SPACE_ABOVE
    axes = page.add_axes(84, top + _SPACE_ABOVE, _WIDTH - 108, high)
    axes.set_facecolor(PAPER["paper"])
    return axes


def _draw_stretches(axes: Axes, space: SearchSpace, best: Candidate | None) -> None:
    pairs = range(space.pairs)
    highest, lowest = space.factor, 1.0
    for name, method, colour, marker, dash in _KNOWN_METHODS:
        if method == "ntk" and space.pairs == 1:
            continue  # a larger base leaves the first pair as it is
        stretch = _plotted_stretch(Candidate(name, method), space)
        style: Any = {"color": PAPER[colour], "ls": dash, "lw": 1.4, "markersize": 4, "zorder": 3}
        axes.plot(pairs, stretch, marker=marker, label=legend_label(name), **style)
        highest = max(highest, *stretch)
    if best is not None:
        stretch = _plotted_stretch(best, space)
        factor = best.attention_factor(space)
        axes.plot(
            pairs,
            stretch,
            marker="s",
            color=PAPER["m0"],
            lw=4,
            markersize=7,
            zorder=2.5,  # thick and behind, so that coinciding curves stay visible
            label=legend_label(f"found ({best.origin}), attention factor {factor:.4g}"),
        )
        highest, lowest = max(highest, *stretch), min(lowest, *stretch)
    axes.set_yscale("log", base=2)
    axes.set_ylim(lowest / 1.12, highest * 1.3)
    axes.set_xlim(-0.6, space.pairs - 0.4)
    axes.yaxis.set_major_formatter("×{x:g}")
    axes.set_xlabel("pair, from the fastest")
    axes.set_ylabel("stretch of its wavelength")
    _mark_critical_dimension(axes, space)
    _add_legend(axes, _UPPER_HEIGHT)


def _plotted_stretch(candidate: Candidate, space: SearchSpace) -> list[float]:
    """Return stretches, the infinite ones of stopped pairs clipped to 8 times the factor."""
    return [min(stretch, 8 * space.factor) for stretch in candidate.stretch(space)]


def _add_legend(axes: Axes, height: float) -> None:
    """Put the legend below the axes, where it hides nothing."""
    anchor = (-0.01, -48 / (height - _SPACE_BELOW - _SPACE_ABOVE))
    style: Any = {"borderpad": 0, "handlelength": 2.4, "columnspacing": 1.4}
    axes.legend(loc="upper left", bbox_to_anchor=anchor, ncols=5, **style)


def _mark_critical_dimension(axes: Axes, space: SearchSpace) -> None:
    """Mark the first pair without a full rotation in training."""
    pair = math.ceil(space.geometry.pair_with_rotations(1) - 1e-9)
    if not 0 < pair < space.pairs:
        return
    mark_critical_dimension(axes, pair, on_left=pair > space.pairs * 0.7, at_top=False)


def _draw_history(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    points = [(int(e["number"]), float(e["fitness"]), e.get("complete", True)) for e in history]
    bests = [(int(e["number"]), float(e["best"])) for e in history]
    finite = [y for _, y, _ in points if math.isfinite(y)] or [0.0]
    bottom, top = _fitness_limits(finite, [y for _, y in bests if math.isfinite(y)])
    numbers = [x for x, _, _ in points]
    first, last = min(numbers), max(*numbers, min(numbers) + 9)  # room for at least ten
    margin = 0.02 * (last - first)
    axes.set_xlim(first - margin, last + margin)
    axes.set_ylim(bottom, top)
    yarn = next((float(e["fitness"]) for e in history if _is_default_yarn(e)), math.nan)
    if bottom <= yarn <= top:
        axes.axhline(yarn, color=PAPER["m1"], lw=1.4, ls=(0, (3, 1.2, 1, 1.2)), label=" YaRN")
    series = [
        ("measured whole", "o", "plain", [p for p in points if p[2] and p[1] <= top]),
        ("stopped early", "x", "plain", [p for p in points if not p[2] and p[1] <= top]),
    ]
    for label, marker, colour, entries in series:
        if entries:
            x, y = [p[0] for p in entries], [p[1] for p in entries]
            style: Any = {"color": PAPER[colour], "markersize": 4.5, "ls": "none", "zorder": 3}
            axes.plot(x, y, marker, label=legend_label(label), **style)
    if beyond_top := [x for x, y, _ in points if not y <= top]:
        edge = [top - 0.04 * (top - bottom)] * len(beyond_top)
        style = {"color": PAPER["m3"], "markersize": 6, "ls": "none", "zorder": 3}
        axes.plot(beyond_top, edge, "^", label=" worse, or failed", **style)
    best = [(x, y) for x, y in bests if math.isfinite(y)]
    if best:
        x, y = [x for x, _ in best], [y for _, y in best]
        style = {"color": PAPER["m0"], "lw": 2.4, "zorder": 4, "drawstyle": "steps-post"}
        axes.plot(
            x,
            y,
            "s-",
            label=" best so far",
            markevery=_improvement_indices(y),
            markersize=5,
            **style,
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.yaxis.get_major_formatter().set_useOffset(False)  # type: ignore[attr-defined]
    axes.set_title("the search, smaller is better", loc="left", fontsize="medium", pad=10)
    axes.set_xlabel("evaluation")
    axes.set_ylabel("fitness (nats)")
    _add_legend(axes, _LOWER_HEIGHT)


def _is_default_yarn(entry: Mapping[str, Any]) -> bool:
    """Return whether an evaluation is a complete one of YaRN with its default options."""
    complete = bool(entry.get("complete", True))
    return complete and entry["method"] == "yarn" and not entry["options"]


def _improvement_indices(best: list[float]) -> list[int]:
    return [i for i, y in enumerate(best) if i == 0 or y < best[i - 1]]


def _fitness_limits(values: list[float], best: list[float]) -> tuple[float, float]:
    """Return limits that show the differences of good candidates; bad ones may lie outside."""
    ordered = sorted(values)
    low = min(ordered[0], *best) if best else ordered[0]
    middle = ordered[len(ordered) // 2]
    high = min(ordered[-1], low + 3 * (middle - low)) if middle > low else ordered[-1]
    high = max(high, *best) if best else high
    if high == low:
        return low - 0.05 * max(low, 1.0), low + 0.05 * max(low, 1.0)
    return low - 0.08 * (high - low), high + 0.12 * (high - low)
