"""Ordinary short tasks: what a method for long contexts costs at short ones.

Multiple choice by likelihood, for lm-eval, built offline from the package's own tables, templates
and novels. They resemble known benchmarks and are none of them: scores compare between methods on
one model, not with published numbers.
"""

from __future__ import annotations

from typing import Any

from rope_patch import tasks

GROUP = "rp_short"
FOLDER = tasks.FOLDER / "short"


def names() -> list[str]:
    """Return the names of the short tasks."""
    return list(config(GROUP)["task"])


def config(name: str) -> dict[str, Any]:
    """Return the config of a task or of the group for lm-eval, `!function` references resolved.

    Raises:
        ValueError: There is no such short task.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join([GROUP, *names()])
        raise ValueError(f"no short task {name!r}: expected one of {known}")
    return tasks.read_config(path)
