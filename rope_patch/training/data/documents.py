"""Readers of long documents: text, JSON lines, Parquet, saved `datasets`, the Hub.

`find_source` resolves a source into parts (mostly files) and fails early if one is missing. A part
yields document references, starting at any record. A document is loaded and tokenised only on
demand, so a run that resumes after 10,000 documents tokenises none of them again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_patch.tasks import texts
from rope_patch.utils.errors import did_you_mean, parse_json

IGNORED = -100  # a label that transformers' losses leave out
FILE_TYPES = ".txt, .md, .jsonl, .json (lines; these also as .gz) and .parquet"
_SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "lines"}
_SAMPLED_BLOCKS, _BLOCK_BYTES = (
    256,
    1 << 16,
)  # of a large file's fingerprint: how many, of how many bytes
_PARQUET_BATCH_ROWS = 16  # read at once: long documents have megabytes each


class DocumentRef(NamedTuple):
    """An unread document: its number within its part, its location, and its loader."""

    number: int
    location: str
    load: Callable[[], Any]


class TokenizedDocument(NamedTuple):
    """A document's location, and its tokens and labels, `[S]` int64 each."""

    location: str
    ids: torch.Tensor
    labels: torch.Tensor


SourcePart = Callable[[int], Iterator[DocumentRef]]  # reads from the record of that number on


def find_source(source: str, text_column: str) -> list[SourcePart]:
    """Return the parts of a source.

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
        return [partial(_single_document, source, partial(texts.read_text, name))]
    if scheme == "hub":
        return [partial(_hub_dataset, source, text_column)]
    parts = [_path_part(place, text_column) for place in _source_paths(source)]
    if not parts:
        raise ValueError(f"no documents in {source!r}: expected files {FILE_TYPES}")
    return parts


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
                _digest_file(path, digest)
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def _digest_file(path: Path, digest: Any) -> None:
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


def tokenize(document: DocumentRef, tokenizer: Any, text_column: str) -> TokenizedDocument:
    """Return a document's tokens, ending in the tokenizer's end token.

    The `input_ids` and `labels` of a record are used as they are; an end token appended to labels
    gets no loss.

    Raises:
        ValueError: The record is damaged or unsuitable; names its location.
    """
    loaded = document.load()
    labels = None
    if isinstance(loaded, dict) and loaded.get("input_ids") is not None:
        ids = _to_int64(loaded["input_ids"], "input_ids", document.location)
        _require_in_vocabulary(ids, len(tokenizer), document.location)
        if loaded.get("labels") is not None:
            labels = _to_int64(loaded["labels"], "labels", document.location)
            _require_labels(labels, ids, len(tokenizer), document.location)
    else:
        text = (
            loaded
            if isinstance(loaded, str)
            else _record_text(loaded, text_column, document.location)
        )
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.int64)
    end = tokenizer.eos_token_id
    if end is not None and len(ids) and ids[-1] != end:
        ids = torch.cat([ids, ids.new_tensor([end])])
        labels = None if labels is None else torch.cat([labels, ids.new_tensor([IGNORED])])
    return TokenizedDocument(document.location, ids, ids if labels is None else labels)


def _paths_below(path: Path) -> list[Path]:
    """Return the readable files below a path, sorted; skip hidden files and other file types."""
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(p) for p in sorted(path.iterdir()) if p.is_dir())
        raise ValueError(f"{path} has several splits: expected one of them, such as {splits}")
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return [path]
    entries = [p for p in sorted(path.iterdir()) if not p.name.startswith(".")]
    readable = (p for p in entries if p.is_dir() or _file_type(p))
    return [place for entry in readable for place in _paths_below(entry)]


def _path_part(place: Path, column: str) -> SourcePart:
    return partial(_saved_dataset, place, column) if place.is_dir() else _file_part(place, column)


def _file_type(path: Path) -> str | None:
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return "parquet" if path.suffix.lower() == ".parquet" else _SUFFIXES.get(suffix)


def _file_part(path: Path, column: str) -> SourcePart:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: expected documents; remove the file")
    file_type = _file_type(path)
    if file_type is None:
        raise ValueError(f"{path}: expected files {FILE_TYPES}, got {path.suffix or 'no suffix'!r}")
    if file_type == "text":
        return partial(_single_document, str(path), partial(_read_text, path))
    return partial(_json_lines if file_type == "lines" else _parquet, path, column)


def _single_document(location: str, load: Callable[[], str], start: int) -> Iterator[DocumentRef]:
    if start == 0:
        yield DocumentRef(0, location, load)


def _read_text(path: Path) -> str:
    with _open_file(path) as file:
        return _decode(file.read(), str(path))


def _json_lines(path: Path, column: str, start: int) -> Iterator[DocumentRef]:
    offset = 0
    with _open_file(path) as file:
        for number, line in enumerate(file):
            if number >= start and line.strip():
                location = f"{path}:{number + 1}"
                yield DocumentRef(number, location, partial(_parse_record, line, location, offset))
            offset += len(line)


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


def _parquet(path: Path, column: str, start: int) -> Iterator[DocumentRef]:
    arrow, parquet = _import_package("pyarrow"), _import_package("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns_to_read(file.schema_arrow.names, column, str(path))
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= start:
                    number += rows
                    continue
                batches = file.iter_batches(
                    _PARQUET_BATCH_ROWS, row_groups=[group], columns=columns
                )
                for record in (record for batch in batches for record in batch.to_pylist()):
                    if number >= start:
                        yield DocumentRef(
                            number, f"{path}, row {number + 1}", partial(dict, record)
                        )
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise _read_error(path, error) from error


def _saved_dataset(path: Path, column: str, start: int) -> Iterator[DocumentRef]:
    load = _import_package("datasets").load_from_disk
    try:
        dataset = load(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise _read_error(path, error) from error
    dataset = dataset.select_columns(_columns_to_read(dataset.column_names, column, str(path)))
    for number in range(start, len(dataset)):
        location = f"{path}, row {number + 1}"
        yield DocumentRef(number, location, partial(dataset.__getitem__, number))


def _hub_dataset(source: str, column: str, start: int) -> Iterator[DocumentRef]:
    name, _, split = source.partition(":")[2].partition("@")
    name, _, config = name.partition(",")
    load = _import_package("datasets").load_dataset
    try:
        dataset = load(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot read {source}: {error}; expected hub:NAME[,CONFIG][@SPLIT]"
        ) from error
    for number, record in enumerate(dataset.skip(start) if start else dataset, start):
        yield DocumentRef(number, f"{source}, row {number + 1}", partial(dict, record))


def _columns_to_read(names: Sequence[str], column: str, location: str) -> list[str]:
    """Return the columns to read: the tokens if present, else the text."""
    if "input_ids" in names:
        return [name for name in ("input_ids", "labels") if name in names]
    if column in names:
        return [column]
    raise ValueError(
        f"{location} has no column {column!r}{did_you_mean(column, names, 0.5)}: it has "
        f"{', '.join(map(repr, names)) or 'none'}; say text_column: NAME"
    )


def _record_text(record: dict[str, Any], column: str, location: str) -> str:
    text = record[_columns_to_read([n for n in record if n != "input_ids"], column, location)[0]]
    if not isinstance(text, str):
        raise ValueError(f"{location}: expected text in {column!r}, got {type(text).__name__}")
    return text


def _to_int64(values: Any, column: str, location: str) -> torch.Tensor:
    try:
        tensor = torch.tensor(values)
        if tensor.numel() == 0 or (tensor.dim() == 1 and tensor.dtype == torch.int64):
            return tensor.long().flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"{location}: expected a list of whole numbers in {column!r}")


def _require_in_vocabulary(ids: torch.Tensor, size: int, location: str) -> None:
    invalid_ids = ids[(ids < 0) | (ids >= size)]
    if len(invalid_ids):
        raise ValueError(
            f"{location}: expected input_ids of 0 to {size - 1}, got {invalid_ids[0].item()}: they "
            "come from another tokenizer; tokenise with the model's own"
        )


def _require_labels(labels: torch.Tensor, ids: torch.Tensor, size: int, location: str) -> None:
    if len(labels) != len(ids):
        raise ValueError(
            f"{location}: expected a label for each of {len(ids)} input_ids, got {len(labels)}; "
            f"{IGNORED} is for tokens without loss"
        )
    _require_in_vocabulary(labels[labels != IGNORED], size, f"{location}, labels")


def _decode(raw: bytes, location: str, offset: int = 0) -> str:
    try:
        return raw.decode(
            "utf-8-sig" if offset == 0 else "utf-8"
        )  # Windows writes a byte order mark
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


def _read_error(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot read {path}: {error}; copy or download it again")


def _import_package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f"this data needs the package {package}: pip install 'rope-patch[train]'"
        ) from error
