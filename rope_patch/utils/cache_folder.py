"""The folder in the user's cache for what this package makes once and can make again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "ROPE_PATCH_CACHE"


def cache_folder() -> Path:
    """Return the folder, which may not exist: the environment variable's, or the system's."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else user_cache_path("rope_patch")
