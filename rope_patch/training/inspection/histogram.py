"""Histogram of documents' lengths in tokens, as a table of text and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rope_patch.utils import atomic_files
from rope_patch.utils.figure_file import write_figure
from rope_patch.utils.plot_style import PAPER, STYLE, require_matplotlib, require_plot_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 30  # characters of the table's longest bar
_BINS_PER_DOUBLING = 4  # of the picture
_WIDTH, _HEIGHT = 912, 560  # CSS pixels
_COLOURS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6")
_NAME_LENGTH = 24  # characters of a source in the legend
_REST = "the other sources"


class LengthBin(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        shortest: The shortest length of the bin, in tokens.
        longest: The longest length of the bin, in tokens.
        documents: Documents of these lengths.
        tokens: Tokens of these documents.
    """

    shortest: int
    longest: int
    documents: int
    tokens: int


def length_bins(lengths: Sequence[int]) -> list[LengthBin]:
    """Return a bin for each doubling of the length, from the shortest to the longest document.

    Documents without tokens have a bin of their own.
    """
    documents: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for length in lengths:
        exponent = length.bit_length() - 1  # -1 without tokens
        documents[exponent] = documents.get(exponent, 0) + 1
        tokens[exponent] = tokens.get(exponent, 0) + length
    if not documents:
        return []
    return [
        LengthBin(
            2**exponent if exponent >= 0 else 0,
            2 ** (exponent + 1) - 1 if exponent >= 0 else 0,
            documents.get(exponent, 0),
            tokens.get(exponent, 0),
        )
        for exponent in range(min(documents), max(documents) + 1)
    ]


def format_bins(bins: Sequence[LengthBin], marks: Mapping[str, int]) -> list[str]:
    """Return the table's lines.

    Args:
        bins: See `length_bins`.
        marks: Lengths in tokens to mark, by name.
    """
    total = sum(each.tokens for each in bins) or 1
    largest = max((each.tokens for each in bins), default=0) or 1
    width = max((len(f"{each.longest:,}") for each in bins), default=1)
    lines = [f"{'length in tokens':>{2 * width + 3}}  documents  of all tokens"]
    pending = sorted(marks.items(), key=lambda mark: mark[1])
    for each in bins:
        while pending and pending[0][1] < each.shortest:
            lines.append(_mark_line(width, *pending.pop(0)))
        inside = [name for name, length in pending if length <= each.longest]
        names = ", ".join(f"{name} {dict(pending)[name]:,}" for name in inside)
        pending = pending[len(inside) :]
        bar = "#" * math.ceil(_BAR * each.tokens / largest)
        span = f"{each.shortest:>{width},} – {each.longest:>{width},}"
        line = f"{span}  {each.documents:>9,}  {each.tokens / total:>13.1%}  "
        line += f"{bar:<{_BAR}}  <- {names}" if names else bar
        lines.append(line.rstrip())
    return lines + [_mark_line(width, *mark) for mark in pending]


def _mark_line(width: int, name: str, length: int) -> str:
    return f"{'':>{2 * width + 3}}  {'':>9}  {'':>13}  {'':<{_BAR}}  <- {name} {length:,}"


def write_length_plot(
    lengths: Mapping[str, Sequence[int]], marks: Mapping[str, int], path: str | os.PathLike[str]
) -> None:
    """Write the picture as .svg or .png; see `make_length_figure`."""
    require_plot(path)
    write_figure(make_length_figure(lengths, marks), path)


def require_plot(path: str | os.PathLike[str]) -> None:
    """Raise if the picture cannot be written.

    Raises:
        ValueError: The suffix is no picture's, or matplotlib or the folder is missing.
        OSError: The folder cannot be written.
    """
    require_plot_path(path)
    atomic_files.require_writable_file(path, "the picture", folder_exists=True)


def make_length_figure(lengths: Mapping[str, Sequence[int]], marks: Mapping[str, int]) -> Figure:
    """Return a figure: documents, and their tokens, by the logarithm of the length.

    Args:
        lengths: Each source's documents' lengths in tokens. Documents without tokens are left out.
        marks: Lengths in tokens to mark, by name.
    """
    require_matplotlib()
    import numpy
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = {name: numpy.array([n for n in each if n > 0]) for name, each in _grouped(lengths)}
    every = numpy.concatenate([*shown.values(), numpy.array(list(marks.values()))])
    first = math.floor(math.log2(every.min()) - 0.5)
    last = math.floor(math.log2(every.max()) + 1.5)
    exponents = numpy.arange(first * _BINS_PER_DOUBLING, last * _BINS_PER_DOUBLING + 1)
    edges = 2.0 ** (exponents / _BINS_PER_DOUBLING)
    total = sum(int(each.sum()) for each in shown.values()) or 1
    documents = {name: numpy.histogram(each, edges)[0] for name, each in shown.items()}
    tokens = {
        name: numpy.histogram(each, edges, weights=each / total * 100)[0]
        for name, each in shown.items()
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.1, right=0.95, top=0.84, bottom=0.1, hspace=0.14)
        _draw_bars(upper, edges, documents, "documents")
        _draw_bars(lower, edges, tokens, "of all tokens (%)")
        for axes in (upper, lower):
            axes.set_xscale("log", base=2)
            axes.set_xlim(edges[0], edges[-1])
            _draw_marks(axes, marks, named=axes is upper)
        upper.tick_params(labelbottom=False)
        step = max(1, math.ceil((last - first) / 12))
        ticks = [2**exponent for exponent in range(max(0, first), last + 1, step)]
        lower.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        lower.minorticks_off()
        lower.set_xlabel("length of a document (tokens)")
        upper.legend(loc="lower left", bbox_to_anchor=(0, 1.17), ncols=4, borderaxespad=0)
    return figure


def _grouped(lengths: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """Return the sources, those beyond the colours as one."""
    sources = list(lengths.items())
    if len(sources) <= len(_COLOURS):
        return sources
    rest = [length for _, each in sources[len(_COLOURS) :] for length in each]
    return [*sources[: len(_COLOURS)], (_REST, rest)]


def _draw_bars(axes: Axes, edges: Any, counts: Mapping[str, Any], label: str) -> None:
    below = 0 * edges[:-1]
    for (name, heights), key in zip(counts.items(), (*_COLOURS, "rest"), strict=False):
        # The leading space keeps labels that start with a _, which matplotlib would drop.
        style: Any = {
            "color": PAPER[key],
            "label": f" {_shortened(name)}",
            "align": "edge",
            "zorder": 3,
        }
        style |= {"edgecolor": PAPER["paper"], "linewidth": 0.6}
        axes.bar(edges[:-1], heights, edges[1:] - edges[:-1], below, **style)
        below = below + heights
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _shortened(name: str) -> str:
    """Return the end of a long name, as paths differ there."""
    return name if len(name) <= _NAME_LENGTH else "…" + name[1 - _NAME_LENGTH :]


def _draw_marks(axes: Axes, marks: Mapping[str, int], *, named: bool) -> None:
    """Draw the lengths as lines; their names are above the axes, each on a line of its own."""
    dashes: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
    for row, ((name, length), dash) in enumerate(zip(marks.items(), dashes, strict=False)):
        axes.axvline(length, color=PAPER["ink"], lw=1.4, ls=dash, zorder=4)
        if named:
            low, high = (math.log2(limit) for limit in axes.get_xlim())
            is_left = math.log2(length) < (low + 3 * high) / 4
            axes.annotate(
                f"{name} {length:,}",
                (length, 1),
                (-2 if is_left else 2, 4 + 16 * row),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                color=PAPER["ink"],
                ha="left" if is_left else "right",
                va="bottom",
            )
