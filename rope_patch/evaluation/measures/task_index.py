"""TaskIndex: the tasks that lm-eval knows, its own and those of users' folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rope_patch import tasks
from rope_patch.utils.errors import describe_error, did_you_mean

# Tasks that are made at a length, by lm-eval's folder, and how their metadata spells it. RULER puts
# the samples of all lengths one after another, so that a limit takes the first length's alone;
# asked for one length at a time, it gives each its share.
_LENGTH_SPELLING: dict[str, Callable[[int], Any]] = {
    "ruler": lambda length: [length],
    "babilong": lambda length: f"{length // 1024}k",
}
_LENGTH_KEYS = ("length", "max_seq_lengths")  # of a user's metadata; the first is our tasks' own


class TaskIndex:
    """The tasks, groups and tags of lm-eval and of users' folders.

    Args:
        folders: Folders of YAML files, as lm-eval's `--include_path` takes them. A task there goes
            before one of lm-eval's with the same name.

    Raises:
        ValueError: A folder that is missing, empty or not readable as tasks, or the same name in
            two of them.
    """

    def __init__(self, folders: Sequence[str] = ()) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.own: dict[str, Any] = {}
        self.roots: dict[str, Path] = {}
        for folder in self.folders:
            for name, entry in _read_folder(folder).items():
                if name in self.own:
                    raise ValueError(
                        f"--include-path: {self.roots[name]} and {folder} both have a task "
                        f"{name!r}; rename one of them"
                    )
                self.own[name], self.roots[name] = entry, folder

    def entry(self, name: str) -> Any:
        """Return lm-eval's record of a task, group or tag.

        Raises:
            ValueError: There is none of that name.
        """
        entry = self.own.get(name) or _lm_eval_records().get(name)
        if entry is None and name in {*tasks.names(), *tasks.groups()}:
            raise ValueError(
                f"{name!r} is a task of this package: name it in --tasks, not in a group of yours"
            )
        if entry is None:
            hint = did_you_mean(name, [*self.own, *_lm_eval_records()])
            raise ValueError(
                f"neither we nor lm-eval have a task {name!r}{hint}; `lm-eval ls tasks` lists "
                "lm-eval's, --include-path FOLDER adds yours"
            )
        return entry

    def members(self, name: str) -> list[str]:
        """Return the tasks of a group or tag, or the task itself.

        A group that changes the settings of its members is returned as it is.
        """
        entry = self.entry(name)
        below = (entry.cfg or {}).get("task") if entry.yaml_path else sorted(entry.tags)
        if below is None or isinstance(below, str) or not all(isinstance(m, str) for m in below):
            return [name]
        return [task for member in below for task in self.members(member)]

    def folder(self, name: str) -> Path:
        """Return the folder of a task's YAML file, or of the tasks of a group or tag."""
        entry = self.entry(name)
        if entry.yaml_path is None:  # a tag
            return self.folder(min(entry.tags))
        return Path(entry.yaml_path).parent

    def accepts_length(self, name: str) -> bool:
        """Return whether a task, or those of a group or tag of lm-eval, are made at a given length.

        A user's task is if the metadata of its YAML file have the key `length` or
        `max_seq_lengths`.

        Raises:
            ValueError: There is no such task.
        """
        if name in self.own:
            return _length_key(self.own[name]) is not None
        return self.folder(name).name in _LENGTH_SPELLING

    def length_metadata(self, name: str, length: int) -> dict[str, Any]:
        """Return the metadata with which such a task is made at a length, in tokens."""
        if name not in self.own:
            return {"max_seq_lengths": _LENGTH_SPELLING[self.folder(name).name](length)}
        key = _length_key(self.own[name])
        assert key is not None
        default = self.own[name].cfg["metadata"][key]
        return {key: [length] if isinstance(default, list) else length}


@lru_cache(maxsize=1)
def _lm_eval_records() -> dict[str, Any]:
    """Return lm-eval's records of its own tasks, which takes seconds."""
    from lm_eval.tasks import TaskManager

    records: dict[str, Any] = TaskManager().task_index
    return records


def _length_key(entry: Any) -> str | None:
    metadata = (entry.cfg or {}).get("metadata")
    keys = metadata if isinstance(metadata, dict) else {}
    return next((key for key in _LENGTH_KEYS if key in keys), None)


def _read_folder(folder: Path) -> dict[str, Any]:
    """Return lm-eval's records of a user's tasks by name; lm-eval itself skips broken files."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"--include-path: {folder} is {what}, expected a folder with YAML files of tasks as "
            "lm-eval reads them"
        )
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            raise ValueError(
                f"--include-path: {path} cannot be read as a task of lm-eval: "
                f"{describe_error(error)}"
            ) from error
    manager = TaskManager(include_path=folder, include_defaults=False)
    records: dict[str, Any] = manager.task_index
    if not records:
        raise ValueError(
            f"--include-path: {folder} has no task, expected YAML files with the key `task` or "
            "`group`"
        )
    return records
