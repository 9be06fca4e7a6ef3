"""Plot of search_tiny.py's results: best so far against evaluations, a panel per case."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from search_tiny_tables import Case, best_after

from rope_patch.utils import atomic_files
from rope_patch.utils.figures import PAPER, STYLE

LOOK = {"curve": "m0", "longrope2": "m1", "longrope": "m2", "yarn-rcd": "m3", "ntk-rcd": "m4"}


def draw(path: Path, cases: dict[str, Case]) -> None:
    """Draw the best so far against evaluations, a panel per case."""
    from io import BytesIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(3, len(cases))
    lines = math.ceil(len(cases) / columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * columns, 3.6 * lines + 0.7), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        handles: dict[str, Any] = {}
        for axes, (title, case) in zip(panels, cases.items(), strict=False):
            handles |= _panel(axes, title, case)
        for axes in panels[len(cases) :]:
            axes.set_axis_off()
        for axes in panels[(lines - 1) * columns :]:
            axes.set_xlabel("evaluations")
        for axes in panels[::columns]:
            axes.set_ylabel("best so far (nats)")
        figure.legend(
            [*handles.values()], [*handles], loc="outside lower center", ncols=2 * columns
        )
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110, facecolor=PAPER["paper"])
    atomic_files.atomic_write(path, buffer.getvalue())


def _panel(axes: Any, title: str, case: Case) -> dict[str, Any]:
    from matplotlib.ticker import LogLocator

    handles = {}
    axes.set_facecolor(PAPER["paper"])
    for name, history in case["history"].items():
        points = [(n, best_after(history, n)) for n in range(1, len(history))]
        points = [(n, best) for n, best in points if best is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        look: Any = {"color": PAPER[LOOK[name]], "lw": 2, "drawstyle": "steps-post"}
        (handles[name],) = axes.plot(x, y, **look)
        axes.plot(x[-1:], y[-1:], "o", color=PAPER[LOOK[name]], markersize=5)
    yarn = case["history"]["curve"][0]["fitness"]
    dashes: Any = {"color": PAPER["ink"], "lw": 1.3, "ls": (0, (4, 2)), "zorder": 1}
    handles["YaRN"] = axes.axhline(yarn, **dashes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1, 3, 10, 30, 100, 200], ["1", "3", "10", "30", "100", "200"])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{title} tokens", loc="left", fontsize="medium")
    return handles
