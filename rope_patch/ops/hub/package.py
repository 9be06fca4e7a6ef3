"""The package for the hub: the kernels' modules, their metadata, a card and the licence."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import metadata
from pathlib import Path, PurePosixPath

from rope_patch.ops.hub.source_tree import collect_sources, make_standalone
from rope_patch.utils.atomic_files import explain_write_errors, require_new_folder
from rope_patch.utils.versions import own_version

NAME = "rope-patch"

# Of the package's interface. A package with another number lies in another branch of the hub.
INTERFACE_VERSION = 1

# A folder for each backend; the modules are the same.
BACKENDS = ("cpu", "cuda")

_ENTRY_POINT = "rope_patch.ops.hub.entry_point"


def build_package(folder: str | os.PathLike[str]) -> Path:
    """Write a package that the `kernels` library loads, and that needs no rope_patch.

    Args:
        folder: A new or empty folder: the root of a repository of the hub.

    Returns:
        The folder.

    Raises:
        Refused: The folder is not empty, or a module imports what the hub does not allow.
        NotWritten: The folder cannot be written.
    """
    folder = Path(folder)
    require_new_folder(folder, "the kernels' package")
    files = _make_files()
    with explain_write_errors(folder, "the kernels' package"):
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    return folder


def _make_files() -> dict[PurePosixPath, str]:
    sources = collect_sources(_ENTRY_POINT)
    digest = hashlib.sha256(json.dumps([[str(p), t] for p, t in sources.items()]).encode())
    files = {PurePosixPath("README.md"): _make_card(), PurePosixPath("LICENSE"): _read_licence()}
    for backend in BACKENDS:
        folder = PurePosixPath("build", f"torch-{backend}")
        # Unique for these sources, because a process can hold several versions of the package.
        name = f"_{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:8]}"
        for path, text in sources.items():
            files[folder / path] = make_standalone(path, text, namespace=name)
        files[folder / "metadata.json"] = _make_metadata(name, backend)
    return files


def _make_metadata(unique_name: str, backend: str) -> str:
    fields = {
        "name": NAME,
        "id": unique_name,
        "version": INTERFACE_VERSION,
        "license": "apache-2.0",
        "python-depends": [],  # besides torch and Triton, which come unlisted
        "backend": {"type": backend},
    }
    return json.dumps(fields, indent=2) + "\n"


def _make_card() -> str:
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return text.replace("{{ version }}", own_version())


def _read_licence() -> str:
    checkout = Path(__file__).parents[3] / "LICENSE"
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    text = metadata.distribution("rope-patch").read_text("licenses/LICENSE")
    if text is None:
        raise FileNotFoundError("the licence of rope-patch is missing from its installation")
    return text
