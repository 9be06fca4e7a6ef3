"""Parsing of a recipe's values: YAML and the command line pass the same checks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser


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
