"""Limit the draft of assisted decoding to the next change of frequencies.

Tokens processed together use the frequencies of the last one. A draft token beyond a change of
frequencies, accepted or not, would change how the tokens before it are rotated. So drafts end at
the length that the next token's frequencies serve, and assisted decoding rotates every token as
token-by-token decoding does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rope_patch.patching.dynamic.cache_record import cached_positions
from rope_patch.patching.dynamic.sequence_lengths import first_and_last_positions
from rope_patch.patching.positions import prompt_positions
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import EMBEDDINGS, cache_among
from rope_patch.transformers_api.generation import (
    CANDIDATE_GENERATOR,
    drafts_at_least_one,
    generating_modules,
)


def limit_candidates(
    model: nn.Module, length_hooks: Sequence[tuple[nn.Module, Any, Any]], undo_log: UndoLog
) -> None:
    """End the drafts of assisted decoding where frequencies change.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        for module in generating_modules(model, decoder, CANDIDATE_GENERATOR):
            factory = _LimitedGeneratorFactory(getattr(module, CANDIDATE_GENERATOR), hooks)
            undo_log.set(module, CANDIDATE_GENERATOR, factory)


class _LimitedGeneratorFactory:
    """Wrapper of `_get_candidate_generator` that limits the drafts of the generators it makes."""

    def __init__(self, original_method: Any, hooks: Any) -> None:
        self.original_method = original_method
        self.hooks = hooks

    def __call__(self, *, input_ids: torch.Tensor, model_kwargs: dict[str, Any], **options: Any):
        generator = self.original_method(input_ids=input_ids, model_kwargs=model_kwargs, **options)
        sequence = _SequencePositions(input_ids, model_kwargs, self.hooks.axes)
        limit = _CandidateLimit(generator, self.hooks, sequence)
        generator.get_candidates = limit.get_candidates
        generator.update_candidate_strategy = limit.update_candidate_strategy
        return generator


class _SequencePositions:
    """Positions of the one sequence that assisted decoding extends.

    Attributes:
        tokens: Number of ids in the sequence when decoding began.
        first: Its first position.
        largest: Its largest position then; not the last one's where positions start anew.
        last: The position of its last token then, the highest one of several axes.
    """

    def __init__(
        self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], axes: int | None
    ) -> None:
        self.tokens = input_ids.shape[1]
        embeddings = model_kwargs.get(EMBEDDINGS)
        width = max(self.tokens, 0 if embeddings is None else embeddings.shape[1])
        cached = cached_positions(cache_among(model_kwargs))
        positions, last = prompt_positions(model_kwargs, cached, width, input_ids.device, axes)
        self.first, self.largest = first_and_last_positions(positions)[0].tolist()
        self.last = last[0]


class _CandidateLimit:
    """Wrappers of a candidate generator's two methods."""

    def __init__(self, generator: Any, hooks: Any, sequence: _SequencePositions) -> None:
        self.generator = generator
        self.hooks = hooks
        self.sequence = sequence
        self.original_get = generator.get_candidates
        self.original_update = generator.update_candidate_strategy
        self.shortened = False

    def room(self, tokens: int) -> float:
        """Return how many tokens may follow the first `tokens` ids under the same frequencies."""
        if self.hooks.fixed_length is not None:
            return math.inf
        sequence = self.sequence
        last = sequence.last + tokens - sequence.tokens
        length = max(sequence.largest, last) - sequence.first + 1
        if self.hooks.method.fixed_at_admission:
            length = max(length, *(self.hooks.admission.lengths or ()))
        valid_until = self.hooks.frequency_table.valid_until(length)
        return (
            valid_until if math.isinf(valid_until) else int(sequence.first + valid_until - 1 - last)
        )

    def get_candidates(
        self, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = input_ids.shape[1]
        room = self.room(tokens)
        draft_tokens = getattr(self.generator, "num_assistant_tokens", None)
        if draft_tokens is not None:
            # This generator expects a candidate in every round: it drafts one, dropped below.
            least = 1 if drafts_at_least_one(self.generator) else 0
            self.generator.num_assistant_tokens = min(draft_tokens, max(room, least))
        try:
            ids, scores = self.original_get(input_ids, *args, **kwargs)
        finally:
            if draft_tokens is not None:
                self.generator.num_assistant_tokens = draft_tokens
        candidates = ids.shape[1] - tokens
        self.shortened = room < (candidates if draft_tokens is None else draft_tokens)
        if candidates > room:
            room = int(room)
            ids = ids[:, : tokens + room]
            # Scores have no use without candidates.
            scores = scores[:, :room] if scores is not None and room else None
        return ids, scores

    def update_candidate_strategy(self, *args: Any, **kwargs: Any) -> None:
        draft_tokens = getattr(self.generator, "num_assistant_tokens", None)
        self.original_update(*args, **kwargs)
        if draft_tokens is not None and self.shortened:
            # A shortened draft is no sign that the model agreed with all of it.
            self.generator.num_assistant_tokens = draft_tokens
