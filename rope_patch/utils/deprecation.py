"""Deprecation of old names, which keep working for one version."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that a name is another one now.

    Args:
        old: The old name, in full.
        new: The new one.
    """
    message = f"{old} is now {new}; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
