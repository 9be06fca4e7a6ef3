"""Plugins: Python files, modules, and entry points of installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import Refused, describe_error

logger = logging.getLogger("rope_patch")

# Plugins that processes started from this one import, too, separated as paths are.
VARIABLE = "ROPE_PATCH_PLUGINS"

_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARY = sysconfig.get_paths()["stdlib"]
_imported: set[str] = set()


def import_plugin(source: str) -> ModuleType:
    """Import a plugin; a file is executed again at each call.

    Args:
        source: A Python file, or a module's dotted name.

    Raises:
        ValueError: There is no such file or module, or an exception in it; names file and line.
    """
    _imported.add(source)
    path = Path(source)
    if source.endswith(".py") or path.is_file() or not _MODULE_NAME.fullmatch(source):
        return _import_file(path)
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        parents = [source[: match.start()] for match in re.finditer(r"\.|$", source)]
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            raise Refused(
                f"plugin {source}: no module named {error.name!r} is installed; expected the name "
                "of one, or a Python file such as my_method.py"
            ) from error
        raise Refused(f"plugin {source} failed: {_locate(error)}") from error


def pass_on(source: str) -> None:
    """Have processes that are started from now on import a plugin when they look for a method.

    Args:
        source: As `import_plugin` takes it.
    """
    absolute = str(Path(source).resolve()) if Path(source).is_file() else source
    _imported.add(absolute)
    sources = _passed_on()
    if absolute not in sources:
        os.environ[VARIABLE] = os.pathsep.join([*sources, absolute])


def import_passed_on() -> None:
    """Import the plugins that the parent process passed on; warn of those that fail."""
    for source in _passed_on():
        if source in _imported:
            continue
        try:
            import_plugin(source)
        except Refused as error:
            logger.warning("%s (named in %s)", error, VARIABLE)


class PluginGroup:
    """The entry points of one group, of all installed packages, imported when they are needed.

    Attributes:
        group: The group's name, as pyproject.toml has it.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self._path: list[str] | None = None
        self._entries: dict[str, EntryPoint] = {}
        self._values: dict[tuple[str, str], Any] = {}
        self._problems: dict[tuple[str, str], str] = {}

    def names(self) -> list[str]:
        """Return the names of all entry points of the group; imports nothing."""
        if self._path != sys.path:  # a package was made importable since, or none was looked for
            self._path = list(sys.path)
            self._entries = {entry.name: entry for entry in entry_points(group=self.group)}
        return sorted(self._entries)

    def describe(self, name: str) -> str:
        """Return which package an entry point is of, and how it is written there."""
        entry = self._entries[name]
        package = "an unnamed package" if entry.dist is None else f"the package {entry.dist.name}"
        return f"{package} (entry point {entry.name} = {entry.value!r} of {self.group})"

    def load(self, name: str) -> Any:
        """Return what an entry point names.

        Raises:
            ValueError: Its package failed; names the package, the entry point, and the line.
        """
        entry = self._entries[name]
        key = (entry.name, entry.value)
        if key in self._problems:
            raise Refused(self._problems[key])
        if key not in self._values:
            self._values[key] = None  # a package may list methods while it is imported
            try:
                self._values[key] = entry.load()
            except (Exception, SystemExit) as error:
                self._problems[key] = f"{self.describe(name)} failed: {_locate(error)}"
                raise Refused(self._problems[key]) from error
        return self._values[key]

    def load_all(self) -> dict[str, Any]:
        """Return what all entry points name that can be imported; warn of others, once."""
        values = {}
        for name in self.names():
            entry = self._entries[name]
            known = (entry.name, entry.value) in self._problems
            try:
                values[name] = self.load(name)
            except Refused as error:
                if not known:
                    logger.warning("%s", error)
        return values


def _passed_on() -> list[str]:
    return [source for source in os.environ.get(VARIABLE, "").split(os.pathsep) if source]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise Refused(
            f"plugin {path}: {what}; expected a Python file, or the name of an installed module "
            "such as my_package.methods"
        )
    path = path.resolve()
    stem = re.sub(r"\W", "_", path.stem)
    name = f"rope_patch_plugin_{stem}_{digest(str(path), 8)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise Refused(f"plugin {path}: expected a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # where dataclasses and pickles look for a class's module
    try:
        # Python's own loader would take the code of a file that changed within the same second.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise Refused(f"plugin {path} failed: {_locate(error)}") from error
    return module


def _locate(error: BaseException) -> str:
    """Return an error in one line, with the file and line of the plugin that raised it."""
    text = describe_error(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({error.filename}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        in_library = file.startswith(_LIBRARY) and "site-packages" not in file
        if not in_library and not file.startswith(("<frozen", _OWN_FOLDER)):
            return f"{text} ({file}, line {frame.lineno})"
    return text
