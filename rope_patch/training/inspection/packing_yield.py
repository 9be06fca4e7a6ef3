"""Rows that a pass over a source gives, and the documents that they cut, by the real packing.

`PackedRows` packs documents of the same lengths, whose tokens are their own numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
        tokens: Tokens in them.
        whole: Documents that lie in one row and in one piece.
        cut: Documents of which a part lies in another row or piece, or in none.
        left_out: Documents that are too short for the packing.
        left_out_tokens: Tokens of those, and ends of cut documents, that no row has.
        unfinished_tokens: Tokens at the end that do not fill a row, to which the next pass adds.
    """

    rows: int
    tokens: int
    whole: int
    cut: int
    left_out: int
    left_out_tokens: int
    unfinished_tokens: int


def packing_yield(
    arguments: DataArguments,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    row_length: int,
    trained_length: int,
    seed: int,
    short: bool = False,
) -> PackingYield:
    """Return what one pass over a source's documents gives.

    Args:
        arguments: How the recipe packs.
        tokenizer: The model's tokenizer.
        lengths: The documents' lengths in tokens.
        row_length: Tokens per row.
        trained_length: The model's trained length in tokens.
        seed: Seed of the shuffling.
        short: Whether the source is for short rows.
    """
    alone = replace(arguments, data=[_NAME], data_weights=None, short_data=None)
    alone = replace(alone, short_share=0.0, positions="consecutive")
    rows = _LengthRows(
        alone,
        tokenizer,
        lengths,
        row_length=row_length,
        trained_length=trained_length,
        seed=seed,
        short=short,
    )
    if max(lengths) < rows.min_tokens():  # of which `PackedRows` makes an error
        return PackingYield(0, 0, 0, 0, len(lengths), sum(lengths), 0)
    whole: set[int] = set()
    placed: set[int] = set()
    count = 0
    try:
        for row in rows:
            for document, size in _pieces(row):
                placed.add(document)
                if size == lengths[document]:
                    whole.add(document)
            count += 1
    except _PassEnded:
        pass
    state = rows.source.state
    return PackingYield(
        rows=count,
        tokens=count * row_length,
        whole=len(whole),
        cut=len(placed - whole),
        left_out=state["left_out"],
        left_out_tokens=state["left_out_tokens"],
        unfinished_tokens=state["tokens"] - count * row_length,
    )


class _PassEnded(Exception):
    """The second pass begins."""


class _LengthReader:
    """A reader of documents that only have lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._was_read = lengths, False

    def read(self, number: int = 0, cursor: Cursor | None = None) -> Iterator[DocumentRef]:
        if self._was_read:
            raise _PassEnded
        self._was_read = True
        for document, length in enumerate(self._lengths):
            load = partial(torch.full, (length,), document)
            yield DocumentRef(document, "", load, {})


class _LengthRows(PackedRows):
    """Rows of documents whose tokens are their own numbers."""

    def __init__(
        self, arguments: DataArguments, tokenizer: Any, lengths: Sequence[int], *, short: bool,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(arguments, tokenizer, **settings)
        kind = "short" if short else "long"
        self._readers = {(kind, _NAME): [_LengthReader(lengths)]}
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


def _pieces(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the document and the tokens of each piece of a row."""
    ids, positions = row["input_ids"], row["position_ids"]
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = (ids[1:] != ids[:-1]) | (positions[1:] == 0)
    first = starts.nonzero().flatten()
    sizes = torch.diff(first, append=torch.tensor([len(ids)]))
    return list(zip(ids[first].tolist(), sizes.tolist(), strict=True))
