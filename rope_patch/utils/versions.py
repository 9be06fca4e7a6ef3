"""Versions of installed packages."""

from __future__ import annotations

import re
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
