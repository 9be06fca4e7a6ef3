"""Read all documents of a recipe once: lengths in tokens, duplicates, a clean folder without them.

In come a recipe's keys for its data; out comes a `SourceSurvey` for each source. On request, the
documents that are no duplicates are written to a new folder while they are read.

Two documents are exact duplicates if their normalised texts are equal: in Unicode's NFKC, without
case, with single spaces. They are near duplicates if their sets of five words in a row overlap by a
Jaccard similarity of at least 0.8, estimated by MinHash (A. Broder, "On the resemblance and
containment of documents", 1997), with the library `datasketch`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.documents import compression_ratio, document_text, tokenize_document
from rope_patch.training.data.readers import DocumentRef, find_source
from rope_patch.utils import atomic_files
from rope_patch.utils.installation import install_hint
from rope_patch.utils.terminal import progress_bar


@dataclass
class SourceSurvey:
    """A source's documents.

    Attributes:
        name: The source, as the recipe names it.
        lengths: The documents' lengths in tokens, in order.
        is_kept: Of each document, whether its compression is within the recipe's bounds.
        is_complete: Whether all documents were read, rather than the first ones.
        duplicates: Those of its documents that were there before, in this source or another.
        duplicate_tokens: Tokens of the exact duplicates, and of the near ones.
    """

    name: str
    lengths: array[int] = field(default_factory=lambda: array("q"))
    is_kept: list[bool] = field(default_factory=list)
    is_complete: bool = True
    duplicates: list[Duplicate] = field(default_factory=list)
    duplicate_tokens: dict[str, int] = field(default_factory=lambda: {"exact": 0, "near": 0})

    @property
    def tokens(self) -> int:
        """Return the tokens of all documents."""
        return sum(self.lengths)

    def count_duplicates(self, *, exact: bool) -> int:
        """Return the number of exact or of near duplicates."""
        return sum(duplicate.is_exact == exact for duplicate in self.duplicates)


def read_sources(
    arguments: DataArguments,
    tokenizer: Any,
    *,
    limit: int | None = None,
    duplicates: bool = False,
    clean_folder: Path | None = None,
) -> list[SourceSurvey]:
    """Read all documents of a recipe's sources once.

    Args:
        arguments: The recipe's documents.
        tokenizer: The model's tokenizer.
        limit: The most documents to read of each source; None for all.
        duplicates: Whether to look for duplicates.
        clean_folder: A new folder for the documents that are no duplicates; None writes none.

    Returns:
        A survey of each source. A source that serves long and short rows is read once.

    Raises:
        ValueError: A source is missing, a document is damaged, the folder is not new, or the
            package datasketch is missing.
        OSError: The folder cannot be written.
    """
    names = list(dict.fromkeys([*arguments.data, *source_names(arguments, short=True)]))
    sources = {name: find_source(name, arguments.text_column) for name in names}
    finder = DuplicateFinder() if duplicates or clean_folder is not None else None
    surveys = []
    with ExitStack() as stack:
        writer = None
        if clean_folder is not None:
            writer = stack.enter_context(CleanFolder(clean_folder, names, arguments.text_column))
        for name, readers in sources.items():
            references = (reference for reader in readers for reference in reader.read())
            survey = SourceSurvey(name)
            for reference in _first(references, limit, survey):
                _add(survey, reference, arguments, tokenizer, finder, writer)
            if not survey.lengths:
                raise ValueError(f"no documents in {name!r}: expected at least one; leave it out")
            surveys.append(survey)
    return surveys


def source_names(arguments: DataArguments, *, short: bool) -> Sequence[str]:
    """Return the sources of the recipe's long rows or of its short rows."""
    if not short:
        return arguments.data
    return (arguments.short_data or arguments.data) if arguments.short_share else []


def _first(
    references: Iterator[DocumentRef], limit: int | None, survey: SourceSurvey
) -> Iterator[DocumentRef]:
    """Yield the first references, with a progress bar; note if there are more."""
    with progress_bar(total=limit, desc=survey.name, unit=" documents") as bar:
        for reference in islice(references, limit):
            yield reference
            bar.update()
        survey.is_complete = next(references, None) is None


def _add(
    survey: SourceSurvey,
    reference: DocumentRef,
    arguments: DataArguments,
    tokenizer: Any,
    finder: DuplicateFinder | None,
    writer: CleanFolder | None,
) -> None:
    """Read a document, and count it, compare it and write it."""
    loaded = reference.load()
    reference = reference._replace(load=lambda: loaded)
    document = tokenize_document(reference, tokenizer, arguments.text_column)
    length = len(document.ids)
    survey.lengths.append(length)
    low, high = arguments.compression_ratio or (0.0, math.inf)
    is_compared = arguments.compression_ratio is not None
    text = document_text(document, tokenizer) if finder is not None or is_compared else ""
    survey.is_kept.append(not is_compared or low <= compression_ratio(text) <= high)
    duplicate = None if finder is None else finder.check(text, reference.location)
    if duplicate is not None:
        survey.duplicates.append(duplicate)
        survey.duplicate_tokens["exact" if duplicate.is_exact else "near"] += length
    elif writer is not None:
        writer.write(survey.name, loaded)


THRESHOLD = 0.8  # Jaccard similarity of near duplicates
SHINGLE_WORDS = 5
_PERMUTATIONS = 128  # the estimate's standard deviation is 0.035 at the threshold
# Weights of false positives, which the estimate sorts out, and of false negatives.
_WEIGHTS = (0.1, 0.9)
_BATCH_SHINGLES = 8192  # shingles that are hashed at once: 8 MiB
# Scripts that have no spaces between words: each letter is a word. CJK, kana, Thai, Lao, Khmer.
_UNSPACED = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff\u0e00-\u0eff\u1780-\u17ff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Duplicate(NamedTuple):
    """A document that was there before.

    Attributes:
        location: Of the document.
        original: Location of the earlier one, which is no duplicate itself.
        similarity: Their Jaccard similarity: 1 if exact, else estimated.
        is_exact: Whether their normalised texts are equal.
    """

    location: str
    original: str
    similarity: float
    is_exact: bool


class DuplicateFinder:
    """Remembers documents, and says of later ones whether they are duplicates.

    It keeps some 4 KB for each document that is no duplicate.

    Raises:
        ValueError: The package datasketch is missing.
    """

    def __init__(self) -> None:
        datasketch = import_datasketch()
        self._empty = datasketch.MinHash(num_perm=_PERMUTATIONS)
        self._index = datasketch.MinHashLSH(
            threshold=THRESHOLD, num_perm=_PERMUTATIONS, weights=_WEIGHTS
        )
        self._locations: dict[bytes, str] = {}  # by the normalised text's digest
        self._originals: list[tuple[str, Any]] = []

    def check(self, text: str, location: str) -> Duplicate | None:
        """Return the duplicate that a document is, or None, and remember it then.

        Args:
            text: The document's text.
            location: Where it is.
        """
        normalised = normalise(text)
        digest = hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16)
        original = self._locations.get(digest.digest())
        if original is not None:
            return Duplicate(location, original, 1.0, is_exact=True)
        signature, duplicate = self._signature(normalised), None
        if signature is not None:
            duplicate = self._nearest(signature, location)
        if duplicate is None:
            self._locations[digest.digest()] = location
            if signature is not None:
                self._index.insert(len(self._originals), signature, check_duplication=False)
                self._originals.append((location, signature))
        return duplicate

    def _nearest(self, signature: Any, location: str) -> Duplicate | None:
        """Return the near duplicate with the most similar of the earlier documents."""
        similarity, original = 0.0, ""
        for key in sorted(self._index.query(signature)):
            candidate, other = self._originals[key]
            estimate = signature.jaccard(other)
            if estimate > similarity:
                similarity, original = estimate, candidate
        if similarity < THRESHOLD:
            return None
        return Duplicate(location, original, similarity, is_exact=False)

    def _signature(self, normalised: str) -> Any:
        """Return a text's MinHash, or None if it has no words."""
        signature, found = self._empty.copy(), shingles(normalised)
        is_empty = True
        while batch := set(islice(found, _BATCH_SHINGLES)):
            signature.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in batch])
            is_empty = False
        return None if is_empty else signature


def normalise(text: str) -> str:
    """Return a text in NFKC, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(normalised: str) -> Iterator[str]:
    """Yield each five words in a row of a normalised text, or all words of a shorter one."""
    words = _WORD.findall(normalised)
    if words:
        for first in range(max(1, len(words) - SHINGLE_WORDS + 1)):
            yield " ".join(words[first : first + SHINGLE_WORDS])


def import_datasketch() -> Any:
    """Return the module datasketch.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return import_module("datasketch")
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which the search for duplicates needs: "
            f"{install_hint('train')}"
        ) from error


_SUFFIX = re.compile(r"\.(jsonl|json|txt|md|parquet)(\.gz)?$", re.IGNORECASE)


class CleanFolder:
    """Writes documents of several sources to a new folder.

    As a context: the folder appears at the end of the `with`, or not at all if that fails.

    Args:
        folder: The folder: missing or empty, since nothing is overwritten.
        sources: Names of the sources.
        text_column: The column in which texts are written.

    Raises:
        ValueError: The folder holds something; see `atomic_files.require_new_folder`.
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, sources: Sequence[str], text_column: str) -> None:
        atomic_files.require_new_folder(folder, "the documents")
        self.folder, self._column = folder, text_column
        self._names = file_names(sources)
        self._stack = ExitStack()

    def __enter__(self) -> CleanFolder:
        """Make the temporary folder beside the final one."""
        parent = self.folder.absolute().parent
        with atomic_files.explain_write_errors(self.folder, "the documents"):
            parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=parent)
            self._temporary = Path(temporary)
            self._stack.callback(shutil.rmtree, self._temporary, ignore_errors=True)
            self._files: dict[str, IO[str]] = {
                source: self._open(name) for source, name in self._names.items()
            }
        return self

    def _open(self, name: str) -> IO[str]:
        path = self._temporary / name
        return self._stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))

    def write(self, source: str, document: str | dict[str, Any]) -> None:
        """Write a document: its text, or its record.

        Raises:
            OSError: The disk is full or fails.
        """
        record = {self._column: document} if isinstance(document, str) else document
        with atomic_files.explain_write_errors(self.folder, self._names[source]):
            self._files[source].write(_json_line(record))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Move the folder into place, or remove what was written."""
        with self._stack:
            if error is None:
                with atomic_files.explain_write_errors(self.folder, "the documents"):
                    self._publish()

    def _publish(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        umask = os.umask(0)
        os.umask(umask)
        self._temporary.chmod(0o777 & ~umask)  # mkdtemp's is for its owner alone
        if self.folder.exists():
            self.folder.rmdir()  # fails if something was put there meanwhile
        self._temporary.rename(self.folder)


def file_names(sources: Sequence[str]) -> dict[str, str]:
    """Return a file name for each source, all different."""
    names: dict[str, str] = {}
    for source in sources:
        scheme, _, rest = source.partition(":")
        stem = rest if scheme in ("hub", "novels") else _SUFFIX.sub("", Path(source).name)
        stem = atomic_files.safe_filename(stem)
        used = {name.casefold() for name in names.values()}
        number, name = 1, f"{stem}.jsonl"
        while name.casefold() in used:
            number += 1
            name = f"{stem}-{number}.jsonl"
        names[source] = name
    return names


def _json_line(record: dict[str, Any]) -> str:
    try:
        line = json.dumps(record, ensure_ascii=False)
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 lacks
        line = json.dumps(record)
    return line + "\n"
