"""Find recipes and launch files by name, without the packages that read them."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from rope_patch.utils.errors import did_you_mean
from rope_patch.utils.installation import resource_folder

_FOLDER = resource_folder("recipes")
_CHECKOUT = Path("recipes", "configs")  # recipes' path in a checkout


def recipes() -> dict[str, Path]:
    """Return the recipes' files by name."""
    return _files("configs")


def launches() -> dict[str, Path]:
    """Return the files for `accelerate launch --config_file` by name."""
    return _files("accelerate")


def summary(path: Path) -> str:
    """Return the first sentence of a file's heading comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heading = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in heading)
    return text.partition(". ")[0]


def read_file(name: str) -> str:
    """Return the text of a recipe or of a launch file.

    Raises:
        ValueError: The package has no such file.
    """
    files = recipes() | launches()
    name = name.removesuffix(".yaml")
    if name not in files:
        raise ValueError(
            f"no recipe {name}{did_you_mean(name, files)}; there are {', '.join(files)}"
        )
    return files[name].read_text(encoding="utf-8")


def find_recipe(path: Path) -> Path:
    """Return the recipe of `--config`: a file, or a recipe of the package.

    The package's `yarn_64k` also goes by `yarn_64k.yaml` and `recipes/configs/yarn_64k.yaml`.

    Raises:
        ValueError: There is no such file, and no such recipe in the package.
    """
    if path.is_file():
        return path
    if path.parent in (Path(), _CHECKOUT):
        name, paths = path.name.removesuffix(".yaml"), recipes()
        if name in paths:
            return paths[name]
        raise ValueError(
            f"no recipe {path}{did_you_mean(name, paths)}: no such file, and the package has "
            f"{', '.join(paths)}"
        )
    neighbours = sorted(p.name for p in path.parent.glob("*.yaml"))
    raise ValueError(
        f"no recipe {path}" + (f"; {path.parent} has {', '.join(neighbours)}" if neighbours else "")
    )


def find_launch(path: Path) -> Path:
    """Return a launch file by its path, or by its name in the package.

    Raises:
        ValueError: There is no such file, and no such launch file in the package.
    """
    if path.is_file():
        return path
    name, paths = path.name.removesuffix(".yaml"), launches()
    if path.parent == Path() and name in paths:
        return paths[name]
    raise ValueError(
        f"no launch file {path}{did_you_mean(name, paths)}: no such file, and the package has "
        f"{', '.join(paths)}"
    )


def _files(folder: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted((_FOLDER / folder).glob("*.yaml"))}
