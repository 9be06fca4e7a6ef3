"""Pictures: one drawing as PNG, to attach elsewhere, and as SVG that follows a page's colours.

Lengths are in CSS pixels throughout: at 72 dots per inch one point of matplotlib is one pixel.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from matplotlib import rc_context
from matplotlib.figure import Figure

from rope_patch.utils.plot_style import PAPER, STYLE

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
