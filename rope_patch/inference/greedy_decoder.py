"""The greedy decoder: one answer after a prompt's cache, or several rows of a batch of caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from rope_patch.inference.cache_batch import CacheBatch
from rope_patch.inference.prefix_reader import input_device
from rope_patch.transformers_api.forwards import cache_arguments


class GreedyDecoder:
    """Decodes greedily until an answer's end.

    Args:
        model: A transformers causal language model.
        stops: Tokens that end an answer and are no part of it.
    """

    def __init__(self, model: Any, stops: Collection[int | None]) -> None:
        self.model = model
        self.stops = stops

    @torch.no_grad()
    def decode(
        self, cache: Any, last_token: int, room: int, is_done: Callable[[list[int]], bool]
    ) -> list[int]:
        """Return the tokens after one prompt.

        Args:
            cache: The keys and values of all but the prompt's last token; it grows.
            last_token: The prompt's last token.
            room: The most tokens.
            is_done: Returns whether the tokens so far are enough.
        """
        token, ids = last_token, list[int]()
        while len(ids) < room:
            fed = torch.tensor([[token]], device=input_device(self.model))
            logits = self.model(fed, **cache_arguments(self.model, cache), use_cache=True).logits
            token = int(logits[0, -1].argmax())
            if token in self.stops:
                break
            ids.append(token)
            if is_done(ids):
                break
        return ids

    @torch.no_grad()
    def decode_batch(
        self,
        batch: CacheBatch,
        last_tokens: Sequence[int],
        rooms: Sequence[int],
        is_done: Sequence[Callable[[list[int]], bool]],
    ) -> list[list[int]]:
        """Return the tokens after each of several prompts.

        Args:
            batch: A row for each prompt, with all but its last token; used up.
            last_tokens: The prompts' last tokens.
            rooms: The most tokens after each.
            is_done: For each, returns whether the tokens so far are enough.
        """
        device = input_device(self.model)
        answers: list[list[int]] = [[] for _ in last_tokens]
        live = [(row, token) for row, token in enumerate(last_tokens)]
        while live:
            fed = torch.tensor([[token] for _, token in live], device=device)
            logits = self.model(fed, use_cache=True, **batch.inputs(self.model, device)).logits
            live = [(row, int(s[-1].argmax())) for (row, _), s in zip(live, logits, strict=True)]
            for place in reversed(range(len(live))):  # rows behind this place live on
                row, token = live[place]
                ended = token in self.stops
                if not ended:
                    answers[row].append(token)
                    ended = len(answers[row]) >= rooms[row] or is_done[row](answers[row])
                if ended:
                    batch.drop_row(place)
                    live[place] = live[-1]
                    live.pop()
        return answers
