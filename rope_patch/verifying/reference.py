"""Compute with transformers what a correct engine would answer, under each hypothesis.

`open_subject` takes the model to compare with and yields it unpatched. `Reference` returns the
log-probabilities of a prompt's scored tokens under a hypothesis. `measure_noise` returns the
engine's mean difference from the reference where no rotation has influence, and raises if the
engine serves another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rope_patch.entry_points import patch_rotation
from rope_patch.extension import Extension
from rope_patch.inference.prefix_reader import input_device
from rope_patch.methods.base import Rotation
from rope_patch.patching import current
from rope_patch.patching.architecture.frequency_buffers import set_frequencies
from rope_patch.patching.architecture.mla_scale import base_softmax_scale, find_mla_attentions
from rope_patch.patching.kernels.attention_forward import ReboundForward, forward_attribute
from rope_patch.patching.undo_log import UndoLog
from rope_patch.pretrained import demo
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.pretrained.loading import has_tokenizer, load, read_model, read_tokenizer
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.transformers_api.models import APPLY_ROTATION
from rope_patch.verifying.asked_rotation import AskedRotation
from rope_patch.verifying.clients import CannotVerify, Engine, Observation
from rope_patch.verifying.hypotheses import WRAPS, Hypothesis
from rope_patch.verifying.probe_prompts import PAIR, ProbePrompt, PromptMaker
from rope_patch.verifying.verdict import LEAST

_PAIRS = 16  # texts of two tokens, to measure the noise by
_OTHER_MODEL = 1.5  # nats a token: more than weights of four bits lose, so another model answers
_QUIET = 1e-3  # nats a token: too little noise to look for an attention factor in it
_CHUNK = 2**25  # numbers that a log-softmax computes at once


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
            if hypothesis.has_other_pairs:
                stack.enter_context(self._other_pairs())
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

    @contextmanager
    def _other_pairs(self) -> Iterator[None]:
        """Pair a head's elements in the way that the model was not trained on."""
        undo_log = UndoLog()
        try:
            for site in self.asked.rotation_sites:
                for attention in site.attentions:
                    forward = _OtherPairs(attention, site.interleaved)
                    undo_log.set(attention, forward_attribute(attention), forward)
            yield
        finally:
            undo_log.undo()


class _OtherPairs(ReboundForward):
    """An attention's forward that pairs neighbours for halves, or halves for neighbours."""

    def __init__(self, module: nn.Module, interleaved: bool) -> None:
        self.interleaved = interleaved
        super().__init__(module)

    def names(self, function: Any) -> dict[str, Any]:
        """Return what the copy finds under which global names."""
        self._original_apply = function.__globals__[APPLY_ROTATION]
        return {APPLY_ROTATION: self.rotate}

    def rotate(self, *arguments: torch.Tensor, **options: Any) -> Any:
        """Rotate as transformers does, with the elements of each other pair put side by side."""
        *heads, cos, sin = arguments
        halves = torch.arange(cos.shape[-1], device=cos.device).view(2, -1)
        neighbours = halves.flatten().view(-1, 2)
        order = halves.T.flatten() if self.interleaved else neighbours.T.flatten()
        rotated = self._original_apply(
            *(_reordered(each, order) for each in heads), cos, sin, **options
        )
        back = order.argsort()
        if len(heads) == 1:
            return _reordered(rotated, back)
        return tuple(_reordered(each, back) for each in rotated)


def _reordered(heads: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return heads with their first elements, those that rotate, in another order."""
    width = len(order)
    return torch.cat([heads[..., :width][..., order], heads[..., width:]], dim=-1)


@dataclass(frozen=True)
class Subject:
    """The model to compare with.

    Attributes:
        model: The model, without a patch.
        extension: What is asked of the engine; None for the checkpoint's own rotation.
        tokenizer: Its tokenizer; None if there is none.
    """

    model: Any
    extension: Extension | None
    tokenizer: Any


@contextmanager
def open_subject(
    against: Any, extension: Extension | None, engine: Any, **loading: Any
) -> Iterator[Subject]:
    """Yield the model to compare with; a live one gets its patch back afterwards.

    Args:
        against: A model's folder, its name on the Hub, `demo`, or a live model.
        extension: The request; None for the patch that the model has or was saved with, or else
            the checkpoint's own rotation.
        engine: The live model that is verified, if one is.
        **loading: Arguments of `rope_patch.load`.

    Raises:
        CannotVerify: Both are one object.
        ValueError: The model cannot be read, or the request cannot be met.
    """
    if isinstance(against, nn.Module):
        if against is engine:
            raise CannotVerify(
                "against is the very model that is verified, expected one to compare it with: give "
                "the checkpoint's folder, or copy.deepcopy(model) without the changes"
            )
        handle = current(against)
        if handle is None:
            yield Subject(against, extension, None)
            return
        handle._deactivate()
        try:
            yield Subject(against, extension or handle.extension, None)
        finally:
            handle._restore(against)
        return
    path = demo.resolve_model_path(against) if isinstance(against, str) else against
    source, gguf_file = split_gguf(path, loading.get("gguf_file"))
    tokenizer = None
    if gguf_file is not None or has_tokenizer(source):
        tokenizer = read_tokenizer(source, gguf_file=gguf_file)
    if extension is None and patch_to_restore(path) is None:
        yield Subject(read_model(path, **loading), None, tokenizer)
        return
    model = load(path, extension, **loading)
    handle = current(model)
    if handle is None:
        raise CannotVerify(
            f"{against} has no rotation, expected a decoder with RoPE: verify compares rotations"
        )
    handle.undo()
    yield Subject(model, handle.extension, tokenizer)


def measure_noise(
    engine: Engine, reference: Reference, maker: PromptMaker, hypotheses: Sequence[Hypothesis]
) -> float:
    """Return the mean difference of engine and reference without rotation, in nats a token.

    Args:
        engine: The engine.
        reference: The model to compare with.
        maker: The maker of prompts.
        hypotheses: The rotations that the engine may have. The noise is that of the closest one,
            where attention sinks let attention factors act.

    Raises:
        CannotVerify: The engine has another vocabulary, or serves another model.
    """
    size = reference.asked.config.vocab_size
    # Engines round vocabularies up, and leave out what a checkpoint pads its own with.
    if engine.vocab_size is not None and engine.vocab_size < max(maker.vocabulary) + 1:
        raise CannotVerify(
            f"{engine.name} has a vocabulary of {engine.vocab_size:,} tokens, expected the "
            f"model's {size:,}: give --against the model that it serves"
        )
    # The second token of a text sees one key, so its attention weight is 1 under any rotation: what
    # engine and reference differ by there is weights, vocabulary and numerics alone.
    prompts = _possible_pairs(reference, maker)
    observations: list[Observation] = [engine.observe(prompt) for prompt in prompts]
    observed = torch.tensor([v for each in observations for v in each.log_probs]).double()
    answered = [each.prompt for each in observations if each.prompt.scored]
    if not answered:
        raise CannotVerify(
            f"{engine.name} has no log-probability for any of {_PAIRS} tokens, expected one for "
            "each: turn log-probabilities on"
        )
    noise = _difference(observed, reference.plain_log_probs(answered))
    # Attention sinks (gpt-oss) share that weight; the attention factor decides how much they get.
    if noise > _QUIET:
        by_factor = {_factors_of(each): each for each in reversed(hypotheses)}
        noise = min(
            noise,
            *(
                _difference(observed, _log_probs(reference, each, answered))
                for each in by_factor.values()
            ),
        )
    if noise > _OTHER_MODEL:
        raise CannotVerify(
            f"{engine.name} serves another model: expected the model's log-probabilities where no "
            f"rotation has influence, got others, {noise:.2g} nats a token away: give --against "
            "the model that it serves"
        )
    return noise


def _gather(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens' log-probabilities in float64 on the CPU."""
    rows = max(1, _CHUNK // logits.shape[-1])
    return torch.cat(
        [
            part.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0].double().cpu()
            for part, ids in zip(logits.split(rows), tokens.split(rows), strict=True)
        ]
    )


def _possible_pairs(reference: Reference, maker: PromptMaker) -> list[ProbePrompt]:
    """Return pairs of random tokens, with second ones that the model finds possible."""
    # Of a large vocabulary, few are possible (an eighth of SmolLM2's). An engine and a reference
    # that both find a token impossible say nothing about noise.
    vocabulary = torch.tensor(maker.vocabulary)
    pairs = []
    for pair in (maker.make(PAIR, 2) for _ in range(_PAIRS)):
        first, second = pair.ids
        log_probs = reference.plain_next_log_probs(first)[vocabulary]
        possible = vocabulary[log_probs > LEAST].tolist() or [int(vocabulary[log_probs.argmax()])]
        if second not in possible:
            second = possible[second % len(possible)]
        pairs.append(replace(pair, ids=(first, second)))
    return pairs


def _difference(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((observed.clamp(min=LEAST) - expected.clamp(min=LEAST)).abs().mean())


def _factors_of(hypothesis: Hypothesis) -> tuple[float, ...]:
    rotation = hypothesis.rotation(2)
    factors = [each.attention_factor for each in rotation.frequencies.values()]
    return (*factors, rotation.softmax_mscale)


def _log_probs(
    reference: Reference, hypothesis: Hypothesis, prompts: Sequence[ProbePrompt]
) -> torch.Tensor:
    return torch.cat([reference.log_probs(hypothesis, prompt) for prompt in prompts])
