"""Rows that a pass over a source gives, and the documents that they cut, by the real packing.

`PackedRows` packs empty documents of the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from rope_patch.training.data.arguments import DataArguments
from rope_patch.training.data.documents import TokenizedDocument
from rope_patch.training.data.packing import PackedRows
from rope_patch.training.data.readers import Cursor, DocumentRef

_NAME = "novels:emma"  # any source that exists: its reader is replaced


@dataclass(frozen=True)
class PackingYield:
    """What one pass over a source's documents gives.

    Attributes:
        rows: Full rows.
        tokens: Tokens of documents in them.
        padding: Tokens in them that are of no document.
        whole: Documents that lie in one row and in one piece.
        cut: Documents of which a part lies in another row or piece, or in none.
        left_out: Documents that are too short for the packing.
        filtered: Documents that `compression_ratio` leaves out.
        left_out_tokens: Tokens of those too short, and ends of cut documents, that no row has.
    """

    rows: int
    tokens: int
    padding: int
    whole: int
    cut: int
    left_out: int
    filtered: int
    left_out_tokens: int


def packing_yield(
    arguments: DataArguments,
    tokenizer: Any,
    lengths: Sequence[int],
    is_kept: Sequence[bool],
    *,
    row_length: int,
    trained_length: int,
    seed: int,
    short: bool = False,
) -> PackingYield:
    """Return what one pass over a source's documents gives.

    A row at the end that is not full counts for the next pass. Best-fit packing goes on until a
    window of it ends, and the numbers are scaled to one pass.

    Args:
        arguments: How the recipe packs.
        tokenizer: The model's tokenizer.
        lengths: The documents' lengths in tokens.
        is_kept: Of each document, whether `compression_ratio` keeps it. Short rows keep all.
        row_length: Tokens per row.
        trained_length: The model's trained length in tokens.
        seed: Seed of the shuffling.
        short: Whether the source is for short rows.
    """
    alone = DataArguments(
        data=[_NAME],
        packing=arguments.packing,
        packing_window=arguments.packing_window,
        short_length=arguments.short_length,
        min_document_length=arguments.min_document_length,
        shuffle_window=arguments.shuffle_window,
    )
    used = [n for n, kept in zip(lengths, is_kept, strict=True) if kept or short]
    rows = _EmptyRows(
        alone,
        tokenizer,
        used,
        row_length=row_length,
        trained_length=trained_length,
        seed=seed,
        short=short,
    )
    shortest = rows.min_tokens()
    short_documents = [length for length in lengths if length < shortest]
    left_out, left_out_tokens = len(short_documents), sum(short_documents)
    accepted = sum(length >= shortest for length in used)
    filtered = len(lengths) - left_out - accepted
    if not accepted:  # of which `PackedRows` makes an error
        return PackingYield(0, 0, 0, 0, 0, left_out, filtered, left_out_tokens)
    is_best_fit = alone.is_best_fit and not short
    row_yield = {"tokens": 0, "padding": 0, "documents": 0, "cut": 0}
    count = 0
    try:
        for count, row in enumerate(rows, start=1):  # noqa: B007 -- used after the loop
            state = row["row"]["state"]
            row_yield = state["row_yield"]
            if is_best_fit and rows.source.state["epoch"] and state["window"]["row"] == 0:
                break
    except _PassEnded:
        ends = rows.source.state["left_out_tokens"] - sum(n for n in used if n < shortest)
        left_out_tokens += ends
    scale = Fraction(accepted, row_yield["documents"]) if is_best_fit else 1
    return PackingYield(
        rows=round(count * scale),
        tokens=round(row_yield["tokens"] * scale),
        padding=round(row_yield["padding"] * scale),
        whole=round((row_yield["documents"] - row_yield["cut"]) * scale),
        cut=round(row_yield["cut"] * scale),
        left_out=left_out,
        filtered=filtered,
        left_out_tokens=left_out_tokens,
    )


class _PassEnded(Exception):
    """The second pass begins."""


class _LengthReader:
    """A reader of documents that only have lengths.

    Args:
        lengths: The documents' lengths.
        endless: Whether they can be read again.
    """

    def __init__(self, lengths: Sequence[int], *, endless: bool) -> None:
        self._lengths, self._endless = lengths, endless
        self._was_read = False

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        if self._was_read and not self._endless:
            raise _PassEnded
        self._was_read = True
        for document, length in enumerate(self._lengths):
            yield DocumentRef(document, "", partial(torch.zeros, length, dtype=torch.int64), {})


class _EmptyRows(PackedRows):
    """Rows of documents that only have lengths."""

    def __init__(
        self, arguments: DataArguments, tokenizer: Any, lengths: Sequence[int], *, short: bool,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(arguments, tokenizer, **settings)
        kind = "short" if short else "long"
        endless = arguments.is_best_fit and not short
        self._readers = {(kind, _NAME): [_LengthReader(lengths, endless=endless)]}
        self._short_share = Fraction(1 if short else 0)

    def min_tokens(self) -> int:
        """Return the tokens of the shortest document that is not left out."""
        self._make_sources()
        return self.source.min_tokens

    def _encode(self, document: DocumentRef) -> TokenizedDocument:
        ids = document.load()
        return TokenizedDocument(document.location, ids, ids)

    def _make_sources(self) -> dict[str, list[Any]]:
        sources = super()._make_sources()
        ((self.source,),) = (each for each in sources.values() if each)
        self.source.quiet = True
        return sources
