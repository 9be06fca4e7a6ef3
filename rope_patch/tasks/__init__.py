"""The package's lm-eval tasks: one YAML file each, and the builders that they name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from rope_patch.utils.errors import Refused, did_you_mean
from rope_patch.utils.installation import resource_folder
from rope_patch.utils.lazy_exports import export_lazily

FOLDER = resource_folder("eval/tasks")  # what lm-eval takes as --include_path

__all__ = [
    "CHOICE",
    "FOLDER",
    "LIKELIHOOD",
    "config",
    "expand",
    "groups",
    "names",
    "own_files",
    "question_of",
    "read_config",
    "require_own",
    "text_of",
    "unknown_task",
]

export_lazily(
    __name__,
    {
        "samples": "TooShort",
        "scoring": "all_answers any_answer first_number",
        "settled": "settled_part stop_rule",
        "texts": "documents read_text",
    },
)

LIKELIHOOD = "_ll"  # ends a task's name if the likelihood of its answer is the score
CHOICE = "_mc"  # ends a task's name if the likeliest of several answers is chosen


def names() -> list[str]:
    """Return the names of the tasks."""
    return sorted(name for name, config in _all_configs().items() if "group" not in config)


def own_files() -> dict[str, Path]:
    """Return the files of this package's tasks and groups by name; opens none of them."""
    return {path.stem: path for path in sorted(FOLDER.glob("rp_*.yaml"))}


def require_own(name: str) -> None:
    """Raise if a name begins as those of this package's tasks do, and is none of them.

    Imports nothing that takes time, so that slips are answered at once.

    Raises:
        ValueError: There is no such task; names the closest one.
    """
    known = [*own_files(), "rp_short"]
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


def question_of(name: str) -> str:
    """Return what a task asks, however the answer is scored."""
    return name.removesuffix(LIKELIHOOD).removesuffix(CHOICE)


def text_of(name: str) -> str:
    """Return the name that a task's texts are drawn under; tasks of one name ask about the same."""
    from rope_patch.tasks.samples import TEXTS_OF

    question = question_of(name)
    return TEXTS_OF.get(question, question)


def groups() -> dict[str, list[str]]:
    """Return the names of the groups, with the tasks of each."""
    return {name: config["task"] for name, config in _all_configs().items() if "group" in config}


def expand(chosen: list[str]) -> list[str]:
    """Return tasks with groups replaced by theirs; each once, in order."""
    members = groups()
    return list(dict.fromkeys(task for name in chosen for task in members.get(name, [name])))


def config(name: str) -> dict[str, Any]:
    """Return a task's config for lm-eval, with its `!function` references resolved.

    lm-eval reads the same files with `--include_path`; reading them here too lets one file serve
    for one task a length, without a table of all tasks that lm-eval has.
    """
    return read_config(FOLDER / f"{name}.yaml")


@lru_cache(maxsize=1)
def _all_configs() -> dict[str, dict[str, Any]]:
    return {path.stem: read_config(path) for path in sorted(FOLDER.glob("*.yaml"))}


def read_config(path: Path) -> dict[str, Any]:
    """Return a task's config, with what it includes and its `!function` references resolved."""
    own = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    included = own.pop("include", None)
    return read_config(path.parent / included) | own if included else own


class _Loader(yaml.SafeLoader):
    """YAML with lm-eval's `!function module.name`."""


def _construct_function(loader: _Loader, node: yaml.Node) -> Any:
    module, name = str(node.value).rsplit(".", 1)
    return getattr(import_module(module), name)


_Loader.add_constructor("!function", _construct_function)
