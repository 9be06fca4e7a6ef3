"""Sources of documents by their names in recipes: their readers, and their fingerprints.

`find_source` resolves a name into readers (text, JSON lines, Parquet, `datasets`, the Hub), and
fails early if the source is missing or unsupported.

A reader yields references to documents, from any document on. Each reference has a cursor: the
document's place in the source, such as a byte offset or a Parquet row group and row. A reader that
gets a document's cursor starts there, without reading what comes before. A document is parsed and
tokenised only on demand.

Plain files have readers of their own. `datasets` 5.2 says of a broken line "Expected object or
value at position 8", without file or line; it reads JSON lines at a seventh of the speed (5.2 s of
CPU for 300,000 lines, here 0.8 s), and goes on near their end after 0.4 s, here after 0.1 ms.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rope_patch.tasks import texts
from rope_patch.utils.errors import did_you_mean, one_line, parse_json
from rope_patch.utils.installation import install_hint

FILE_TYPES = ".txt, .md, .jsonl, .json (lines; these also as .gz) and .parquet"
_SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "lines"}
_PARQUET_BATCH_ROWS = 16  # rows in memory at once, since long documents have megabytes each

# A document's most bytes: a small .gz may hold more than the memory does.
_MAX_DOCUMENT_BYTES = 2**29

# The fingerprint of a larger file hashes this many blocks of this many bytes: 16 MiB.
_SAMPLED_BLOCKS = 256
_BLOCK_BYTES = 2**16

Cursor = dict[str, Any]  # where a document is in its source, in JSON's types


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


def file_reader(path: Path, column: str) -> Reader:
    """Return the reader of a file.

    Raises:
        ValueError: The file is empty, or of an unsupported type.
    """
    require_file(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: expected documents; remove the file")
    kind = file_type(path)
    if kind is None:
        raise ValueError(f"{path}: expected files {FILE_TYPES}, got {path.suffix or 'no suffix'!r}")
    if kind == "text":
        return TextReader(str(path), partial(_read_text, path))
    return LinesReader(path) if kind == "lines" else ParquetReader(path, column)


def require_file(path: Path) -> None:
    """Raise if a path is a device, a pipe or a socket, which may have no end.

    Raises:
        ValueError: It is one.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a file or a folder, got a device, a pipe or a socket")


def file_type(path: Path) -> str | None:
    """Return what a file holds by its name: "text", "lines", "parquet", or None for other types."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return "parquet" if path.suffix.lower() == ".parquet" else _SUFFIXES.get(suffix)


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


class DocumentRef(NamedTuple):
    """An unread document.

    Attributes:
        number: Number of its record within what the reader reads.
        location: Where it is, for messages.
        load: Returns its text, or its record.
        cursor: Its place, from which the reader can start.
    """

    number: int
    location: str
    load: Callable[[], Any]
    cursor: Cursor


class Reader(Protocol):
    """A reader of one file, saved dataset, or dataset on the Hub."""

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the documents from a record on.

        Args:
            number: Number of the first record to yield.
            cursor: That record's cursor, to start there. Without it the reader counts records.

        Raises:
            ValueError: The source is damaged, or has no record at the cursor.
        """
        ...


@dataclass(frozen=True)
class TextReader:
    """A reader of a single text.

    Attributes:
        location: Where the text is.
        load: Returns the text.
    """

    location: str
    load: Callable[[], str]

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the text; see `Reader.read`."""
        if number == 0:
            yield DocumentRef(0, self.location, self.load, {})


@dataclass(frozen=True)
class LinesReader:
    """A reader of JSON lines, also as .gz.

    A cursor is the byte at which the line starts; in a .gz file, the byte of the decompressed text.
    There, what comes before is decompressed, but neither split into lines nor parsed.
    """

    path: Path

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the lines that are not blank; see `Reader.read`."""
        first = 0 if cursor is None else number
        offset = 0 if cursor is None else cursor["byte"]
        with _open_file(self.path) as file:
            if offset:
                file.seek(offset - 1)
                if file.read(1) != b"\n" or not file.peek(1):
                    raise _changed_error(self.path, f"no line starts at byte {offset:,}")
            for line_number, line in enumerate(
                iter(partial(file.readline, _MAX_DOCUMENT_BYTES + 1), b""), first
            ):
                if len(line) > _MAX_DOCUMENT_BYTES:
                    raise _too_large_error(f"{self.path}:{line_number + 1}", "a line")
                if line_number >= number and line.strip():
                    location = f"{self.path}:{line_number + 1}"
                    load = partial(_parse_record, line, location, offset)
                    yield DocumentRef(line_number, location, load, {"byte": offset})
                offset += len(line)


@dataclass(frozen=True)
class ParquetReader:
    """A reader of Parquet. A cursor is a row group and a row in it; other groups are not read.

    Attributes:
        path: The file.
        column: The column of text.
    """

    path: Path
    column: str

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the rows; see `Reader.read`."""
        arrow, parquet = _import_package("pyarrow"), _import_package("pyarrow.parquet")
        try:
            with parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                columns = columns_to_read(names, self.column, str(self.path))
                sizes = [
                    file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
                ]
                first_group, skipped = _find_row(sizes, number)
                place = {"row_group": first_group, "row": skipped}
                if cursor is not None and (cursor != place or first_group == len(sizes)):
                    raise _changed_error(self.path, f"row {number + 1:,} is elsewhere")
                for group in range(first_group, len(sizes)):
                    batches = file.iter_batches(
                        _PARQUET_BATCH_ROWS, row_groups=[group], columns=columns
                    )
                    for row, record in _rows_from(batches, skipped):
                        place = {"row_group": group, "row": row}
                        location = f"{self.path}, row {number + 1}"
                        yield DocumentRef(number, location, partial(dict, record), place)
                        number += 1
                    skipped = 0
        except (arrow.ArrowException, OSError) as error:
            raise _read_error(self.path, error) from error


def _find_row(sizes: Sequence[int], number: int) -> tuple[int, int]:
    """Return the row group of a row and its row there; the number of groups beyond the last row."""
    for group, size in enumerate(sizes):
        if number < size:
            return group, number
        number -= size
    return len(sizes), 0


def _rows_from(batches: Iterator[Any], skipped: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a row group's rows from one on; those before are not made Python objects."""
    row = 0
    for batch in batches:
        first = min(max(0, skipped - row), batch.num_rows)
        yield from enumerate(batch.slice(first).to_pylist(), row + first)
        row += batch.num_rows


@dataclass(frozen=True)
class SavedDatasetReader:
    """A reader of a folder of `Dataset.save_to_disk`. A cursor is a row.

    Attributes:
        path: The folder.
        column: The column of text.
    """

    path: Path
    column: str

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the rows; see `Reader.read`."""
        load = _import_package("datasets").load_from_disk
        try:
            dataset = load(str(self.path))
        except (OSError, ValueError, KeyError) as error:
            raise _read_error(self.path, error) from error
        columns = columns_to_read(dataset.column_names, self.column, str(self.path))
        dataset = dataset.select_columns(columns)
        if cursor is not None and number >= len(dataset):
            raise _changed_error(self.path, f"there is no row {number + 1:,}")
        for row in range(number, len(dataset)):
            location = f"{self.path}, row {row + 1}"
            yield DocumentRef(row, location, partial(dataset.__getitem__, row), {"row": row})


@dataclass(frozen=True)
class HubReader:
    """A reader of a dataset on the Hub, streamed by `datasets`.

    A cursor is the `state_dict()` of the stream before the record, with the library's version:
    another version may have other states, and then the reader counts records.

    Attributes:
        source: `hub:NAME[,CONFIG][@SPLIT]`.
    """

    source: str

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        """Yield the records; see `Reader.read`."""
        datasets = _import_package("datasets")
        name, _, split = self.source.partition(":")[2].partition("@")
        name, _, config = name.partition(",")
        try:
            dataset = datasets.load_dataset(
                name, config or None, split=split or "train", streaming=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"cannot read {self.source}: {one_line(error)}; expected hub:NAME[,CONFIG][@SPLIT]"
            ) from error
        version, first = datasets.__version__, 0
        if cursor is not None and cursor["datasets"] == version:
            dataset.load_state_dict(cursor["state"])
            state, first = cursor["state"], number
        else:
            state = dataset.state_dict()
        # Not `skip`: the states of a stream that skips are not those of one that does not.
        for row, record in enumerate(dataset, first):
            if row >= number:  # until then a counting reader needs no states
                place = {"datasets": version, "state": state}
                location = f"{self.source}, row {row + 1}"
                yield DocumentRef(row, location, partial(dict, record), place)
            if row + 1 >= number:
                state = dataset.state_dict()


def columns_to_read(names: Sequence[str], column: str, location: str) -> list[str]:
    """Return the columns to read: the tokens if present, else the text.

    Raises:
        ValueError: There is neither.
    """
    if "input_ids" in names:
        return [name for name in ("input_ids", "labels") if name in names]
    if column in names:
        return [column]
    raise ValueError(
        f"{location} has no column {column!r}{did_you_mean(column, names, 0.5)}: it has "
        f"{', '.join(map(repr, names)) or 'none'}; say text_column: NAME"
    )


def _read_text(path: Path) -> str:
    with _open_file(path) as file:
        raw = file.read(_MAX_DOCUMENT_BYTES + 1)
        if len(raw) > _MAX_DOCUMENT_BYTES:
            raise _too_large_error(str(path), "a text")
        return _decode(raw, str(path))


def _parse_record(line: bytes, location: str, offset: int) -> dict[str, Any]:
    text = _decode(line, location, offset)
    try:
        record = parse_json(text)
    except ValueError as error:
        damage = str(error)
        if isinstance(error, json.JSONDecodeError):
            damage = f"{error.msg} at column {error.colno}"
        raise ValueError(
            f"{location}: broken JSON: {damage}; expected one object a line: repair or remove it "
            "(`jq -c . FILE` rewrites an indented file)"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{location}: expected an object with columns, got {type(record).__name__}; an array's "
            "elements are put on lines of their own by `jq -c '.[]' FILE`"
        )
    return record


def _decode(raw: bytes, location: str, offset: int = 0) -> str:
    try:
        # Windows writes a byte order mark at a file's start.
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{location} is not UTF-8 at byte {offset + error.start:,} of the file: re-encode it, "
            "e.g. iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _read_error(path, error) from error


def _too_large_error(location: str, what: str) -> ValueError:
    return ValueError(
        f"{location}: expected {what} of at most {_MAX_DOCUMENT_BYTES / 2**20:,.0f} MiB, which "
        "would be one document, got more: split it"
    )


def _changed_error(path: Path, damage: str) -> ValueError:
    return ValueError(
        f"cannot resume: {path} is not what it was when the run was saved, {damage}: bring back "
        "the data of that run, or start anew"
    )


def _read_error(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot read {path}: {one_line(error)}; copy or download it again")


def _import_package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f"this data needs the package {package}: {install_hint('train')}"
        ) from error
