"""Write matplotlib figures as files that are the same for the same results."""

from __future__ import annotations

import base64
import os
import re
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.utils import atomic_files
from rope_patch.utils.plot_style import PALETTE, PAPER, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Add a rule for each colour of the palette, so that it is another one on a dark screen.

    The colours themselves stay in the drawing, because other viewers than browsers know no rules.
    """
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
