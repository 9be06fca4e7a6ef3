"""Find versions and the package's own files, and warn of old names."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path


@cache  # each answer parses the package's whole README, and every card and record asks
def version(package: str) -> str:
    """Return a package's version, or "not installed", as in a bare checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def own_version() -> str:
    """Return rope_patch's version: the installed package's, or a bare checkout's."""
    try:
        return metadata.version("rope-patch")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        text = project.read_text(encoding="utf-8") if project.is_file() else ""
        match = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        return match[1] if match else "unknown"


def resource_folder(name: str) -> Path:
    """Return a folder of files that come with the package.

    In a checkout, `eval/` and `recipes/` lie beside the package; an installed package holds them.

    Args:
        name: The folder's path, such as `eval/tasks`.
    """
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def install_hint(extra: str) -> str:
    """Return what installs the packages of an extra; the project is on no index.

    Args:
        extra: The extra's name in pyproject.toml.
    """
    return f"pip install '.[{extra}]' in a clone of rope-patch"


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that a name is another one now.

    Args:
        old: The old name, in full.
        new: The new one.
    """
    message = f"{old} is now {new}; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
