"""Packed rows of tokens for long-context fine-tuning: streamed, deterministic, exactly resumable.

Masked rows restart their positions at each document. transformers derives a mask from that only if
the model gets neither an attention mask nor a cache: call it with `use_cache=False`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from random import Random
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset, get_worker_info

from rope_patch.training.data.aggregation import TaskWeaver
from rope_patch.training.data.arguments import (
    DataArguments,
    check_data_arguments,
    ineffective_keys,
)
from rope_patch.training.data.best_fit import BestFitRows, Piece
from rope_patch.training.data.compression import document_text
from rope_patch.training.data.document_source import DocumentSource
from rope_patch.training.data.documents import IGNORED, TokenizedDocument, tokenize_document
from rope_patch.training.data.readers import DocumentRef
from rope_patch.training.data.row_positions import skipped_positions
from rope_patch.training.data.sources import find_source

_YIELD_KEYS = ("tokens", "padding", "documents", "cut")
_READ_KEYS = ("documents", "repetitive", "noisy", "questions")


class PackedRows(IterableDataset):
    """Endless rows of `row_length` tokens.

    Args:
        arguments: The documents, and how they are packed.
        tokenizer: The model's tokenizer.
        row_length: Tokens per row.
        trained_length: The model's trained length in tokens. It limits the pieces of a short row
            unless `arguments.short_length` is given.
        target_length: The length in tokens that positions skip to, with `positions: skip`.
        follows_length: Whether the model's rotation depends on the longest position in a row, which
            padding must not raise then.
        seed: Seed of the shuffling, and of the positions that skip.
        batch: Rows per process and batch.
        rank: This process; it gets the rows i with (i // batch) % world == rank.
        world: Processes that share the rows.

    Yields:
        A dict of `input_ids`, `labels` (transformers shifts them itself) and `position_ids`,
        `[row_length]` int64 each, and `row`: its `index` among all processes' rows, whether it is
        `short`, the `documents` in it, the `counts` of each source so far, and the `state` after
        it, for `resume`.

    Raises:
        ValueError: An argument is invalid or a source is missing; during iteration: a document is
            damaged.
    """

    def __init__(
        self,
        arguments: DataArguments,
        tokenizer: Any,
        *,
        row_length: int,
        trained_length: int,
        target_length: int | None = None,
        follows_length: bool = False,
        seed: int,
        batch: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_data_arguments(arguments, row_length)
        if arguments.joins_documents and tokenizer.eos_token_id is None:
            raise ValueError(
                f"packing {arguments.packing} needs an end token: set tokenizer.eos_token"
            )
        if arguments.aggregation_share and not hasattr(tokenizer, "decode"):
            raise ValueError(
                "aggregation_share asks about documents' texts, which this tokenizer cannot "
                "decode: leave it out"
            )
        self._arguments, self._tokenizer, self._row_length = arguments, tokenizer, row_length
        short_length = arguments.short_length
        self._short_length = (
            min(trained_length, row_length) if short_length is None else short_length
        )
        self._target_length = row_length if target_length is None else target_length
        self._padding_limit = trained_length if follows_length else None
        self._seed, self._batch, self._rank, self._world = seed, batch, rank, world
        self._short_share = Fraction(
            str(arguments.short_share)
        )  # exactly 0.1, not the nearest float
        short = (arguments.short_data or arguments.data) if self._short_share else []
        self._readers = {
            (kind, name): find_source(name, arguments.text_column)
            for kind, names in (("long", arguments.data), ("short", short))
            for name in names
        }
        self._state: dict[str, Any] | None = None
        self._first_row = 0

    def resume(self, state: dict[str, Any], row: int) -> None:
        """Continue another run from the next iteration on.

        Args:
            state: A row's `state`, also after a round trip through JSON.
            row: Index of the first row to yield; rows between the state and it are discarded.

        Raises:
            ValueError: The state belongs to other settings, or is later than the row.
        """
        current_settings = self._row_settings()
        for key in sorted(current_settings.keys() | state["settings"].keys()):
            current, stored = current_settings.get(key), state["settings"].get(key)
            if current != stored:
                raise ValueError(f"cannot resume: {key} was {stored}, got {current}: set it back")
        if row < state["row"]:
            raise ValueError(f"cannot resume at row {row}: the state is of row {state['row']}")
        self._state, self._first_row = state, row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this process's rows."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"expected dataloader_num_workers of 0 or 1, got {worker.num_workers}: rows follow "
                "from those before, several workers would each make all of them"
            )
        sources = self._make_sources()
        best_fit = self._make_best_fit_rows(sources["long"])
        row_yield = dict.fromkeys(_YIELD_KEYS, 0)
        row_yield.update({} if self._state is None else self._state.get("row_yield", {}))
        for index in itertools.count(0 if self._state is None else self._state["row"]):
            row = self._make_row(index, sources, best_fit, row_yield)
            if index >= self._first_row and (index // self._batch) % self._world == self._rank:
                yield row

    def _row_settings(self) -> dict[str, Any]:
        """Return what the rows depend on; only the number of sources, since folders may move."""
        settings = asdict(self._arguments) | {"row_length": self._row_length, "seed": self._seed}
        for kind, key in (("long", "data"), ("short", "short_data")):
            settings[key] = f"{sum(k == kind for k, _ in self._readers)} sources"
        if self._arguments.positions == "skip":
            settings["target_length"] = self._target_length
        for key in ineffective_keys(self._arguments):
            del settings[key]
        return settings | {"short_length": self._short_length}

    def _make_sources(self) -> dict[str, list[DocumentSource]]:
        a = self._arguments
        sources: dict[str, list[DocumentSource]] = {"long": [], "short": []}
        for (kind, name), readers in self._readers.items():
            seed = f"{self._seed} {kind} {len(sources[kind])}"
            source = DocumentSource(name, readers, self._encode, a.shuffle_window, seed)
            source.quiet = self._rank > 0
            if kind == "long":
                single = a.packing == "single"
                source.min_tokens = max(self._row_length if single else 1, a.min_document_length)
                source.too_short_hint = "a lower min_document_length"
                source.ratio_bounds = a.compression_ratio
                source.read_text = self._text
                if a.aggregation_share:
                    tasks, share = a.aggregation_tasks, a.aggregation_share
                    source.weaver = TaskWeaver(self._tokenizer, tasks, share, f"{seed} tasks")
                if source.min_tokens == self._row_length and single:
                    source.too_short_hint = "a shorter train_length, packing: concatenate"
            if self._state is not None:
                source.state.update(self._state[kind][len(sources[kind])])
            sources[kind].append(source)
        return sources

    def _encode(self, document: DocumentRef) -> TokenizedDocument:
        return tokenize_document(document, self._tokenizer, self._arguments.text_column)

    def _text(self, document: TokenizedDocument) -> str:
        return document_text(document, self._tokenizer)

    def _make_best_fit_rows(self, sources: list[DocumentSource]) -> BestFitRows | None:
        """Return the long rows' packing where whole documents are chosen for them."""
        a = self._arguments
        if not a.is_best_fit:
            return None
        return BestFitRows(
            lambda limit: _most_underserved(sources, a.data_weights).take(limit, whole=False),
            lambda: [dict(source.state) for source in sources],
            row_length=self._row_length,
            window=a.packing_window,
            seed=str(self._seed),
            **({} if self._state is None else self._state["window"]),
        )

    def _make_row(
        self,
        index: int,
        sources: dict[str, list[DocumentSource]],
        best_fit: BestFitRows | None,
        row_yield: dict[str, int],
    ) -> dict[str, Any]:
        a, share = self._arguments, self._short_share
        short = (index + 1) * share // 1 > index * share // 1
        masked, kind = short or a.masks_documents, "short" if short else "long"
        if best_fit is not None and not short:
            pieces = best_fit.next_row()
        else:
            pieces = self._take_pieces(sources[kind], short=short)
        size = sum(len(piece.ids) for piece in pieces)
        padding = self._row_length - size
        labels = torch.cat([piece.labels for piece in pieces])
        positions = torch.arange(self._row_length)
        if masked:
            positions = torch.cat([torch.arange(len(piece.ids)) for piece in pieces])
            labels[positions == 0] = IGNORED  # not predictable from the previous document
            positions = torch.cat([positions, self._padding_positions(pieces, padding)])
        elif a.positions == "skip":
            positions = skipped_positions(
                self._row_length, self._target_length, Random(f"{self._seed} positions {index}")
            )
        row_yield["tokens"] += size
        row_yield["padding"] += padding
        row_yield["documents"] += sum(piece.begins for piece in pieces)
        row_yield["cut"] += sum(piece.is_cut for piece in pieces)
        state: dict[str, Any] = {
            kind: [dict(s.state) for s in kind_sources] for kind, kind_sources in sources.items()
        }
        # Ahead of the state to resume from, if a window of documents is read before its first row.
        state["long_counts"] = {
            key: sum(source.state[key] for source in sources["long"]) for key in _READ_KEYS
        }
        if best_fit is not None:
            state["long"], state["window"] = best_fit.state()
        state |= {"row": index + 1, "row_yield": dict(row_yield), "settings": self._row_settings()}
        names = {"long": "", "short": "short: "}
        info = {
            "index": index,
            "short": short,
            "targets": int((labels[1:] != IGNORED).sum()),
            "documents": list(dict.fromkeys(piece.location for piece in pieces)),
            "counts": {names[k] + s.name: s.counts() for k in names for s in sources[k]},
            "state": state,
        }
        ids = torch.cat([piece.ids for piece in pieces])
        return {
            "input_ids": functional.pad(ids, (0, padding), value=self._padding_token()),
            "labels": functional.pad(labels, (0, padding), value=IGNORED),
            "position_ids": positions,
            "row": info,
        }

    def _take_pieces(self, sources: list[DocumentSource], *, short: bool) -> list[Piece]:
        """Return a row's pieces, one after another."""
        a = self._arguments
        weights = None if short and a.short_data is not None else a.data_weights
        whole = not short and a.packing == "single"
        pieces: list[Piece] = []
        while room := self._row_length - sum(len(piece.ids) for piece in pieces):
            limit = min(room, self._short_length) if short else room
            pieces.append(_most_underserved(sources, weights).take(limit, whole=whole))
        return pieces

    def _padding_positions(self, pieces: list[Piece], padding: int) -> torch.Tensor:
        """Return positions that continue the last document, so that no mask has one more document.

        Where the rotation follows a row's longest position, they start anew at that of its longest
        document, or at the trained length if that is more.
        """
        positions = torch.arange(padding) + len(pieces[-1].ids)
        if self._padding_limit is None:
            return positions
        return positions % max(self._padding_limit, *(len(piece.ids) for piece in pieces))

    def _padding_token(self) -> int:
        for token in (getattr(self._tokenizer, "pad_token_id", None), self._tokenizer.eos_token_id):
            if token is not None:
                return token
        return 0  # never seen by a document


def _most_underserved(sources: list[DocumentSource], weights: list[float] | None) -> DocumentSource:
    """Return the source furthest behind its share of the tokens; the first of equals."""
    weights = weights or [1.0] * len(sources)
    tokens_per_weight = sum(source.state["tokens"] for source in sources) / sum(weights)
    deficits = [
        w * tokens_per_weight - s.state["tokens"] for w, s in zip(weights, sources, strict=True)
    ]
    return sources[deficits.index(max(deficits))]


def collate(rows: list[dict[str, Any]], *, has_gaps: bool = False) -> dict[str, Any]:
    """Stack rows into a batch.

    Args:
        rows: Rows that `PackedRows` yielded.
        has_gaps: Whether positions have gaps: skipped ones, or those between the spans that a
            process gets under context parallelism. Adds an `attention_mask` of ones, without which
            transformers takes a gap for the border of two packed documents.

    Returns:
        The tensors `[B, S]`, and under `rows` each row's `row`.
    """
    batch: dict[str, Any] = {
        key: torch.stack([row[key] for row in rows])
        for key in ("input_ids", "labels", "position_ids")
    }
    # The first token has no predecessor, yet some transformers versions count it as a target.
    batch["labels"][:, 0] = IGNORED
    if has_gaps:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch | {"rows": [row["row"] for row in rows]}
