"""A live model object in the place of an engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from rope_patch.inference.prefix_reader import input_device
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.utils.errors import one_line
from rope_patch.verifying.engine import Engine, Observation
from rope_patch.verifying.probe_prompts import ProbePrompt


class LocalModel(Engine):
    """A causal language model of this process, as it is: patched, configured or changed by hand.

    Args:
        model: The model.
        name: What it is, for messages; its class unless given.
    """

    def __init__(self, model: Any, name: str | None = None) -> None:
        self._model = model
        self._device = input_device(model)
        self.name = one_line(f"a live {type(model).__name__}" if name is None else name)
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size

    @torch.no_grad()
    def _observe(self, prompt: ProbePrompt) -> Observation:
        ids = torch.tensor([prompt.ids], device=self._device)
        logits = self._model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        return Observation(
            prompt, tuple(float(logits[p - 1, prompt.ids[p]]) for p in prompt.scored)
        )

    @torch.no_grad()
    def _write(self, ids: tuple[int, ...], count: int) -> Observation:
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        piece, written, values = list(ids), [], []
        for _ in range(count):
            inputs = torch.tensor([piece], device=self._device)
            logits = self._model(inputs, **cache_arguments(self._model, cache)).logits[0, -1]
            log_probs = logits.float().log_softmax(-1)
            piece = [int(log_probs.argmax())]
            written += piece
            values.append(float(log_probs[piece[0]]))
        scored = tuple(range(len(ids), len(ids) + count))
        prompt = ProbePrompt("written", ids + tuple(written), scored, decoded_from=len(ids))
        return Observation(prompt, tuple(values))
