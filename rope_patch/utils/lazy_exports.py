"""Lazy exports: the names that others import from a room's front, wherever in the room they stand.

Names are imported on first use (PEP 562), because many modules import torch and transformers, which
take seconds; and a module that only needs one name does not pay for its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def export_lazily(package: str, names: Mapping[str, str]) -> None:
    """Give names of a package's modules as the package's own, also in its `__all__` and `dir`.

    The package calls this behind what it defines itself. Names that are not in the table go to its
    own `__getattr__`, if it has one. Type checkers see nothing of this: with a `__getattr__` in
    sight they would accept any name.

    Args:
        package: The package's `__name__`.
        names: The modules below it with their names, separated by spaces.

    Raises:
        ValueError: The package or another of its modules gives the same name.
    """
    module = sys.modules[package]
    own_getattr = vars(module).get("__getattr__")
    module_of: dict[str, str] = {}
    for source, words in names.items():
        for name in words.split():
            if name in module_of or name in vars(module):
                raise ValueError(
                    f"{package}.{name} of {source} stands in {module_of.get(name, package)}, too: "
                    "expected one"
                )
            module_of[name] = source

    def get_name(name: str) -> Any:
        """Import a name of the front."""
        if name in module_of:
            value = getattr(import_module(f"{package}.{module_of[name]}"), name)
            setattr(module, name, value)
            return value
        if own_getattr is not None:
            return own_getattr(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        """List the names that are not imported yet, too."""
        return sorted({*vars(module), *module_of})

    given = [*getattr(module, "__all__", ()), *module_of]
    vars(module).update(__all__=[*dict.fromkeys(given)], __getattr__=get_name, __dir__=list_names)
