"""Results as files: JSON, and what they are called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rope_patch.disk import write


def write_json(path: Path, data: Any) -> None:
    """Writes JSON; what JSON has no form for is written as its text."""
    write(path, json.dumps(data, indent=1, default=str) + "\n")


def plain(name: str) -> str:
    """A file's name for something with any characters in its name."""
    return re.sub(r"[^\w.@-]+", "_", name).strip("_.") or "unnamed"
