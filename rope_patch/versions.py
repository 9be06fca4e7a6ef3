"""Versions of installed packages, for what is written about a run."""

from __future__ import annotations

from importlib import metadata


def version(package: str) -> str:
    """A package's version, or "not installed", as when working in a bare checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
