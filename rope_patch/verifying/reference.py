"""The reference: transformers' log-probabilities of a prompt's tokens under each hypothesis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rope_patch.inference.prefix_reader import input_device
from rope_patch.methods.base import Rotation
from rope_patch.patching import patch_rotation
from rope_patch.patching.frequency_buffers import set_frequencies
from rope_patch.patching.mla_scale import base_softmax_scale, find_mla_attentions
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.verifying.asked_rotation import AskedRotation
from rope_patch.verifying.hypothesis import WRAPS, Hypothesis
from rope_patch.verifying.probe_prompts import ProbePrompt

_CHUNK = 2**25  # numbers in the log-softmax at once


class Reference:
    """Log-probabilities of tokens, computed with transformers.

    Args:
        model: The model without a patch.
        asked: What is asked of the engine.
    """

    def __init__(self, model: nn.Module, asked: AskedRotation) -> None:
        self.model: Any = model
        self.asked = asked
        self._device = input_device(model)

    @torch.no_grad()
    def log_probs(self, hypothesis: Hypothesis, prompt: ProbePrompt) -> torch.Tensor:
        """Return the log-probabilities of a prompt's scored tokens under a hypothesis, `[N]`."""
        steps = hypothesis.keeps_stale_keys or (
            hypothesis.request is not None and self.asked.is_length_dependent
        )
        if prompt.decoded_from is not None and steps:
            return self._step_by_step(hypothesis, prompt, prompt.decoded_from)
        with self._applied(hypothesis, len(prompt.ids)):
            return self._read(prompt)

    @torch.no_grad()
    def plain_log_probs(self, prompts: Iterable[ProbePrompt]) -> torch.Tensor:
        """Return the scored tokens' log-probabilities under the model's own rotation, `[N]`."""
        return torch.cat([self._read(prompt) for prompt in prompts])

    @torch.no_grad()
    def plain_next_log_probs(self, token: int) -> torch.Tensor:
        """Return the log-probabilities of all tokens after a text of one, `[vocabulary]`."""
        ids = torch.tensor([[token]], device=self._device)
        return self.model(ids, use_cache=False).logits[0, -1].float().log_softmax(-1).cpu()

    def _read(self, prompt: ProbePrompt) -> torch.Tensor:
        ids = torch.tensor([prompt.ids], device=self._device)
        keep = torch.tensor([p - 1 for p in prompt.scored], device=self._device)
        logits = self.model(ids, use_cache=False, logits_to_keep=keep).logits[0]
        if len(logits) == len(prompt.ids) and len(prompt.ids) != len(keep):
            logits = logits[keep]  # an architecture that makes them all
        return _gather(logits, ids[0, list(prompt.scored)])

    def _step_by_step(
        self, hypothesis: Hypothesis, prompt: ProbePrompt, prefill: int
    ) -> torch.Tensor:
        """Read a prompt as the engine wrote it: a prefill, then one token a step."""
        ids = torch.tensor([prompt.ids], device=self._device)
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        parts, cuts = [], [prefill] + [1] * (ids.shape[1] - prefill)
        with ExitStack() as stack:
            if not hypothesis.keeps_stale_keys:
                stack.enter_context(self._applied(hypothesis, len(prompt.ids)))
            read = 0
            for piece in ids.split(cuts, dim=1):
                read += piece.shape[1]
                with ExitStack() as step:
                    if hypothesis.keeps_stale_keys:
                        step.enter_context(self.rotated(hypothesis.rotation(read)))
                    parts.append(self.model(piece, **cache_arguments(self.model, cache)).logits[0])
        logits = torch.cat(parts)[[p - 1 for p in prompt.scored]]
        return _gather(logits, ids[0, list(prompt.scored)])

    @contextmanager
    def _applied(self, hypothesis: Hypothesis, length: int) -> Iterator[None]:
        """Rotate as a hypothesis says, for sequences of `length` tokens."""
        with ExitStack() as stack:
            if hypothesis.request is not None:
                stack.enter_context(patch_rotation(self.model, hypothesis.request))
            else:
                stack.enter_context(self.rotated(hypothesis.rotation(length)))
            if (rows := hypothesis.table_rows) is not None:
                stack.enter_context(self._short_table(rows, hypothesis.table_end))
            yield

    @contextmanager
    def rotated(self, rotation: Rotation) -> Iterator[None]:
        """Set frequencies and the softmax's mscale on the model."""
        undo_log = UndoLog()
        try:
            for traits in self.asked.traits:
                live = {
                    layer_type: rotation.frequencies[layer_type]
                    for layer_type in traits.frequencies
                    if layer_type in rotation.frequencies
                }
                set_frequencies(traits.rotary, traits.frequencies, live, undo_log)
                for attention in find_mla_attentions(traits.owner):
                    scale = base_softmax_scale(attention) * rotation.softmax_mscale**2
                    undo_log.set(attention, "scaling", scale)
            yield
        finally:
            undo_log.undo()

    @contextmanager
    def _short_table(self, rows: int, end: str) -> Iterator[None]:
        """Rotate positions beyond a table's rows as its engine does."""

        def shorten(module: Any, args: Any, kwargs: Any) -> Any:
            change = (lambda p: p % rows) if end == WRAPS else (lambda p: p.clamp(max=rows - 1))
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": change(kwargs["position_ids"])}
            return (args[0], change(args[1]), *args[2:]), kwargs

        undo_log = UndoLog()
        try:
            for traits in self.asked.traits:
                undo_log.hook(traits.rotary.module, before=shorten)
            yield
        finally:
            undo_log.undo()


def _gather(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens' log-probabilities in float64 on the CPU."""
    rows = max(1, _CHUNK // logits.shape[-1])
    return torch.cat(
        [
            part.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0].double().cpu()
            for part, ids in zip(logits.split(rows), tokens.split(rows), strict=True)
        ]
    )
