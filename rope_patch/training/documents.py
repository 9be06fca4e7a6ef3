"""Long documents, one after another: from text, JSON lines, Parquet, `datasets` or the Hub.

A source is found first, which fails early on what is not there, and gives parts: files, mostly. A
part is read from any record on and gives entries, whose text is loaded and tokenised only where it
is needed: going on after 10,000 documents tokenises none of them again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_patch.tasks import texts
from rope_patch.utils.errors import parse_json

IGNORED = -100  # a label that transformers' losses leave out
KINDS = ".txt, .md, .jsonl, .json (lines; these also as .gz) and .parquet"
_SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "lines", ".json": "lines"}
_BLOCKS, _BLOCK = 256, 1 << 16  # of a large file's fingerprint: how many, of how many bytes
_PARQUET_ROWS = 16  # read at once: long documents have megabytes each


class Entry(NamedTuple):
    """A document that was not read yet: its number in its part, its place, how to load it."""

    number: int
    where: str
    load: Callable[[], Any]


class Document(NamedTuple):
    """A document's place, tokens and labels, the latter `[S]` int64."""

    where: str
    ids: torch.Tensor
    labels: torch.Tensor


Part = Callable[[int], Iterator[Entry]]  # reads from the record of that number on


def find(source: str, text_column: str) -> list[Part]:
    """Finds what a source consists of.

    Args:
        source: A file, a folder, a glob, a folder of `Dataset.save_to_disk`,
            `hub:NAME[,CONFIG][@SPLIT]`, or `novels:NAME` for a text that comes with the package.
        text_column: Where records have their text.

    Raises:
        ValueError: There is no such thing, it is empty, or of a kind that is not read.
    """
    scheme, _, name = source.partition(":")
    if scheme == "novels":
        if name not in texts.names():
            raise ValueError(
                f"no novel {name!r}{meant(name, texts.names())}: expected one of "
                f"{', '.join(texts.names())}"
            )
        return [partial(_one, source, partial(texts.read, name))]
    if scheme == "hub":
        return [partial(_streamed, source, text_column)]
    parts = [_part(place, text_column) for place in _places(source)]
    if not parts:
        raise ValueError(f"no documents in {source!r}: expected files {KINDS}")
    return parts


def fingerprint(source: str) -> str:
    """Tell the contents of sources apart, wherever their files are.

    Files of more than 16 MiB count by their size and 256 blocks of 64 KiB, evenly spread. A source
    on the Hub counts by its name.

    Args:
        source: See `find`.

    Raises:
        ValueError: See `find`.
        OSError: A file cannot be read.
    """
    scheme, _, name = source.partition(":")
    digest = hashlib.sha256()
    if scheme == "novels":
        digest.update(texts.read(name).encode())
    elif scheme == "hub":
        digest.update(name.encode())
    else:
        for place in _places(source):
            below = (
                sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
            )
            for path in below:
                _digest_file(path, digest)
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def _digest_file(path: Path, digest: Any) -> None:
    size = path.stat().st_size
    digest.update(f"{path.suffix} {size} ".encode())
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
            return
        for number in range(_BLOCKS):
            file.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))


def _places(source: str) -> list[Path]:
    """The files and saved datasets of a source that is no scheme's, in their order."""
    path = Path(source).expanduser()
    if path.exists():
        matches = [path]
    elif any(letter in source for letter in "*?["):
        found = sorted(glob(str(path), recursive=True))  # noqa: PTH207 -- absolute ones too
        matches = [Path(match) for match in found if Path(match).is_file() or "**" not in source]
    else:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(
            f"no data {source!r}{meant(path.name, beside)}: expected a file, a folder, a glob, "
            "hub:NAME or novels:NAME"
        )
    return [place for match in matches for place in _below(match)]


def encode(entry: Entry, tokenizer: Any, text_column: str) -> Document:
    """A document's tokens, with the tokenizer's end token behind them unless it is there already.

    A record with `input_ids` is taken at its word, and its `labels` too; an end token appended to
    those gets no loss.

    Raises:
        ValueError: A damaged or unsuitable record; says where it is.
    """
    loaded = entry.load()
    labels = None
    if isinstance(loaded, dict) and loaded.get("input_ids") is not None:
        ids = _integers(loaded["input_ids"], "input_ids", entry.where)
        _require_vocabulary(ids, len(tokenizer), entry.where)
        if loaded.get("labels") is not None:
            labels = _integers(loaded["labels"], "labels", entry.where)
            _require_labels(labels, ids, len(tokenizer), entry.where)
    else:
        text = loaded if isinstance(loaded, str) else _text(loaded, text_column, entry.where)
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.int64)
    end = tokenizer.eos_token_id
    if end is not None and len(ids) and ids[-1] != end:
        ids = torch.cat([ids, ids.new_tensor([end])])
        labels = None if labels is None else torch.cat([labels, ids.new_tensor([IGNORED])])
    return Document(entry.where, ids, ids if labels is None else labels)


def meant(name: str, names: Sequence[str]) -> str:
    """A hint at the name that is closest to a wrong one, or nothing."""
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _below(path: Path) -> list[Path]:
    """The parts of a file or folder, sorted; a folder's hidden and other files are passed over."""
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(str(p) for p in sorted(path.iterdir()) if p.is_dir())
        raise ValueError(f"{path} has several splits: expected one of them, such as {splits}")
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return [path]
    entries = [p for p in sorted(path.iterdir()) if not p.name.startswith(".")]
    wanted = (p for p in entries if p.is_dir() or _kind(p))
    return [place for entry in wanted for place in _below(entry)]


def _part(place: Path, column: str) -> Part:
    return partial(_saved, place, column) if place.is_dir() else _file(place, column)


def _kind(path: Path) -> str | None:
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return "parquet" if path.suffix.lower() == ".parquet" else _SUFFIXES.get(suffix)


def _file(path: Path, column: str) -> Part:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: expected documents; remove the file")
    kind = _kind(path)
    if kind is None:
        raise ValueError(f"{path}: expected files {KINDS}, got {path.suffix or 'no suffix'!r}")
    if kind == "text":
        return partial(_one, str(path), partial(_read_text, path))
    return partial(_lines if kind == "lines" else _parquet, path, column)


def _one(where: str, load: Callable[[], str], start: int) -> Iterator[Entry]:
    if start == 0:
        yield Entry(0, where, load)


def _read_text(path: Path) -> str:
    with _opened(path) as file:
        return _decode(file.read(), str(path))


def _lines(path: Path, column: str, start: int) -> Iterator[Entry]:
    offset = 0
    with _opened(path) as file:
        for number, line in enumerate(file):
            if number >= start and line.strip():
                where = f"{path}:{number + 1}"
                yield Entry(number, where, partial(_record, line, where, offset))
            offset += len(line)


def _record(line: bytes, where: str, offset: int) -> dict[str, Any]:
    text = _decode(line, where, offset)
    try:
        record = parse_json(text)
    except ValueError as error:
        damage = str(error)
        if isinstance(error, json.JSONDecodeError):
            damage = f"{error.msg} at column {error.colno}"
        raise ValueError(
            f"{where}: broken JSON: {damage}; expected one object a line: repair or remove it "
            "(`jq -c . FILE` rewrites an indented file)"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{where}: expected an object with columns, got {type(record).__name__}; an array's "
            "elements are put on lines of their own by `jq -c '.[]' FILE`"
        )
    return record


def _parquet(path: Path, column: str, start: int) -> Iterator[Entry]:
    arrow, parquet = _package("pyarrow"), _package("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, column, str(path))
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= start:
                    number += rows
                    continue
                batches = file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=columns)
                for record in (record for batch in batches for record in batch.to_pylist()):
                    if number >= start:
                        yield Entry(number, f"{path}, row {number + 1}", partial(dict, record))
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _saved(path: Path, column: str, start: int) -> Iterator[Entry]:
    load = _package("datasets").load_from_disk
    try:
        dataset = load(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    dataset = dataset.select_columns(_columns(dataset.column_names, column, str(path)))
    for number in range(start, len(dataset)):
        where = f"{path}, row {number + 1}"
        yield Entry(number, where, partial(dataset.__getitem__, number))


def _streamed(source: str, column: str, start: int) -> Iterator[Entry]:
    name, _, split = source.partition(":")[2].partition("@")
    name, _, config = name.partition(",")
    load = _package("datasets").load_dataset
    try:
        dataset = load(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cannot read {source}: {error}; expected hub:NAME[,CONFIG][@SPLIT]"
        ) from error
    for number, record in enumerate(dataset.skip(start) if start else dataset, start):
        yield Entry(number, f"{source}, row {number + 1}", partial(dict, record))


def _columns(names: Sequence[str], column: str, where: str) -> list[str]:
    """The columns to read: tokens if there are any, or the text."""
    if "input_ids" in names:
        return [name for name in ("input_ids", "labels") if name in names]
    if column in names:
        return [column]
    raise ValueError(
        f"{where} has no column {column!r}{meant(column, names)}: it has "
        f"{', '.join(map(repr, names)) or 'none'}; say text_column: NAME"
    )


def _text(record: dict[str, Any], column: str, where: str) -> str:
    text = record[_columns([n for n in record if n != "input_ids"], column, where)[0]]
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text in {column!r}, got {type(text).__name__}")
    return text


def _integers(values: Any, column: str, where: str) -> torch.Tensor:
    try:
        tensor = torch.tensor(values)
        if tensor.numel() == 0 or (tensor.dim() == 1 and tensor.dtype == torch.int64):
            return tensor.long().flatten()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"{where}: expected a list of whole numbers in {column!r}")


def _require_vocabulary(ids: torch.Tensor, size: int, where: str) -> None:
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise ValueError(
            f"{where}: expected input_ids of 0 to {size - 1}, got {outside[0].item()}: they come "
            "from another tokenizer; tokenise with the model's own"
        )


def _require_labels(labels: torch.Tensor, ids: torch.Tensor, size: int, where: str) -> None:
    if len(labels) != len(ids):
        raise ValueError(
            f"{where}: expected a label for each of {len(ids)} input_ids, got {len(labels)}; "
            f"{IGNORED} is for tokens without loss"
        )
    _require_vocabulary(labels[labels != IGNORED], size, f"{where}, labels")


def _decode(raw: bytes, where: str, offset: int = 0) -> str:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")  # Windows begins with a mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 at byte {offset + error.start:,} of the file: re-encode it, "
            "e.g. iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"cannot read {path}: {error}; copy or download it again")


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ValueError(
            f"this data needs the package {package}: pip install 'rope-patch[train]'"
        ) from error
