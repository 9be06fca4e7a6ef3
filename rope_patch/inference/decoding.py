"""Greedy decoding after a cache: one answer, or several rows of a batch of caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from rope_patch.encodings.sites.site import copy_table_mark
from rope_patch.inference.prefix_reader import input_device
from rope_patch.patching import Patch
from rope_patch.transformers_api.caches import DynamicLayer, start_layer
from rope_patch.transformers_api.forwards import cache_arguments


class ReservedLayer(DynamicLayer):
    """A cache layer that writes into memory reserved for it.

    transformers' own layer copies all keys and values for each new token. Its other operations read
    `keys` and `values`, which are views of the rows and tokens in use here.

    Args:
        like: A layer with one row.
        rows: Rows to reserve memory for.
        tokens: Tokens of the longest row.
        room: Tokens that will be added.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, like: Any, rows: int, tokens: int, room: int) -> None:
        super().__init__()
        start_layer(self, like)
        self._buffers = [
            states.new_zeros(rows, states.shape[1], tokens + room, states.shape[3])
            for states in (like.keys, like.values)
        ]
        self._use(rows, tokens)

    def fill_row(self, row: int, layer: Any) -> None:
        """Copy another layer's keys and values to the end of a row, which has room for them."""
        stop = self.keys.shape[-2]
        for buffer, states in zip(self._buffers, (layer.keys, layer.values), strict=True):
            buffer[row, :, stop - states.shape[-2] : stop] = states[0]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows; copy only those that change their place."""
        # Negative ones count from the last row in use, behind which lie rows that were dropped.
        indices = torch.arange(self.keys.shape[0], device=self.device)[indices.to(self.device)]
        places = torch.arange(len(indices), device=self.device)
        moved = indices != places
        for buffer in self._buffers:
            buffer[places[moved]] = buffer[indices[moved]]
        self._use(len(indices), self.keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens behind those in use; return all.

        Raises:
            ValueError: They are of other rows, or more than there is room for. A single one would
                be written to all rows, or to no place, without an error of torch's.
        """
        rows, start = self.keys.shape[0], self.keys.shape[-2]
        left = self._buffers[0].shape[-2] - start
        if key_states.shape[0] != rows or key_states.shape[-2] > left:
            raise ValueError(
                f"expected at most {left} more tokens of {rows} rows, got {key_states.shape[-2]} "
                f"of {key_states.shape[0]}"
            )
        self._use(rows, start + key_states.shape[-2])
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def _use(self, rows: int, tokens: int) -> None:
        self.keys, self.values = (buffer[:rows, :, :tokens] for buffer in self._buffers)


class CacheBatch:
    """The caches of several prompts, as the rows of one cache.

    Rows end at the same place and are padded on their left, where the attention mask hides zeros.
    Keys carry their rotation, so their place in the cache has no effect.

    Args:
        lengths: Tokens of each row.
        room: Tokens that will be added to each.
        handle: The model's patch, whose method must be static; None if it has none.

    Attributes:
        cache: For the model; None until the first row is there.
        lengths: Tokens of each row, by its present place.
    """

    def __init__(self, lengths: list[int], room: int, handle: Patch | None = None) -> None:
        self.cache: DynamicCache | None = None
        self._layers: list[ReservedLayer] = []
        self.lengths = list(lengths)
        self._room = room
        self._handle = handle

    def fill_row(self, row: int, cache: DynamicCache) -> None:
        """Copy a prompt's cache.

        Raises:
            ValueError: It holds something else than all keys and values, or another number of
                tokens than its row has.
        """
        if cache.get_seq_length() != self.lengths[row]:
            raise ValueError(
                f"expected a cache of {self.lengths[row]} tokens for row {row}, got one of "
                f"{cache.get_seq_length()}"
            )
        if wrong := {type(x).__name__ for x in cache.layers if not _keeps_all(x)}:
            raise ValueError(f"expected layers that keep all keys, got {', '.join(sorted(wrong))}")
        if self.cache is None:
            tokens = max(self.lengths)
            self._layers = [
                ReservedLayer(layer, len(self.lengths), tokens, self._room)
                for layer in cache.layers
            ]
            self.cache = DynamicCache()
            self.cache.layers.extend(self._layers)
            copy_table_mark(cache, self.cache)
            if self._handle is not None:  # the rows were read under this patch
                places = torch.arange(tokens, device=self._layers[0].device)
                padding = tokens - torch.tensor(self.lengths, device=places.device)[:, None]
                self._handle.accept_cache(self.cache, (places - padding).clamp(min=-1))
        for own, layer in zip(self._layers, cache.layers, strict=True):
            own.fill_row(row, layer)

    def drop_row(self, row: int) -> None:
        """Let the last row take a row's place."""
        assert self.cache is not None
        last = len(self.lengths) - 1
        places = [last if place == row else place for place in range(last)]
        self.cache.batch_select_indices(torch.tensor(places, dtype=torch.long))
        self.lengths = [self.lengths[place] for place in places]

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return a model's arguments for one more token in each row; count the tokens."""
        assert self.cache is not None
        stop = self.cache.get_seq_length()
        positions = torch.tensor(self.lengths, device=device)[:, None]
        arguments = {**cache_arguments(model, self.cache), "position_ids": positions}
        if min(self.lengths) < stop:
            places = torch.arange(stop + 1, device=device)[None]
            arguments["attention_mask"] = (places >= stop - positions).long()
        self.lengths = [length + 1 for length in self.lengths]
        return arguments


def token_bytes(model: Any, device: torch.device) -> int:
    """Return the bytes of a token's keys and values, of a model that keeps all."""
    cache = DynamicCache()
    with torch.no_grad():
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        model(ids, **cache_arguments(model, cache), use_cache=True)
    layers: list[Any] = cache.layers
    tensors = [states for layer in layers for states in (layer.keys, layer.values)]
    return sum(states.numel() * states.element_size() for states in tensors)


def _keeps_all(layer: Any) -> bool:
    return type(layer) is DynamicLayer and bool(layer.is_initialized)


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
