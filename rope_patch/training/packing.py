"""Rows of tokens for fine-tuning on long contexts: streamed, deterministic, resumed exactly.

Masked rows restart their positions with each document. transformers reads that as a mask only
where the model gets neither an attention mask nor a cache: call it with `use_cache=False`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from rope_patch.training.documents import (
    IGNORED,
    DocumentRef,
    SourcePart,
    TokenizedDocument,
    did_you_mean,
    find_source,
    tokenize,
)

PACKINGS = ("single", "concatenate", "masked")
_POSITION_KEYS = ("epoch", "part", "record", "taken", "offset", "length", "accepted", "longest")
_COUNT_KEYS = ("documents", "tokens", "left_out", "left_out_tokens")
_logger = logging.getLogger("rope_patch")


@dataclass
class DataArguments:
    """Which documents, and how rows are made of them."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Long documents: files (.txt and .md: one each; .jsonl, .parquet), folders, "
            "globs, hub:NAME[,CONFIG][@SPLIT], novels:NAME."
        },
    )
    data_weights: list[float] | None = field(
        default=None, metadata={"help": "Each source's share of tokens; equal if left out."}
    )
    short_data: list[str] | None = field(
        default=None, metadata={"help": "Documents of the short rows; data if left out."}
    )
    short_share: float = field(
        default=0.0, metadata={"help": "Share of rows that are packed of short documents."}
    )
    short_length: int | None = field(
        default=None, metadata={"help": "Tokens of the longest of those; the trained length."}
    )
    packing: str = field(
        default="single",
        metadata={
            "help": "single: a row is a slice of one document; concatenate: documents one after "
            "another; masked: the same, each keeps to itself."
        },
    )
    min_document_length: int = field(
        default=0, metadata={"help": "Leave out documents of fewer tokens."}
    )
    text_column: str = field(
        default="text",
        metadata={"help": "Where records have their text, unless they have input_ids."},
    )
    shuffle_window: int = field(
        default=0, metadata={"help": "Shuffle documents among so many; 0 keeps their order."}
    )

    def __post_init__(self) -> None:
        """A recipe may name one source without brackets."""
        self.data = [self.data] if isinstance(self.data, str) else self.data
        if isinstance(self.short_data, str):
            self.short_data = [self.short_data]


def check_data_arguments(arguments: DataArguments, row_length: int) -> None:
    """Checks what can be checked without reading.

    Raises:
        ValueError: Says which argument is wrong, and what it may be.
    """
    a = arguments
    for name, sources in (("data", a.data), ("short_data", a.short_data)):
        if sources is not None and not sources:
            raise ValueError(f"no documents: say {name}: a list of files, folders or novels:emma")
        if twice := sorted({s for s in sources or [] if (sources or []).count(s) > 1}):
            raise ValueError(f"{name} names {twice[0]!r} twice: say data_weights instead")
    if a.packing not in PACKINGS:
        hint = did_you_mean(a.packing, PACKINGS)
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {a.packing!r}{hint}")
    if not 0 <= a.short_share < 1:
        raise ValueError(f"short_share must be at least 0 and below 1, got {a.short_share}")
    if a.data_weights is not None and len(a.data_weights) != len(a.data):
        raise ValueError(
            f"expected a data_weights for each of {len(a.data)} sources in data, got "
            f"{len(a.data_weights)}"
        )
    if any(not 0 < weight < float("inf") for weight in a.data_weights or []):
        raise ValueError(f"data_weights must be above 0, got {a.data_weights}: leave a source out")
    if a.short_length is not None and not 0 < a.short_length <= row_length:
        raise ValueError(
            f"short_length must be 1 to {row_length}, the tokens of a row, got {a.short_length}"
        )
    for name in ("min_document_length", "shuffle_window"):
        if getattr(a, name) < 0:
            raise ValueError(f"{name} must be at least 0, got {getattr(a, name)}")


def require_no_document_masks(arguments: DataArguments) -> None:
    """Refuses rows that need a mask between documents, for torch's context parallelism.

    Raises:
        ValueError: There are such rows.
    """
    if arguments.packing == "masked" or arguments.short_share > 0:
        raise ValueError(
            "documents packed in a row would see each other under torch's context parallelism, "
            "which takes no mask: expected packing single or concatenate and short_share 0, or "
            f"sequence parallelism with flash attention; got packing {arguments.packing} and "
            f"short_share {arguments.short_share:g}"
        )


class _DocumentSource:
    """A source's documents without end; `state` says which token of which is the next."""

    def __init__(
        self, name: str, parts: list[SourcePart], encode: Any, window: int, seed: str
    ) -> None:
        self.name, self.min_tokens, self.too_short_hint, self.quiet = (
            name,
            1,
            "other documents",
            True,
        )
        self.state = dict.fromkeys(_POSITION_KEYS + _COUNT_KEYS, 0)
        self._parts, self._encode, self._window, self._seed = parts, encode, window, seed
        self._documents = self._read_documents()
        self._document: TokenizedDocument | None = None

    def take(self, limit: int, whole: bool) -> TokenizedDocument:
        """The next tokens of a document, `limit` of them or (unless `whole`) up to its end."""
        state = self.state
        while self._document is None or state["length"] - state["offset"] < (limit if whole else 1):
            self._document = next(self._documents)
        cut = slice(state["offset"], state["offset"] + limit)
        piece = TokenizedDocument(
            self._document.location, self._document.ids[cut], self._document.labels[cut]
        )
        state["offset"] += len(piece.ids)
        state["tokens"] += len(piece.ids)
        return piece

    def counts(self) -> dict[str, int]:
        """What came of this source's documents so far, and how often it was read to its end."""
        return {key: self.state[key] for key in _COUNT_KEYS} | {"epochs": self.state["epoch"]}

    def _read_documents(self) -> Iterator[TokenizedDocument]:
        at = self.state
        while True:
            for at["part"], at["record"], at["taken"], entry in self._entries():
                document = self._encode(entry)
                size = len(document.ids)
                if not at["length"]:
                    at["longest"] = max(at["longest"], size)
                    if size < self.min_tokens:
                        at["left_out"] += 1
                        at["left_out_tokens"] += size
                        continue
                    at.update(
                        length=size, documents=at["documents"] + 1, accepted=at["accepted"] + 1
                    )
                elif at["length"] != size:
                    raise ValueError(
                        f"cannot resume: {document.where} has {size:,} tokens, it had "
                        f"{at['length']:,} when the run was saved: bring back the data and the "
                        "tokenizer of that run, or start anew"
                    )
                yield document
                at["left_out_tokens"] += size - at["offset"]
                at["length"] = at["offset"] = 0
            self._end_epoch()

    def _entries(self) -> Iterator[tuple[int, int, int, DocumentRef]]:
        """This epoch's entries from where the state is, with what leads back to each."""
        first, record, skipped = (self.state[key] for key in ("part", "record", "taken"))
        salt, order = f"{self._seed} {self.state['epoch']}", list(range(len(self._parts)))
        if self._window:
            Random(salt).shuffle(order)
        entries = (
            (part, entry)
            for part in range(first, len(order))
            for entry in self._parts[order[part]](record if part == first else 0)
        )
        # Shuffled in blocks: a block's first entry and a number within it lead back to any entry.
        while block := list(itertools.islice(entries, max(1, self._window))):
            part, record_of_block = block[0][0], block[0][1].number
            if self._window:
                Random(f"{salt} {part} {record_of_block}").shuffle(block)
            for taken in range(skipped, len(block)):
                yield part, record_of_block, taken, block[taken][1]
            skipped = 0

    def _end_epoch(self) -> None:
        at = self.state
        if not at["accepted"] and not at["left_out"]:
            raise ValueError(f"no documents in {self.name!r}: expected at least one; leave it out")
        fix = (
            f"{self.too_short_hint}, or longer documents (the longest has {at['longest']:,} tokens, expected "
            f"{self.min_tokens:,})"
        )
        if not at["accepted"]:
            raise ValueError(f"no row from {self.name!r}, all is too short: say {fix}")
        if at["epoch"] == 0 and not self.quiet:
            if at["left_out"]:
                _logger.warning(
                    "%s: %d of %d documents were too short and left out; to use them, say %s",
                    self.name, at["left_out"], at["left_out"] + at["documents"], fix,
                )  # fmt: skip
            _logger.warning("%s: all documents were used, its second epoch begins", self.name)
        at.update(epoch=at["epoch"] + 1, part=0, record=0, taken=0, accepted=0)


class PackedRows(IterableDataset):
    """Endless rows of `row_length` tokens.

    Args:
        arguments: Which documents, and how they are packed.
        tokenizer: The model's.
        row_length: Tokens of a row.
        trained_length: Tokens of the model's pretraining: the longest document of a short row,
            unless the arguments say another.
        seed: Of the shuffling.
        batch: Rows that one process takes at a time.
        rank: Which process this is; it gets the rows i with (i // batch) % world == rank.
        world: How many processes share the rows.

    Yields:
        A dict of `input_ids`, `labels` (transformers shifts them itself) and `position_ids`,
        `[row_length]` int64 each, and `row`: its `index` among all processes' rows, the
        `documents` it is made of, the `counts` of each source so far, and the `state` after it,
        which `resume` takes.

    Raises:
        ValueError: Arguments that cannot be, or a source that is not there; later, as rows are
            made, a damaged document.
    """

    def __init__(
        self,
        arguments: DataArguments,
        tokenizer: Any,
        *,
        row_length: int,
        trained_length: int,
        seed: int,
        batch: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_data_arguments(arguments, row_length)
        if arguments.packing == "concatenate" and tokenizer.eos_token_id is None:
            raise ValueError("packing concatenate needs an end token: set tokenizer.eos_token")
        self._arguments, self._tokenizer, self._row_length = arguments, tokenizer, row_length
        self._short_length = arguments.short_length or min(trained_length, row_length)
        self._seed, self._batch, self._rank, self._world = seed, batch, rank, world
        self._short_share = Fraction(str(arguments.short_share))  # 0.1 is meant exactly
        short = (arguments.short_data or arguments.data) if self._short_share else []
        self._source_parts = {
            (kind, name): find_source(name, arguments.text_column)
            for kind, names in (("long", arguments.data), ("short", short))
            for name in names
        }
        self._state: dict[str, Any] | None = None
        self._first_row = 0

    def resume(self, state: dict[str, Any], row: int) -> None:
        """Goes on where another run was, from the next iteration on.

        Args:
            state: A row's `state`; it may have been through JSON.
            row: The first row to come, by its index; those since the state are made and dropped.

        Raises:
            ValueError: The state is of rows made in another way, or is later than the row.
        """
        now = self._row_settings()
        for key in sorted(now.keys() | state["settings"].keys()):
            if now.get(key) != (was := state["settings"].get(key)):
                raise ValueError(f"cannot resume: {key} was {was}, got {now.get(key)}: set it back")
        if row < state["row"]:
            raise ValueError(f"cannot resume at row {row}: the state is of row {state['row']}")
        self._state, self._first_row = state, row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Makes this process's rows."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"expected dataloader_num_workers of 0 or 1, got {worker.num_workers}: rows follow "
                "from those before, several workers would each make all of them"
            )
        sources = self._make_sources()
        for index in itertools.count(0 if self._state is None else self._state["row"]):
            row = self._make_row(index, sources)
            if index >= self._first_row and (index // self._batch) % self._world == self._rank:
                yield row

    def _row_settings(self) -> dict[str, Any]:
        """What the rows depend on; of sources their number, as folders may have moved."""
        settings = asdict(self._arguments) | {"row_length": self._row_length, "seed": self._seed}
        for kind, key in (("long", "data"), ("short", "short_data")):
            settings[key] = f"{sum(k == kind for k, _ in self._source_parts)} sources"
        return settings | {"short_length": self._short_length}

    def _make_sources(self) -> dict[str, list[_DocumentSource]]:
        a = self._arguments
        sources: dict[str, list[_DocumentSource]] = {"long": [], "short": []}
        encoded = partial(tokenize, tokenizer=self._tokenizer, text_column=a.text_column)
        for (kind, name), parts in self._source_parts.items():
            seed = f"{self._seed} {kind} {len(sources[kind])}"
            source = _DocumentSource(name, parts, encoded, a.shuffle_window, seed)
            source.quiet = self._rank > 0
            if kind == "long":
                single = a.packing == "single"
                source.min_tokens = max(self._row_length if single else 1, a.min_document_length)
                source.too_short_hint = "a lower min_document_length"
                if source.min_tokens == self._row_length and single:
                    source.too_short_hint = "a shorter train_length, packing: concatenate"
            if self._state is not None:
                source.state.update(self._state[kind][len(sources[kind])])
            sources[kind].append(source)
        return sources

    def _make_row(self, index: int, sources: dict[str, list[_DocumentSource]]) -> dict[str, Any]:
        a, share = self._arguments, self._short_share
        short = (index + 1) * share // 1 > index * share // 1
        masked, kind = short or a.packing == "masked", "short" if short else "long"
        weights = a.data_weights if kind == "long" or a.short_data is None else None
        pieces: list[TokenizedDocument] = []
        while room := self._row_length - sum(len(piece.ids) for piece in pieces):
            most = min(room, self._short_length) if short else room
            source = _most_underserved(sources[kind], weights)
            pieces.append(source.take(most, whole=not masked and a.packing == "single"))
        labels = torch.cat([piece.labels for piece in pieces])
        positions = torch.arange(self._row_length)
        if masked:
            positions = torch.cat([torch.arange(len(piece.ids)) for piece in pieces])
            labels[positions == 0] = IGNORED  # not to be told by the document before
        state = {kind: [dict(s.state) for s in found] for kind, found in sources.items()}
        names = {"long": "", "short": "short: "}
        info = {
            "index": index,
            "documents": list(dict.fromkeys(piece.location for piece in pieces)),
            "counts": {names[k] + s.name: s.counts() for k in names for s in sources[k]},
            "state": state | {"row": index + 1, "settings": self._row_settings()},
        }
        ids = torch.cat([piece.ids for piece in pieces])
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "row": info}


def _most_underserved(
    sources: list[_DocumentSource], weights: list[float] | None
) -> _DocumentSource:
    """The source that is furthest behind its share of the tokens so far; the first of equals."""
    weights = weights or [1.0] * len(sources)
    each = sum(source.state["tokens"] for source in sources) / sum(weights)
    behind = [w * each - s.state["tokens"] for w, s in zip(weights, sources, strict=True)]
    return sources[behind.index(max(behind))]


def collate(rows: list[dict[str, Any]], *, context_parallel: bool = False) -> dict[str, Any]:
    """Stacks rows.

    Args:
        rows: Of `PackedRows`.
        context_parallel: Adds an `attention_mask` of ones: without one, transformers takes the
            gaps in the positions of a sequence's shard for packed documents, and makes an S x S
            mask.

    Returns:
        The tensors `[B, S]`, and as `rows` what each row said of itself.
    """
    batch: dict[str, Any] = {
        key: torch.stack([row[key] for row in rows])
        for key in ("input_ids", "labels", "position_ids")
    }
    # No token comes before the first: some versions of transformers count it as a target.
    batch["labels"][:, 0] = IGNORED
    if context_parallel:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch | {"rows": [row["row"] for row in rows]}
