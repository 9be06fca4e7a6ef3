"""Write matplotlib figures as files that are the same for the same results."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.utils import atomic_files
from rope_patch.utils.plot_style import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure atomically, as SVG or PNG by the path's suffix."""
    from matplotlib import rc_context

    file = Path(path)
    kind = file.suffix.lower()[1:]
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    buffer = BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=144, facecolor="white", metadata=metadata)
    atomic_files.atomic_write(file, buffer.getvalue())
