"""Plot of a diagnosis: each pair's wavelength against the lengths, before and after."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from rope_patch.diagnosing.pairs import PairTable
from rope_patch.utils import atomic_files
from rope_patch.utils.figure_file import write_figure
from rope_patch.utils.plot_style import (
    PAPER,
    STYLE,
    require_matplotlib,
    require_plot_path,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rope_patch.diagnosing.diagnosis import Diagnosis

_WIDTH, _HEIGHT = 912, 430  # CSS pixels per panel


def write_plot(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write a plot with a panel per layer type; see `Diagnosis.plot`."""
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)
    write_figure(make_figure(diagnosis), path)


def make_figure(diagnosis: Diagnosis) -> Figure:
    """Return the plot as a figure; see `Diagnosis.figure`."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rotations = list(diagnosis.rotations.items())
    with rc_context(STYLE):
        total = _HEIGHT * len(rotations)
        figure = Figure(figsize=(_WIDTH / 72, total / 72))
        for i, (kind, rotation) in enumerate(rotations):
            bottom = total - _HEIGHT * (i + 1) + 54
            box = (104 / _WIDTH, bottom / total, (_WIDTH - 122) / _WIDTH, (_HEIGHT - 92) / total)
            _draw_panel(figure.add_axes(box), diagnosis, kind, rotation)
    return figure


def _draw_panel(
    axes: Axes, diagnosis: Diagnosis, layer_type: str | None, rotation: PairTable
) -> None:
    trained, target = rotation.geometry.trained_length, diagnosis.length
    pairs = [pair for pair in rotation.pairs if math.isfinite(pair.wavelength)]
    before = [(pair.pair, pair.wavelength) for pair in pairs]
    after = [(pair.pair, pair.wavelength * pair.stretch) for pair in pairs]
    finite = [y for _, y in before + after if math.isfinite(y)]
    changed = before != after
    axes.set_yscale("log")
    low, high = min(finite) / 1.6, max(*finite, target, trained) * 3
    axes.set_ylim(low, high)
    axes.set_xlim(-0.6, len(rotation.pairs) - 0.4)
    _draw_wavelengths(axes, before, "plain", "o", "before" if changed else "as it is")
    if changed:
        _draw_wavelengths(axes, after, "m0", "s", f"{diagnosis.method}")
        stopped = [x for x, y in after if not math.isfinite(y)]
        if stopped:
            style: Any = {"color": PAPER["m0"], "markersize": 8}
            axes.plot(stopped, [high / 1.25] * len(stopped), "^", label=" no longer turns", **style)
    beyond = [pair.pair for pair in pairs if pair.extrapolates]
    if beyond:
        place = dict(after if changed else before)
        rings: Any = {"mfc": "none", "mec": PAPER["m1"], "mew": 2.2, "markersize": 11}
        ends = [min(place[pair], high / 1.25) for pair in beyond]
        axes.plot(beyond, ends, "o", label=" beyond the angles of training", **rings)
    _draw_lengths(axes, trained, target, low)
    critical = rotation.critical_dimension
    if critical < len(rotation.pairs):
        axes.axvline(critical - 0.5, color=PAPER["m3"], lw=1.6, ls=(0, (5, 2)), zorder=2)
        on_left = critical > len(rotation.pairs) / 2
        axes.annotate(
            f"critical dimension: pair {critical}\nand later ones never turned once",
            (critical - 0.5, 1),
            (-6 if on_left else 6, -6),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            color=PAPER["m3"],
            ha="right" if on_left else "left",
            va="top",
        )
    name = diagnosis.model_type + (f", {layer_type.replace('_', ' ')}" if layer_type else "")
    title = f"{name}: {diagnosis.method}, at {target:,} tokens" + (
        f", attention factor {rotation.attention_factor:.4g}" if changed else ""
    )
    axes.set_title(title, loc="left", fontsize="medium", pad=10)
    axes.set_xlabel("pair, from the fastest")
    axes.set_ylabel("wavelength (tokens per turn)")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")


def _draw_wavelengths(
    axes: Axes, points: list[tuple[int, float]], key: str, marker: str, label: str
) -> None:
    x = [x for x, _ in points]
    y = [y if math.isfinite(y) else math.nan for _, y in points]
    style: Any = {"color": PAPER[key], "lw": 1.5, "markersize": 4.5, "zorder": 3}
    # The leading space keeps labels that start with a _, which matplotlib would drop.
    axes.plot(x, y, marker=marker, label=" " + label, **style)


def _draw_lengths(axes: Axes, trained: int, target: int, low: float) -> None:
    """Draw the lengths; pairs with wavelengths below the trained one completed a rotation."""
    axes.axhspan(low, trained, color=PAPER["shade"], lw=0, zorder=0)
    lines: list[tuple[int, str, str, Any]] = [
        (trained, f"trained on {trained:,} tokens", "muted", "-")
    ]
    if target > trained:
        lines.append((target, f"target {target:,} tokens", "m1", (0, (1, 1.5))))
    for at, text, key, dash in lines:
        axes.axhline(at, color=PAPER[key], lw=1.4, ls=dash, zorder=2)
        above = at == max(trained, target)
        axes.annotate(
            text,
            (0, at),
            (6, 4 if above else -4),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color=PAPER[key],
            ha="left",
            va="bottom" if above else "top",
        )
