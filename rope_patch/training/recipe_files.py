"""Recipes and launch files by name, and the parser of a recipe's values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser

from rope_patch.utils.errors import did_you_mean
from rope_patch.utils.installation import resource_folder

_FOLDER = resource_folder("recipes")
_CHECKOUT = Path("recipes", "configs")  # recipes' path in a checkout


def recipes() -> dict[str, Path]:
    """Return the recipes' files by name."""
    return _files("configs")


def launches() -> dict[str, Path]:
    """Return the files for `accelerate launch --config_file` by name."""
    return _files("accelerate")


def summary(path: Path) -> str:
    """Return the first sentence of a file's heading comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heading = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in heading)
    return text.partition(". ")[0]


def read_file(name: str) -> str:
    """Return the text of a recipe or of a launch file.

    Raises:
        ValueError: The package has no such file.
    """
    files = recipes() | launches()
    name = name.removesuffix(".yaml")
    if name not in files:
        raise ValueError(
            f"no recipe {name}{did_you_mean(name, files)}; there are {', '.join(files)}"
        )
    return files[name].read_text(encoding="utf-8")


def find_recipe(path: Path) -> Path:
    """Return the recipe of `--config`: a file, or a recipe of the package.

    The package's `yarn_64k` also goes by `yarn_64k.yaml` and `recipes/configs/yarn_64k.yaml`.

    Raises:
        ValueError: There is no such file, and no such recipe in the package.
    """
    if path.is_file():
        return path
    if path.parent in (Path(), _CHECKOUT):
        name, paths = path.name.removesuffix(".yaml"), recipes()
        if name in paths:
            return paths[name]
        raise ValueError(
            f"no recipe {path}{did_you_mean(name, paths)}: no such file, and the package has "
            f"{', '.join(paths)}"
        )
    neighbours = sorted(p.name for p in path.parent.glob("*.yaml"))
    raise ValueError(
        f"no recipe {path}" + (f"; {path.parent} has {', '.join(neighbours)}" if neighbours else "")
    )


def find_launch(path: Path) -> Path:
    """Return a launch file by its path, or by its name in the package.

    Raises:
        ValueError: There is no such file, and no such launch file in the package.
    """
    if path.is_file():
        return path
    name, paths = path.name.removesuffix(".yaml"), launches()
    if path.parent == Path() and name in paths:
        return paths[name]
    raise ValueError(
        f"no launch file {path}{did_you_mean(name, paths)}: no such file, and the package has "
        f"{', '.join(paths)}"
    )


def _files(folder: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted((_FOLDER / folder).glob("*.yaml"))}


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors that name the key."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of leaving the program."""
        message = re.sub(r"^argument --(\w+)(/--[\w-]+)?", r"\1", message)
        raise ValueError(f"{message}; `rope-patch finetune --keys` lists all keys")


class RecipeParser(HfArgumentParser, Parser):
    """A parser of a recipe's keys.

    Args:
        kinds: The dataclasses with the keys.
    """

    def __init__(self, kinds: Sequence[Any]) -> None:
        self._kinds = kinds
        super().__init__(kinds, add_help=False, allow_abbrev=False)

    def coerce(self, key: str, value: Any) -> Any:
        """Return a YAML value in its key's shape: a single value, a list, or a mapping.

        Raises:
            ValueError: The value has another shape, or a list item has the wrong type.
        """
        action = next(action for action in self._actions if action.dest == key)
        if action.nargs == "+" and value is not None:
            items, item_type = value if isinstance(value, list) else [value], action.type or str
            try:
                return [item_type(part) for part in items]  # type: ignore[operator]
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{key} takes a list of {_type_name(item_type)}s, got {value!r}"
                ) from error
        shape = type(value)
        if shape in (dict, list, type(None)) and shape not in self._accepted_types(key):
            raise ValueError(f"{key} takes one {_type_name(action.type)}, got {value!r}")
        return value

    def set_recipe(self, recipe: dict[str, Any]) -> None:
        """Make a recipe's values the defaults, which the command line overrides."""
        self.set_defaults(**{key: _to_cli_string(value) for key, value in recipe.items()})

    def _accepted_types(self, key: str) -> set[Any]:
        """Return the types that a key accepts."""
        if key == "options":
            return {str, dict, type(None)}
        hint = next(hints[key] for kind in self._kinds if key in (hints := get_type_hints(kind)))
        return {get_origin(part) or part for part in (hint, *get_args(hint))}


def with_underscores(word: str) -> str:
    """Return a word of the command line with a key's dashes as underscores."""
    key, equals, value = word.partition("=")
    if not key.startswith("--"):
        return word
    return key.replace("-", "_").replace("__", "--", 1) + equals + value


def _type_name(type_: Any) -> str:
    return {"str": "text", "string_to_bool": "bool"}.get(type_.__name__, type_.__name__)


def _to_cli_string(value: Any) -> Any:
    """Return a YAML value as a command-line string, so that both pass the same checks."""
    return str(value) if isinstance(value, bool | int | float) else value
