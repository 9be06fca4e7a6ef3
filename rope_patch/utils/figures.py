"""Give all figures one style, and write them as files that are the same for the same results.

matplotlib is imported where a figure is drawn, so that a path can be checked without it.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.utils import atomic_files
from rope_patch.utils.installation import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name: (on paper, on a dark screen). m0 to m3 after Okabe and Ito; m4 to m7 were chosen by search:
# as far from the others as can be, seen with and without red, green or blue cones, and of much the
# same hue on either background.
PALETTE = {
    "ink": ("#1c2128", "#e6e8eb"),
    "muted": ("#5c6570", "#a0a8b2"),
    "line": ("#d9dde2", "#363c45"),
    "paper": ("#fefefe", "#15181d"),
    "shade": ("#f4f1ea", "#221f1a"),
    "plain": ("#6b7480", "#98a2ae"),
    "rest": ("#b3bac3", "#59626d"),
    "control": ("#1d222a", "#dfe3e8"),
    "m0": ("#0068b0", "#56b4f5"),
    "m1": ("#d05a00", "#ff9447"),
    "m2": ("#00845f", "#3fcf9f"),
    "m3": ("#b0508f", "#ec9fce"),
    "m4": ("#0717ea", "#906785"),
    "m5": ("#9b0712", "#fc1144"),
    "m6": ("#7266f6", "#c101f4"),
    "m7": ("#760154", "#b736b3"),
}
PAPER = {name: colours[0] for name, colours in PALETTE.items()}


@dataclass(frozen=True)
class Look:
    """How one of several lines is drawn, wherever it is drawn.

    Attributes:
        colour: The colour's name in `PALETTE`.
        marker: matplotlib's marker.
        is_hollow: Whether the marker is an outline.
        dashes: Points on and off; none of a solid line.
    """

    colour: str
    marker: str
    is_hollow: bool = False
    dashes: tuple[float, ...] = ()


# What the others are compared with: its colour is no other line's, nor is its marker.
BASE_LOOK = Look("m1", "o")
# The one that is dim on a dark page comes late.
_LINE_COLOURS = ("m0", "m2", "m3", "m5", "m6", "m4", "m7")
_MARKERS = ("s", "D", "v", "^", "P", "X", "<", ">", "h", "p", "*")
# Dots alone are the control's.
_DASHES = ((), (6.0, 2.0), (2.5, 1.5), (7.0, 1.5, 1.5, 1.5))


def line_look(number: int) -> Look:
    """Return the look of the line with this number, from 0 on.

    Twenty-two have a marker each. The colours repeat after seven, with other dashes; the whole look
    repeats after 308.
    """
    row, column = divmod(number, len(_LINE_COLOURS))
    turn, at = divmod(number, len(_MARKERS))
    return Look(_LINE_COLOURS[column], _MARKERS[at], turn % 2 == 1, _DASHES[row % len(_DASHES)])


_DOTS_PER_INCH = 72  # so that one point of matplotlib is one CSS pixel
FONT = 12.5  # points

STYLE: Any = {
    "font.size": FONT,
    "text.color": PAPER["ink"],
    "text.parse_math": False,  # a model's name may hold dollars
    "axes.edgecolor": PAPER["line"],
    "axes.labelcolor": PAPER["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": PAPER["line"],
    "xtick.color": PAPER["line"],
    "ytick.color": PAPER["line"],
    "xtick.labelcolor": PAPER["muted"],
    "ytick.labelcolor": PAPER["muted"],
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rope_patch",  # the same results make the same file
}

_SUFFIXES = (".svg", ".png")


def require_plot_suffix(path: str | os.PathLike[str]) -> None:
    """Raise if a path has no suffix of a plot.

    Raises:
        ValueError: The suffix is another one.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture is an .svg or a .png file, got {str(path)!r}")


def require_plot_path(path: str | os.PathLike[str]) -> None:
    """Raise if no plot can be written to a path.

    Raises:
        ValueError: The suffix is not a plot's, or matplotlib is not installed.
    """
    require_plot_suffix(path)
    require_matplotlib()


def require_matplotlib() -> None:
    """Raise ValueError unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which pictures need: {install_hint('eval')}"
        ) from error


@dataclass(frozen=True)
class Canvas:
    """A figure that is laid out in CSS pixels, from its upper left corner.

    Attributes:
        figure: The figure.
        width: Its width in pixels.
        height: Its height in pixels.
    """

    figure: Figure
    width: float
    height: float

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes whose frame has this corner and size, in pixels."""
        x, y = self.share(left, top + height)
        return self.figure.add_axes((x, y, width / self.width, height / self.height))

    def share(self, x: float, y: float) -> tuple[float, float]:
        """Return a place in pixels as matplotlib has it: in shares, from the lower left corner."""
        return x / self.width, 1 - y / self.height


@contextmanager
def canvas(width: float, height: float) -> Iterator[Canvas]:
    """Give a new figure, and the style of all figures while it is drawn.

    Args:
        width: In CSS pixels.
        height: The same.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        size = (width / _DOTS_PER_INCH, height / _DOTS_PER_INCH)
        yield Canvas(Figure(figsize=size), width, height)


def legend_label(text: str) -> str:
    """Return a label with a space in front: matplotlib drops those that start with a _."""
    return f" {text}"


_IMAGE = re.compile(r"data:image/png;base64,([^\"']+)")


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure atomically, as SVG or PNG by the path's suffix.

    An SVG follows a dark system where its viewer tells it, as browsers do, and is light elsewhere.
    """
    file = Path(path)
    kind = file.suffix.lower()[1:]
    content = render_figure(figure, kind)
    atomic_files.atomic_write(file, content)


def render_figure(figure: Figure, kind: str) -> bytes:
    """Return a figure as a file's bytes; kind is "svg" or "png"."""
    from matplotlib import rc_context

    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    buffer = BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=144, facecolor=PAPER["paper"], metadata=metadata)
    if kind != "svg":
        return buffer.getvalue()
    svg = _IMAGE.sub(lambda image: _with_palette(image[1]), buffer.getvalue().decode())
    return _with_dark_colours(svg).encode()


def _with_dark_colours(svg: str) -> str:
    """Add a rule for each colour of the palette, to replace the colour on a dark screen."""
    # The colours themselves stay in the drawing, because other viewers than browsers know no rules.
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in [*PALETTE.values(), ("#ffffff", PALETTE["paper"][1])]
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    ]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    end = svg.index(">", svg.index("<svg")) + 1
    return svg[:end] + style + svg[end:]


def _with_palette(encoded: str) -> str:
    """Return an embedded image of few colours as a smaller file of the same pixels."""
    import numpy
    from PIL import Image

    whole = Image.open(BytesIO(base64.b64decode(encoded))).convert("RGBA")
    pixels = numpy.frombuffer(whole.tobytes(), dtype=numpy.uint32)
    colours, numbers = numpy.unique(pixels, return_inverse=True)
    if len(colours) > 256:
        return f"data:image/png;base64,{encoded}"
    small = Image.frombytes("P", whole.size, numbers.astype(numpy.uint8).tobytes())
    small.putpalette(colours.tobytes(), rawmode="RGBA")
    file = BytesIO()
    small.save(file, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def mark_critical_dimension(axes: Axes, pair: int, *, on_left: bool, at_top: bool) -> None:
    """Draw a line before the first pair without a full rotation in training, and name it.

    Args:
        axes: Axes with a place for each pair.
        pair: The pair.
        on_left: Whether the text stands to the left of the line.
        at_top: Whether the text stands at the top.
    """
    axes.axvline(pair - 0.5, color=PAPER["m3"], lw=1.6, ls=(0, (5, 2)), zorder=2)
    axes.annotate(
        f"critical dimension: pair {pair}\nand later ones never turned once",
        (pair - 0.5, 1 if at_top else 0),
        (-6 if on_left else 6, -6 if at_top else 6),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        color=PAPER["m3"],
        ha="right" if on_left else "left",
        va="top" if at_top else "bottom",
    )
