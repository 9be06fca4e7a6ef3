"""The package's lm-eval tasks: one YAML each, and the builders that they name."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from typing import Any

import yaml

_FOLDER = files("rope_patch.eval.tasks")


def names() -> list[str]:
    """Names of the tasks."""
    found = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def config(name: str) -> dict[str, Any]:
    """A task's config with its `!function` references resolved, ready for lm-eval as a dict.

    lm-eval reads the same files with `--include_path`; reading them here too lets one file serve
    for one task a length, without a table of all tasks that lm-eval has.
    """
    with (_FOLDER / f"{name}.yaml").open(encoding="utf-8") as stream:
        return yaml.load(stream, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """YAML with lm-eval's `!function module.name`."""


def _function(_: yaml.Loader, node: yaml.Node) -> Any:
    module, name = str(node.value).rsplit(".", 1)
    return getattr(import_module(f"rope_patch.eval.tasks.{module}"), name)


_Loader.add_constructor("!function", _function)
