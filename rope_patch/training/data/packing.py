"""Pack documents into rows of tokens for fine-tuning: streamed, deterministic, exactly resumable.

In come a recipe's keys for its data, a tokenizer and a row length. Out comes an endless stream of
rows (`PackedRows`), each with the state that resumes the stream after it. Documents are read and
tokenised only as rows need them (`DocumentSource`).

Masked rows restart their positions at each document. transformers derives a mask from that only if
the model gets neither an attention mask nor a cache: call it with `use_cache=False`.

Best-fit packing (`BestFitRows`) puts whole documents into rows so that few are cut and little is
padding. Source: "Fewer Truncations Improve Language Modeling", arXiv:2404.10830; Olmo 3 packs its
long contexts so. Documents longer than a row are cut at row length first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset, get_worker_info

from rope_patch.training.data.aggregation import TaskWeaver
from rope_patch.training.data.arguments import DataArguments, check_data_arguments, ineffective_keys
from rope_patch.training.data.documents import (
    IGNORED,
    TokenizedDocument,
    compression_ratio,
    document_text,
    tokenize_document,
)
from rope_patch.training.data.readers import Cursor, DocumentRef, Reader, find_source

_YIELD_KEYS = ("tokens", "padding", "documents", "cut")
_READ_KEYS = ("documents", "repetitive", "noisy", "questions")


@dataclass(frozen=True)
class RowShare:
    """The rows that one of several processes trains on: batch by batch, in turn.

    Attributes:
        batch: Rows per process and batch.
        rank: The process.
        world: Processes that share the rows.
    """

    batch: int = 1
    rank: int = 0
    world: int = 1

    def has(self, index: int) -> bool:
        """Return whether a row is in the share."""
        return (index // self.batch) % self.world == self.rank


_ALL_ROWS = RowShare()


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
        share: This process's share of the rows.

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
        share: RowShare = _ALL_ROWS,
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
        self._seed, self._share = seed, share
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
            if index >= self._first_row and self._share.has(index):
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
            source.quiet = self._share.rank > 0
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
        """Return positions that continue the last document, so that masks see no other one."""
        positions = torch.arange(padding) + len(pieces[-1].ids)
        if self._padding_limit is None:
            return positions
        # The rotation follows a row's longest position: padding starts anew at that of the row's
        # longest document, or at the trained length if that is more.
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


def skipped_positions(row_length: int, target_length: int, random: Random) -> torch.Tensor:
    """Return positions that jump once, so that short rows have the distances of long ones.

    The positions of a row's second part are moved by a uniform number of tokens. The first part is
    at most half of the row. The text stays in one piece; PoSE's code also leaves out text there.

    Args:
        row_length: Tokens of the row.
        target_length: The positions stay below this, at least `row_length`.
        random: Source of both numbers.

    Returns:
        Rising positions, `[row_length]` int64.

    Source: PoSE, arXiv:2309.10400, with two parts, distributed as in its published code.
    """
    first_part = random.randint(1, (row_length + 1) // 2)
    positions = torch.arange(row_length)
    positions[first_part:] += random.randint(0, target_length - row_length)
    return positions


_POSITION_KEYS = ("epoch", "part", "record", "taken", "offset", "length", "accepted", "longest")
_COUNT_KEYS = (
    "documents",
    "tokens",
    "left_out",
    "left_out_tokens",
    "repetitive",
    "noisy",
    "questions",
)
_logger = logging.getLogger("rope_patch")


class DocumentSource:
    """An endless stream of a source's documents; `state` holds the next token's place."""

    def __init__(
        self, name: str, readers: list[Reader], encode: Any, window: int, seed: str
    ) -> None:
        self.name, self.min_tokens, self.quiet = name, 1, True
        self.too_short_hint = "other documents"
        self.ratio_bounds: list[float] | None = None
        self.weaver: TaskWeaver | None = None
        self.read_text: Callable[[TokenizedDocument], str] | None = None
        self.state: dict[str, Any] = dict.fromkeys(_POSITION_KEYS + _COUNT_KEYS, 0)
        self.state["cursor"] = None  # the next record's place; version 0.1 saved none
        self._readers, self._encode, self._window, self._seed = readers, encode, window, seed
        self._documents = self._read_documents()
        self._document: TokenizedDocument | None = None

    def take(self, limit: int, whole: bool) -> Piece:
        """Return the next tokens of a document: `limit`, or fewer at its end unless `whole`."""
        state = self.state
        while self._document is None or state["length"] - state["offset"] < (limit if whole else 1):
            self._document = next(self._documents)
        document, offset = self._document, state["offset"]
        cut = slice(offset, offset + limit)
        ids, labels = document.ids[cut], document.labels[cut]
        used = len(ids)
        if self.weaver is not None:
            place = " ".join(str(state[key]) for key in ("epoch", "part", "record", "taken"))
            woven = self.weaver.weave(document, offset, limit, place)
            if woven is not None:
                ids, labels, used = woven
                state["questions"] += 1
        state["offset"] += used
        state["tokens"] += len(ids)
        begins = not offset
        is_cut = begins and used < state["length"]
        return Piece(document.location, ids, labels, begins=begins, is_cut=is_cut)

    def counts(self) -> dict[str, int]:
        """Return the counts of documents and tokens so far, and the epochs completed."""
        return {key: self.state[key] for key in _COUNT_KEYS} | {"epochs": self.state["epoch"]}

    def _read_documents(self) -> Iterator[TokenizedDocument]:
        state = self.state
        while True:
            for place, entry in self._entries():
                state.update(place)
                document = self._encode(entry)
                size = len(document.ids)
                if not state["length"]:
                    state["longest"] = max(state["longest"], size)
                    if size < self.min_tokens:
                        state["left_out"] += 1
                        state["left_out_tokens"] += size
                        continue
                    if reason := self._reason_to_filter(document):
                        state[reason] += 1
                        continue
                    state.update(
                        length=size,
                        documents=state["documents"] + 1,
                        accepted=state["accepted"] + 1,
                    )
                elif state["length"] != size:
                    raise ValueError(
                        f"cannot resume: {document.location} has {size:,} tokens, it had "
                        f"{state['length']:,} when the run was saved: bring back the data and the "
                        "tokenizer of that run, or start anew"
                    )
                yield document
                state["left_out_tokens"] += size - state["offset"]
                state["length"] = state["offset"] = 0
            self._end_epoch()

    def _reason_to_filter(self, document: TokenizedDocument) -> str | None:
        """Return the count of documents that compress as badly or as well; None to keep it."""
        if self.ratio_bounds is None or self.read_text is None:
            return None
        ratio, (low, high) = compression_ratio(self.read_text(document)), self.ratio_bounds
        return "repetitive" if ratio < low else "noisy" if ratio > high else None

    def _entries(self) -> Iterator[tuple[dict[str, Any], DocumentRef]]:
        """Yield this epoch's documents from the state on, each with the state that leads to it."""
        first_part, record, first_index = (self.state[key] for key in ("part", "record", "taken"))
        cursor: Cursor | None = self.state["cursor"]
        salt, order = f"{self._seed} {self.state['epoch']}", list(range(len(self._readers)))
        if self._window:
            Random(salt).shuffle(order)
        entries = (
            (part, entry)
            for part in range(first_part, len(order))
            for entry in self._readers[order[part]].read(
                *((record, cursor) if part == first_part else ())
            )
        )
        # Shuffle in blocks: a block's first record and an index within it locate any document.
        while block := list(itertools.islice(entries, max(1, self._window))):
            part, first = block[0]
            if self._window:
                Random(f"{salt} {part} {first.number}").shuffle(block)
            for index in range(first_index, len(block)):
                place = {"part": part, "record": first.number, "taken": index}
                yield place | {"cursor": first.cursor}, block[index][1]
            first_index = 0

    def _end_epoch(self) -> None:
        state = self.state
        filtered = state["repetitive"] + state["noisy"]
        if not state["accepted"] and not state["left_out"] and not filtered:
            raise ValueError(f"no documents in {self.name!r}: expected at least one; leave it out")
        fix = (
            f"{self.too_short_hint}, or longer documents (the longest has {state['longest']:,} "
            "tokens, expected "
            f"{self.min_tokens:,})"
        )
        if not state["accepted"] and filtered:
            raise ValueError(
                f"no row from {self.name!r}: {state['repetitive']} documents compress below "
                f"compression_ratio {self.ratio_bounds}, {state['noisy']} above, and "
                f"{state['left_out']} are too short: expected wider bounds, or other documents"
            )
        if not state["accepted"]:
            raise ValueError(f"no row from {self.name!r}, all is too short: say {fix}")
        if state["epoch"] == 0 and not self.quiet:
            if state["left_out"]:
                _logger.warning(
                    "%s: %d of %d documents were too short and left out; to use them, say %s",
                    self.name, state["left_out"],
                    state["left_out"] + filtered + state["documents"], fix,
                )  # fmt: skip
            if filtered:
                _logger.warning(
                    "%s: compression_ratio %s left out %d documents below it and %d above, and "
                    "kept %d",
                    self.name, self.ratio_bounds, state["repetitive"], state["noisy"],
                    state["documents"],
                )  # fmt: skip
            _logger.warning("%s: all documents were used, its second epoch begins", self.name)
        state.update(epoch=state["epoch"] + 1, part=0, record=0, taken=0, cursor=None, accepted=0)


_FAN_OUT = 1024  # bits a node: two levels find a capacity among a million


class Piece(NamedTuple):
    """Tokens of one document in one row.

    Attributes:
        location: Of the document.
        ids: Tokens, `[S]` int64.
        labels: Labels, `[S]` int64.
        begins: Whether the document begins here.
        is_cut: Whether the document begins here and does not end here.
    """

    location: str
    ids: torch.Tensor
    labels: torch.Tensor
    begins: bool
    is_cut: bool


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins, the largest first, each into the fullest bin that has room for it.

    Takes O(log capacity) an item. Needs at most 11/9 of the smallest number of bins, and one more.

    Args:
        sizes: The items' sizes, from 1 to `capacity`.
        capacity: What a bin holds.

    Returns:
        Each bin's items as indices into `sizes`, in the order in which they were put there.
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # room left -> bins
    rooms = _OrderedSet(capacity)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        if not 1 <= size <= capacity:
            raise ValueError(f"expected sizes from 1 to {capacity:,}, got {size:,}")
        room = rooms.at_least(size)
        if room is None:
            room, index = capacity, len(bins)
            bins.append([])
        else:
            index = open_bins[room].pop()
            if not open_bins[room]:
                rooms.discard(room)
        bins[index].append(item)
        left = room - size
        if left:
            same = open_bins.setdefault(left, [])
            if not same:
                rooms.add(left)
            same.append(index)
    return bins


class _OrderedSet:
    """A set of integers from 0 to `largest` that finds the smallest one from any value on."""

    # A tree of bit fields: a bit says whether the node below it has any.
    def __init__(self, largest: int) -> None:
        self._levels: list[list[int]] = []
        count = largest + 1
        while not self._levels or count > 1:
            count = -(-count // _FAN_OUT)
            self._levels.append([0] * count)

    def add(self, value: int) -> None:
        for bits in self._levels:
            index, bit = divmod(value, _FAN_OUT)
            bits[index] |= 1 << bit
            value = index

    def discard(self, value: int) -> None:
        for bits in self._levels:
            index, bit = divmod(value, _FAN_OUT)
            bits[index] &= ~(1 << bit)
            if bits[index]:
                return
            value = index

    def at_least(self, value: int) -> int | None:
        """Return the smallest member from `value` on; None without one."""
        for level, bits in enumerate(self._levels):
            index, bit = divmod(value, _FAN_OUT)
            if index < len(bits) and (following := bits[index] >> bit):
                value += _lowest_bit(following)
                for lower in reversed(self._levels[:level]):
                    value = value * _FAN_OUT + _lowest_bit(lower[value])
                return value
            value = index + 1
        return None


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class BestFitRows:
    """An endless stream of rows, packed a window of documents at a time.

    A run resumes by reading its window again, from the saved state of its sources.

    Args:
        take: Returns the next piece of a document, of at most a row.
        snapshot: Returns the state of the documents' sources, from which `take` goes on.
        row_length: Tokens of a row.
        window: Rows' worth of tokens that are packed together.
        seed: Seed of the rows' order.
        number: The window to begin with.
        row: The row of that window to begin with.
    """

    def __init__(
        self,
        take: Callable[[int], Piece],
        snapshot: Callable[[], Any],
        *,
        row_length: int,
        window: int,
        seed: str,
        number: int = 0,
        row: int = 0,
    ) -> None:
        self._take, self._snapshot = take, snapshot
        self._row_length, self._window, self._seed = row_length, window, seed
        self._number, self._row = number, row
        self._start: Any = None
        self._rows: list[list[Piece]] = []
        if row:  # also before a short row, whose counts include the window that has been read
            self._read_window()

    def next_row(self) -> list[Piece]:
        """Return the next row's pieces, the longest first; they leave room for padding."""
        if not self._rows:
            self._read_window()
        pieces = self._rows[self._row]
        self._rows[self._row] = []
        self._row += 1
        if self._row == len(self._rows):
            self._number, self._row, self._rows = self._number + 1, 0, []
        return [p._replace(ids=p.ids.long(), labels=p.labels.long()) for p in pieces]

    def state(self) -> tuple[Any, dict[str, int]]:
        """Return the sources' state before the current window, and the next row's place in it."""
        sources = self._start if self._rows else self._snapshot()
        return sources, {"number": self._number, "row": self._row}

    def _read_window(self) -> None:
        self._start = self._snapshot()
        pieces: list[Piece] = []
        missing = self._window * self._row_length
        while missing > 0:
            piece = self._take(self._row_length)
            missing -= len(piece.ids)
            pieces.append(_narrow(piece))
        rows = best_fit_decreasing([len(piece.ids) for piece in pieces], self._row_length)
        # Packed rows go from those of long documents to those of short ones.
        Random(f"{self._seed} window {self._number}").shuffle(rows)
        self._rows = [[pieces[index] for index in row] for row in rows]


def _narrow(piece: Piece) -> Piece:
    """Return a piece in 4 bytes a token, in which a window is kept."""
    ids = piece.ids.int()
    same = piece.labels.data_ptr() == piece.ids.data_ptr()
    return piece._replace(ids=ids, labels=ids if same else piece.labels.int())


def summarize(arguments: DataArguments, state: dict[str, Any]) -> dict[str, str]:
    """Return what packing, filter and aggregation tasks did, by name; those that the run has.

    Args:
        arguments: The recipe's keys for data.
        state: The last row's `state`; empty before the first row.
    """
    summaries: dict[str, str] = {}
    counts, read = state.get("row_yield", {}), state.get("long_counts")
    if counts.get("documents"):
        padding = counts["padding"] / (counts["tokens"] + counts["padding"])
        summaries["rows"] = (
            f"{counts['cut']:,} of {counts['documents']:,} document"
            f"{'' if counts['documents'] == 1 else 's'} cut, "
            f"{padding:.2%} padding"
        )
    if arguments.compression_ratio is not None and read:
        bounds = arguments.compression_ratio
        summaries["filter"] = (
            f"compression ratio {bounds[0]:g} to {bounds[1]:g}: {read['repetitive']:,} documents "
            f"left out below, {read['noisy']:,} above, {read['documents']:,} kept"
        )
    if arguments.aggregation_share and read:
        summaries["aggregation tasks"] = (
            f"{read['questions']:,} questions "
            f"({', '.join(arguments.aggregation_tasks)}) in {arguments.aggregation_share:.0%} of "
            "the long documents"
        )
    return summaries
