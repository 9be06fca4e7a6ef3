"""The installed release of transformers, and the newest one that this package was tested with."""

from __future__ import annotations

import functools
from importlib.metadata import version

from packaging.version import Version

NEWEST_TESTED = "5.24.0"


@functools.cache  # reading a package's metadata takes a millisecond, and every patch asks
def transformers_version() -> str:
    """Return the installed release of transformers."""
    return version("transformers")


def installed_release() -> str:
    """Return "transformers 5.24.0", for messages."""
    return f"transformers {transformers_version()}"


def is_newer_than_tested() -> bool:
    """Return whether the installed transformers is newer than the newest tested one."""
    return Version(transformers_version()) > Version(NEWEST_TESTED)
