"""An endless stream of a source's documents, which resumes in the middle of one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from rope_patch.training.data.aggregation import TaskWeaver
from rope_patch.training.data.best_fit import Piece
from rope_patch.training.data.compression import compression_ratio
from rope_patch.training.data.documents import TokenizedDocument
from rope_patch.training.data.readers import Cursor, DocumentRef, Reader

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
        self.state["cursor"] = None  # of the record; checkpoints of version 0.1 have none
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
