"""Survey of a recipe's documents: each source's lengths in tokens, and which are duplicates."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.compression import compression_ratio, document_text
from rope_patch.training.data.documents import tokenize_document
from rope_patch.training.data.readers import DocumentRef
from rope_patch.training.data.sources import find_source
from rope_patch.training.inspection.clean_folder import CleanFolder
from rope_patch.training.inspection.duplicates import Duplicate, DuplicateFinder
from rope_patch.utils.progress import progress_bar


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
