"""A room's front: the names that others import from it, wherever in the room they stand.

Names are imported on first use (PEP 562), because many modules import torch and transformers, which
take seconds; and a module that only needs one name does not pay for its neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def front(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: The package's `__name__`.
        names: The modules below it with their names, separated by spaces.

    Raises:
        ValueError: Two modules give the same name.
    """
    module_of: dict[str, str] = {}
    for module, words in names.items():
        for name in words.split():
            if name in module_of:
                raise ValueError(
                    f"{package}.{name} stands in {module_of[name]} and in {module}: expected one"
                )
            module_of[name] = module

    def get_name(name: str) -> Any:
        """Import a name of the front."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        """List the names that are not imported yet, too."""
        return sorted({*vars(sys.modules[package]), *module_of})

    return sorted(module_of), get_name, list_names
