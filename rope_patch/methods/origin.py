"""Load methods from a user's file or module, and say where a method that is not ours comes from."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rope_patch.methods.base import Method
from rope_patch.methods.registry import is_outside, outside_methods
from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused
from rope_patch.utils.plugins import import_plugin, pass_on


@dataclass(frozen=True)
class Origin:
    """Where a method comes from.

    Attributes:
        package: The installed package, or None.
        version: The package's version, or None.
        file: The file's name without its folder, or None for what was typed into a session.
        digest: The first digits of the file's SHA-256, or None.
    """

    package: str | None = None
    version: str | None = None
    file: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        if self.package is not None:
            return f"the package {self.package} {self.version}"
        return f"the file {self.file}" if self.file else "an interactive session"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data."""
        return asdict(self)


def origin_of(method_class: type[Method]) -> Origin | None:
    """Return the origin of a method, or None for ours."""
    if not is_outside(method_class):
        return None
    package, version = _package_of(method_class.__module__.partition(".")[0])
    path = getattr(sys.modules.get(method_class.__module__), "__file__", None)
    if path is None or not Path(path).is_file():
        return Origin(package, version)
    return Origin(package, version, Path(path).name, digest(Path(path).read_bytes(), 16))


def plugin_file(method_class: type[Method]) -> str | None:
    """Return the file to give to `--plugin` for a method, or None if none is needed or known."""
    path = getattr(sys.modules.get(method_class.__module__), "__file__", None)
    origin = origin_of(method_class)
    return path if origin is not None and origin.package is None else None


def _package_of(module: str) -> tuple[str | None, str | None]:
    """Return the name and version of the installed package that a top-level module is of."""
    for entry in metadata.entry_points(group="rope_patch.methods"):
        if entry.dist is not None and re.split(r"[.:]", entry.value)[0] == module:
            return entry.dist.name, entry.dist.version
    folders = [Path(each or ".") for each in sys.path]
    changes = tuple((str(each), each.stat().st_mtime_ns) for each in folders if each.exists())
    for name in _installed_packages(changes).get(module, ()):
        return name, metadata.version(name)
    return None, None


@lru_cache(maxsize=1)  # it reads the record of every installed package, which takes a second
def _installed_packages(changes: tuple[tuple[str, int], ...]) -> Mapping[str, list[str]]:
    """Return the installed packages by their top-level modules."""
    # `changes` is the key of the cache: the folders of `sys.path` and when each last changed. An
    # installation changes one.
    return metadata.packages_distributions()


def load_plugin(source: str) -> list[str]:
    """Import a file or a module that registers methods.

    Processes that are started from now on know its methods, too.

    Args:
        source: A Python file, or a module's dotted name.

    Returns:
        The names of the methods in it, also of those that it imports from elsewhere.

    Raises:
        ValueError: There is no such file or module, an exception in it (names file and line), or
            no method.
    """
    before = outside_methods()
    module = import_plugin(source)
    names = [
        name
        for name, method_class in outside_methods().items()
        if before.get(name) is not method_class or method_class in vars(module).values()
    ]
    if not names:
        raise Refused(
            f"plugin {source}: it registers no method; expected a class with "
            '@rope_patch.register_method("my-method", paper=..., training=...)'
        )
    pass_on(source)
    return names
