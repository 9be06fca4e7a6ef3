"""The measurements on long documents: perplexity in three forms, and its control."""

from __future__ import annotations

from functools import partial
from typing import TypedDict

from rope_patch.evaluation.measures import perplexity
from rope_patch.evaluation.request import KEY_TOKENS, PERPLEXITY, SLIDING
from rope_patch.evaluation.results_schema import ControlRecord, PerplexityRecord
from rope_patch.evaluation.session import CachedComputation, Session
from rope_patch.tasks import texts


class _PassLosses(TypedDict):
    """The losses of one pass over a document in nats: each block's mean, and each key token's."""

    blocks: list[float]
    keys: list[float]


class PerplexityRun:
    """The documents of one evaluation, and their losses under each method.

    Args:
        session: The model; its weights need not be there yet.

    Raises:
        ValueError: Texts too short, or windows that do not fit.
    """

    def __init__(self, session: Session) -> None:
        request = session.request
        self.session = session
        self.tasks = {PERPLEXITY, KEY_TOKENS, SLIDING} & set(request.tasks)
        self.documents: list[texts.TokenizedDocument] = []
        self.control: ControlRecord | None = None
        self.short_control: ControlRecord | None = None
        self.key_positions: list[list[int]] = []
        self.losses: dict[str, list[list[float]]] = {}
        self.key_losses: dict[str, list[list[float]]] = {}
        self.sliding_losses: dict[str, dict[str, list[list[float]]]] = {}
        if not self.tasks:
            return
        length, window, context = (
            request.perplexity_length,
            request.window,
            request.control_context,
        )
        self.length = max(request.lengths) if length is None else length
        self.control_context = session.trained_length if context is None else context
        if window is None:  # the control needs room for it
            window = perplexity.default_window(min(self.length, 12 * (self.control_context - 1)))
        self.window = window
        self.block = perplexity.block_size(self.window)
        self.short_context = perplexity.default_short_context(session.trained_length)
        if PERPLEXITY in self.tasks and self.control_context <= self.window:
            raise ValueError(
                f"the control's context must be longer than the window of {self.window} tokens "
                f"that is scored, got {self.control_context}"
            )
        source = request.texts, session.tokenizer
        self.documents = texts.documents(*source, self.length, request.documents)
        self.sliding_documents: list[texts.TokenizedDocument] = []
        if SLIDING in self.tasks and min(request.lengths) <= request.stride:
            raise ValueError(
                f"windows must be longer than the {request.stride} tokens scored in each, got a "
                f"length of {min(request.lengths)}: give longer lengths or a shorter stride"
            )
        if SLIDING in self.tasks:  # windows of the longest length need room to slide
            room = max(request.lengths) + (request.windows - 1) * request.stride
            self.sliding_documents = texts.documents(*source, room, request.documents)

    def measure_plain(self) -> None:
        """Measure the controls and find the key tokens, all with the plain model."""
        if PERPLEXITY in self.tasks:
            with self.session.timer(PERPLEXITY):
                self.control = self._measure_control(self.control_context, "the control")
                half = self.control_context // 2
                if self.control and half > self.window:
                    self.short_control = self._measure_control(half, "the half-length control")
        if KEY_TOKENS in self.tasks:
            self.evaluator = self.session.evaluator
            trained, context, pieces = self.session.trained_length, self.short_context, []
            for d in self.documents:
                find = partial(perplexity.find_key_tokens, self.session.model, d.tokens)
                what = {"key tokens": context, "document": d.sha256}
                pieces.append(
                    CachedComputation(what, trained, partial(find, trained, context, d.head))
                )
            with self.session.timer(KEY_TOKENS):
                positions = self.session.try_compute_cached("the search for key tokens", pieces)
            if positions is None:
                self.tasks.remove(KEY_TOKENS)
            self.key_positions = positions or []

    def measure(self, label: str) -> None:
        """Measure the losses under the model's present method."""
        if {PERPLEXITY, KEY_TOKENS} & self.tasks:
            with self.session.timer(PERPLEXITY):
                self._measure_passes(label)
        if SLIDING in self.tasks:
            with self.session.timer(SLIDING):
                self._measure_sliding(label)

    def results(self) -> PerplexityRecord | None:
        """Return the part `perplexity` of the results; None where none of it was asked for."""
        if not self.tasks:
            return None
        record: PerplexityRecord = {
            "documents": [
                {"name": d.name, "tokens": len(d.tokens), "sha256": d.sha256}
                for d in self.documents
            ],
            "block": self.block,
            "window": self.window,
            "losses": self.losses if PERPLEXITY in self.tasks else {},
            "control": self.control,
            "short_control": self.short_control,
            "key_tokens": None,
            "sliding": None,
        }
        if KEY_TOKENS in self.tasks:
            record["key_tokens"] = {
                "evaluator": self.evaluator,
                "short_context": self.short_context,
                "positions": self.key_positions,
                "losses": self.key_losses,
            }
        if SLIDING in self.tasks:
            request = self.session.request
            record["sliding"] = {
                "stride": request.stride,
                "lengths": list(request.lengths),
                "losses": self.sliding_losses,
            }
        return record

    def _measure_control(self, context: int, name: str) -> ControlRecord | None:
        """Return the losses with `context` tokens, on the same windows whatever the context."""
        window, model = self.window, self.session.model
        ends = perplexity.control_positions(self.length, window, self.control_context)
        pieces = []
        for d in self.documents:
            for end in ends:
                what = {"control": [end, window, context], "document": d.sha256}
                loss = partial(perplexity.control_loss, model, d.tokens, end, window, context)
                pieces.append(CachedComputation(what, context, partial(loss, d.head)))
        values = self.session.try_compute_cached(f"{name} of perplexity", pieces)
        if not values:
            return None
        values_left = iter(values)
        losses = [{str(end): next(values_left) for end in ends} for _ in self.documents]
        return {"context": context, "losses": losses}

    def _measure_passes(self, label: str) -> None:
        handle, trained = self.session.rotation_patch, self.session.trained_length
        lengths = [self.length]
        if handle and handle.method.is_length_dependent(trained) and trained < self.length:
            # Short texts are what such a method leaves alone: they are read as short texts.
            lengths.append(trained)
        pieces = []
        for i, d in enumerate(self.documents):
            at = self.key_positions[i] if self.key_positions else []
            for length in lengths:
                what = {"pass": length, "document": d.sha256, "block": self.block, "keys": at}
                compute = partial(self._pass_losses, d.tokens[:length], label, at)
                pieces.append(CachedComputation(what, length, compute))
        passes = self.session.try_compute_cached(f"perplexity of {label}", pieces)
        if not passes:
            return
        whole, start = passes[:: len(lengths)], passes[1 :: len(lengths)]
        if len(lengths) == 1:
            start = [{"blocks": [], "keys": []} for _ in whole]
        pairs = list(zip(start, whole, strict=True))
        self.losses[label] = [_replace_start(far["blocks"], near["blocks"]) for near, far in pairs]
        self.key_losses[label] = [_replace_start(far["keys"], near["keys"]) for near, far in pairs]

    def _pass_losses(self, tokens: list[int], label: str, at: list[int]) -> _PassLosses:
        """Return the losses of one pass by blocks, and those of its key tokens."""
        losses = perplexity.document_losses(self.session.model, tokens, label)
        reached = [position for position in at if position < len(tokens)]
        return {
            "blocks": perplexity.block_losses(losses, self.block),
            "keys": perplexity.losses_at(losses, reached),
        }

    def _measure_sliding(self, label: str) -> None:
        request = self.session.request
        by_length: dict[str, list[list[float]]] = {}
        stride, longest = request.stride, max(request.lengths)
        for length in request.lengths:
            pieces = []
            for d in self.sliding_documents:
                ends = perplexity.window_ends(len(d.tokens), longest, stride, request.windows)
                what = {"sliding": [length, stride, ends], "document": d.sha256}
                losses = partial(
                    perplexity.window_losses, self.session.model, d.tokens, length, stride
                )
                pieces.append(CachedComputation(what, length, partial(losses, ends, label, d.head)))
            window_losses = self.session.try_compute_cached(
                f"sliding perplexity of {label}", pieces
            )
            if window_losses is None:
                return
            by_length[str(length)] = window_losses
        self.sliding_losses[label] = by_length


def _replace_start(losses: list[float], start: list[float]) -> list[float]:
    return [*start, *losses[len(start) :]]
