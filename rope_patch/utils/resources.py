"""Files that come with the package: tasks, texts, recipes."""

from __future__ import annotations

from pathlib import Path


def resource_folder(name: str) -> Path:
    """Return a folder of files that come with the package.

    In a checkout, `eval/` and `recipes/` lie beside the package; an installed package holds them.

    Args:
        name: The folder's path, such as `eval/tasks`.
    """
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name
