"""Style of all plots and checks of their paths, without importing matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Name: (on paper, on a dark screen). After Okabe and Ito, so colour-blind readers tell them apart.
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
    "m4": ("#a87900", "#e9bd45"),
    "m5": ("#3a3fa8", "#a3a8ff"),
    "m6": ("#7b4a2b", "#cda07c"),
    "m7": ("#5d6b10", "#bccb58"),
}
PAPER = {name: colours[0] for name, colours in PALETTE.items()}

FONT = 12.5  # points; at 72 dots per inch one point is one CSS pixel

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
            f"{error.name} is not installed, which pictures need: pip install 'rope-patch[eval]'"
        ) from error
