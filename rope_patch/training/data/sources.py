"""Sources of documents: a recipe's names, resolved into readers, and their fingerprints.

`find_source` fails early if a source is missing or unsupported.
"""

from __future__ import annotations

import hashlib
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from rope_patch.tasks import texts
from rope_patch.training.data.readers import (
    FILE_TYPES,
    HubReader,
    Reader,
    SavedDatasetReader,
    TextReader,
    file_reader,
    file_type,
    require_file,
)
from rope_patch.utils.errors import did_you_mean

_SAMPLED_BLOCKS, _BLOCK_BYTES = (
    256,
    1 << 16,
)  # of a large file's fingerprint: how many, of how many bytes


def find_source(source: str, text_column: str) -> list[Reader]:
    """Return the readers of a source, one a file or dataset.

    Args:
        source: A file, a folder, a glob, a folder of `Dataset.save_to_disk`,
            `hub:NAME[,CONFIG][@SPLIT]`, or `novels:NAME` for a text of the package.
        text_column: The records' column of text.

    Raises:
        ValueError: The source is missing, empty, or of an unsupported file type.
    """
    scheme, _, name = source.partition(":")
    if scheme == "novels":
        if name not in texts.names():
            raise ValueError(
                f"no novel {name!r}{did_you_mean(name, texts.names(), 0.5)}: expected one of "
                f"{', '.join(texts.names())}"
            )
        return [TextReader(source, partial(texts.read_text, name))]
    if scheme == "hub":
        return [HubReader(source)]
    readers: list[Reader] = [
        SavedDatasetReader(place, text_column)
        if place.is_dir()
        else file_reader(place, text_column)
        for place in _source_paths(source)
    ]
    if not readers:
        raise ValueError(f"no documents in {source!r}: expected files {FILE_TYPES}")
    return readers


def fingerprint(source: str) -> str:
    """Return a digest of a source's contents, independent of where its files are.

    Of files above 16 MiB the size and 256 evenly spread blocks of 64 KiB are hashed, of a source on
    the Hub its name.

    Args:
        source: See `find_source`.

    Raises:
        ValueError: See `find_source`.
        OSError: A file cannot be read.
    """
    scheme, _, name = source.partition(":")
    digest = hashlib.sha256()
    if scheme == "novels":
        digest.update(texts.read_text(name).encode())
    elif scheme == "hub":
        digest.update(name.encode())
    else:
        for place in _source_paths(source):
            files = (
                sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
            )
            for path in files:
                digest_file(path, digest)
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def digest_file(path: Path, digest: Any) -> None:
    """Add a file's type, its size and its contents to a digest; samples of a large file."""
    require_file(path)
    size = path.stat().st_size
    digest.update(f"{path.suffix} {size} ".encode())
    with path.open("rb") as file:
        if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
            return
        for number in range(_SAMPLED_BLOCKS):
            file.seek(number * (size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))


def _source_paths(source: str) -> list[Path]:
    """Return the files and saved datasets of a path or glob, in order."""
    path = Path(source).expanduser()
    if path.exists():
        matches = [path]
    elif any(letter in source for letter in "*?["):
        paths = sorted(glob(str(path), recursive=True))  # noqa: PTH207 -- absolute ones too
        matches = [Path(match) for match in paths if Path(match).is_file() or "**" not in source]
    else:
        neighbours = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(
            f"no data {source!r}{did_you_mean(path.name, neighbours, 0.5)}: "
            "expected a file, a folder, a glob, "
            "hub:NAME or novels:NAME"
        )
    return [place for match in matches for place in _paths_below(match)]


def _paths_below(path: Path) -> list[Path]:
    """Return the readable files below a path, sorted; skip hidden files and other file types."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(p) for p in sorted(path.iterdir()) if p.is_dir())
        raise ValueError(f"{path} has several splits: expected one of them, such as {splits}")
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return [path]
    entries = [p for p in sorted(path.iterdir()) if not p.name.startswith(".")]
    readable = (p for p in entries if p.is_dir() or file_type(p))
    return [place for entry in readable for place in _paths_below(entry)]
