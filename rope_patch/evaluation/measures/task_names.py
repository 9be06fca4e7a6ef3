"""Names of tasks, which are checked without what takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rope_patch import tasks
from rope_patch.utils.errors import Refused, did_you_mean


def own_task_files() -> dict[str, Path]:
    """Return the files of this package's tasks and groups by name; opens none of them."""
    return {path.stem: path for path in sorted(tasks.FOLDER.glob("rp_*.yaml"))}


def require_own_task(name: str) -> None:
    """Raise if a name begins as those of this package's tasks do, and is none of them.

    Imports nothing that takes time, so that slips are answered at once.

    Raises:
        ValueError: There is no such task; names the closest one.
    """
    known = [*own_task_files(), "rp_short"]
    if name.startswith("rp_") and name not in known and not name.startswith("rp_short_"):
        raise unknown_task(name, known)


def unknown_task(name: str, known: Iterable[str]) -> Refused:
    """Return the error for a name that no task has.

    Args:
        name: The name.
        known: Names of tasks, of which the closest is named.
    """
    return Refused(
        f"unknown task {name!r}{did_you_mean(name, known, 0.55)}; expected one that "
        "`rope-patch tasks` lists, perplexity, key_tokens, sliding, speed, rp_short, or a task of "
        "lm-eval"
    )
