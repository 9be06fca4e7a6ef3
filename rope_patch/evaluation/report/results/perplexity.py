"""PerplexityStatistics: perplexities with intervals, from losses of blocks, windows, key tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rope_patch import statistics
from rope_patch.evaluation.measures import perplexity
from rope_patch.evaluation.report.results.retrieval import RunResults, cached_method
from rope_patch.evaluation.results_schema import (
    ControlRecord,
    DocumentRecord,
    KeyTokensRecord,
    PerplexityRecord,
    SlidingRecord,
)
from rope_patch.statistics import Interval

Curve = dict[int, Interval]


class PerplexityStatistics(RunResults):
    """Perplexities of one run."""

    @cached_property
    def perplexity(self) -> PerplexityRecord | None:
        """Return the measurements on long documents; None if there are none."""
        return self.results.get("perplexity") or None

    @cached_property
    def documents(self) -> Sequence[DocumentRecord]:
        """Return the documents."""
        return (self.perplexity.get("documents") or []) if self.perplexity else []

    @cached_property
    def control_record(self) -> ControlRecord | None:
        """Return the control of perplexity; None if it was not measured."""
        return self.perplexity.get("control") if self.perplexity else None

    @cached_property
    def key_tokens_record(self) -> KeyTokensRecord | None:
        """Return LongPPL; None if it was not measured."""
        return self.perplexity.get("key_tokens") if self.perplexity else None

    @cached_property
    def sliding_record(self) -> SlidingRecord | None:
        """Return perplexity by sliding windows; None if it was not measured."""
        return self.perplexity.get("sliding") if self.perplexity else None

    @cached_property
    def _block(self) -> int:
        """Return the tokens of a block; raise if no document was measured."""
        return int(self._measured["block"])

    @property
    def _measured(self) -> PerplexityRecord:
        if self.perplexity is None:
            raise ValueError("this run measured no documents")
        return self.perplexity

    @cached_property
    def losses(self) -> dict[str, list[list[float]]]:
        """Return mean nats of each block of each document, by label."""
        measured = (self.perplexity.get("losses") or {}) if self.perplexity else {}
        return {
            label: [[float(nll) for nll in document] for document in measured[label]]
            for label in self.labels
            if any(measured.get(label) or [])
        }

    @cached_property
    def window(self) -> int:
        """Return the tokens averaged into one point of a curve: whole blocks."""
        block = self._block
        return max(block, int(self._measured["window"]) // block * block)

    @cached_method
    def curve(self, label: str) -> Curve:
        """Return perplexity of each window by the position where it ends, over all documents."""
        block = self._block
        losses = self.losses[label]
        curve = {}
        for point in perplexity.curve_points(losses, block, self.window):
            end = int(point["end"])
            first, last = (end - self.window) // block, end // block
            pieces = [d[first:last] for d in losses if len(d) >= last]
            curve[end] = self._interval(pieces, first)
        return curve

    @cached_property
    def control(self) -> Curve:
        """Return perplexity of windows under the control, by where the windows end."""
        return _control_curve(self._control_losses)

    @cached_property
    def short_control_record(self) -> ControlRecord | None:
        """Return the control with half the context; None if it was not measured."""
        return self.perplexity.get("short_control") if self.perplexity else None

    @cached_property
    def short_control(self) -> Curve:
        """Return perplexity of windows under the control with half the context."""
        return _control_curve(_losses_by_end(self.short_control_record))

    @cached_property
    def _control_losses(self) -> list[dict[int, float]]:
        return _losses_by_end(self.control_record)

    def _blocks_in_range(self, label: str, *, beyond: bool) -> tuple[list[list[float]], int]:
        """Return the blocks wholly within, or beyond, the trained length, and the first's index."""
        edge = self.trained_length / self._block
        if beyond:
            first = math.ceil(edge)
            return [d[first:] for d in self.losses[label]], first
        return [d[: math.floor(edge)] for d in self.losses[label]], 0

    def _block_tokens(self, pieces: list[list[float]], first: int) -> list[list[int]]:
        """Return tokens of blocks from block `first` on: a text's first token has no loss."""
        block = self._block
        return [[block - (first + i == 0) for i in range(len(piece))] for piece in pieces]

    def _interval(self, pieces: list[list[float]], first: int) -> Interval:
        return bounded(statistics.perplexity_interval(pieces, self._block_tokens(pieces, first)))

    @cached_method
    def average(self, label: str, *, beyond: bool) -> Interval | None:
        """Return perplexity within, or beyond, the trained length."""
        if label not in self.losses:
            return None
        pieces, first = self._blocks_in_range(label, beyond=beyond)
        return self._interval(pieces, first) if any(pieces) else None

    @cached_method
    def ratio_to_plain(self, label: str, *, beyond: bool) -> Interval | None:
        """Return perplexity over the plain model's, paired by block; None for itself."""
        if label == self.plain or label not in self.losses or self.plain not in self.losses:
            return None
        mine, first = self._blocks_in_range(label, beyond=beyond)
        plain, _ = self._blocks_in_range(self.plain, beyond=beyond)
        if [len(d) for d in mine] != [len(d) for d in plain] or not any(mine):
            return None
        return statistics.perplexity_ratio(mine, plain, self._block_tokens(mine, first))

    @cached_method
    def ratio_to_control(self, label: str) -> Interval | None:
        """Return perplexity over the control's, on the windows beyond the trained length."""
        if label not in self.losses:
            return None
        block = self._block
        mine: list[list[float]] = []
        controls: list[list[float]] = []
        for document, control in zip(self.losses[label], self._control_losses, strict=False):
            ends = [e for e in sorted(control) if self.trained_length < e <= len(document) * block]
            windows = [document[(e - self.window) // block : e // block] for e in ends]
            mine.append([sum(window) / len(window) for window in windows])
            controls.append([control[e] for e in ends])
        return statistics.perplexity_ratio(mine, controls) if any(mine) else None

    @cached_property
    def sliding_lengths(self) -> list[int]:
        """Return the context lengths of the sliding windows."""
        record = self.sliding_record
        return [int(n) for n in record.get("lengths") or []] if record else []

    @cached_method
    def sliding(self, label: str) -> Curve:
        """Return perplexity by length of context, of the same tokens each time."""
        measured = (self.sliding_record.get("losses") or {}) if self.sliding_record else {}
        by_length = measured.get(label) or {}
        return {
            length: _perplexity(
                [[float(x) for x in document] for document in by_length[str(length)]]
            )
            for length in self.sliding_lengths
            if any(by_length.get(str(length)) or [])
        }

    @cached_method
    def key_tokens(self, label: str, *, beyond: bool) -> Interval | None:
        """Return LongPPL: perplexity of the tokens that need far context."""
        record = self.key_tokens_record
        losses = (record.get("losses") or {}).get(label) if record else None
        if not losses or not record:
            return None
        pieces = [
            [
                float(x)
                for x, at in zip(d, places, strict=True)
                if (at >= self.trained_length) == beyond
            ]
            for d, places in zip(losses, record["positions"], strict=True)
        ]
        return _perplexity(pieces) if any(pieces) else None


def _perplexity(pieces: list[list[float]]) -> Interval:
    return bounded(statistics.perplexity_interval([piece for piece in pieces if piece]))


def bounded(perplexity: Interval) -> Interval:
    """Return a perplexity whose interval does not reach below 1, where no perplexity is.

    Student's interval of few blocks may; without that part it covers as often.
    """
    is_known = perplexity.low > 0
    low = max(perplexity.low, min(1.0, perplexity.estimate))
    return replace(perplexity, low=low) if is_known else perplexity


def _losses_by_end(record: ControlRecord | None) -> list[dict[int, float]]:
    measured = (record.get("losses") or []) if record else []
    # Keys are text once they were in JSON.
    return [{int(end): float(nll) for end, nll in d.items()} for d in measured]


def _control_curve(losses: list[dict[int, float]]) -> Curve:
    ends = sorted({end for document in losses for end in document})
    return {end: _perplexity([[d[end]] for d in losses if end in d]) for end in ends}
