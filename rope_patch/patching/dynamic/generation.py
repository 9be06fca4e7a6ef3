"""Follow transformers' `generate`: next positions, admission, drafts and continuous batching.

- `watch_generate`: the positions of the next tokens, without reading them from a device.
- `watch_admission`: the length that a sequence may reach, for methods that fix the factor by it.
- `limit_candidates`: drafts of assisted decoding, which end where frequencies change.
- `guard_batching`: continuous batching, which is refused where its results would be wrong.
"""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rope_patch.methods import Method
from rope_patch.ops.modes import version_counter
from rope_patch.patching.dynamic.cache_record import cached_positions
from rope_patch.patching.dynamic.frequency_table import FrequencyTable
from rope_patch.patching.positions import first_and_last_positions, prompt_positions
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import is_paged, require_counted_cache
from rope_patch.transformers_api.forwards import EMBEDDINGS, MASK, POSITIONS, cache_among
from rope_patch.transformers_api.generation import (
    CANDIDATE_GENERATOR,
    GENERATE,
    PREPARE_CACHE,
    PREPARE_INPUTS,
    PREPARE_LENGTH,
    START_BATCHING,
    UPDATE_ARGUMENTS,
    batching_manager,
    batching_modules,
    drafts_at_least_one,
    generating_modules,
    has_stock_step,
)
from rope_patch.utils.errors import Refused


class LengthFollower(Protocol):
    """What generate and continuous batching ask of the hooks that follow a decoder's lengths."""

    method: Method
    axes: int | None
    fixed_length: float | None
    frequency_table: FrequencyTable
    generation_loop: GenerationLoop
    admission: Admission


# Each decoder that follows lengths, its rotary module and its hooks.
HookedDecoders = Sequence[tuple[nn.Module, Any, LengthFollower]]


class _TensorSnapshot:
    """Identity and version of a tensor, to recognise it if nobody wrote into it since."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = version_counter(tensor)

    def is_still(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor and self._version == version_counter(tensor)


@dataclass
class _Step:
    """One decoding step of generate."""

    source: _TensorSnapshot  # what the step's positions were made from; see `_position_source`
    position_ids: _TensorSnapshot  # as generate passes them to the model, [B, 1] or [A, B, 1]
    # The same positions as B numbers, where they are known; the highest of several axes.
    positions: list[float] | None
    done: bool = False  # whether the decoder had its forward


class GenerationLoop(threading.local):
    """State of the generate loop that calls a decoder in this thread.

    A new token may have any position, so its position has to be read, which waits for the GPU.
    transformers' own decoding loop extends its position_ids by the last one plus 1. So after the
    first read, positions are certain as long as each step's tensor is the one that transformers
    made from the previous step's tensor, and the decoder receives that very tensor. All other
    positions are read.
    """

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._next: _TensorSnapshot | None = None

    def prepare(self, source: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
        """Note a step whose inputs generate has prepared."""
        last, expected_source = self._step, self._next
        self._step = self._next = None
        if source is None or position_ids is None or position_ids.shape[-1] != 1:
            return
        positions = None
        linked = expected_source is not None and expected_source.is_still(source)
        if linked and last is not None and last.positions:
            positions = [position + 1 for position in last.positions]
        self._step = _Step(_TensorSnapshot(source), _TensorSnapshot(position_ids), positions)

    def update(self, before: torch.Tensor | None, after: torch.Tensor | None, tokens: int) -> None:
        """Note the tensor that generate counts positions by, before and after a step extends it."""
        step, self._next = self._step, None
        if step is None or not step.done or before is None or after is None or tokens != 1:
            return
        if step.source.is_still(before):
            self._next = _TensorSnapshot(after)

    def take(self, position_ids: torch.Tensor | None) -> list[float] | None:
        """Return the positions of a decoder's forward if they are certain, else None.

        Args:
            position_ids: The forward's `position_ids`; None in a compiled graph, which has others.
        """
        step = self._step
        if (
            step is None
            or step.done
            or (position_ids is not None and not step.position_ids.is_still(position_ids))
        ):
            self._step = None
            return None
        step.done = True
        return step.positions

    def note_positions(self, positions: list[float]) -> None:
        """Note the positions of the present step; negative where a mask hides them."""
        if self._step is not None:
            self._step.positions = positions if min(positions) >= 0 else None


def watch_generate(model: nn.Module, length_hooks: HookedDecoders, undo_log: UndoLog) -> None:
    """Report each step of a model's generate to its `LengthHooks`.

    Does nothing for architectures that override how inputs are prepared.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        for module in model.modules():
            stock = all(has_stock_step(module, name) for name in (PREPARE_INPUTS, UPDATE_ARGUMENTS))
            if stock and any(inner is decoder for inner in module.modules()):
                for name, wrapper in (
                    (PREPARE_INPUTS, _PrepareInputs),
                    (UPDATE_ARGUMENTS, _UpdateModelKwargs),
                ):
                    undo_log.set(module, name, wrapper(getattr(module, name), hooks))


def _position_source(model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that generate extends: position_ids, else the attention mask."""
    positions = model_kwargs.get(POSITIONS)
    return model_kwargs.get(MASK) if positions is None else positions


class WrappedMethod:
    """Wrapper of a model's method that keeps the method's signature."""

    def __init__(self, original_method: Any, hooks: Any) -> None:
        self.original_method = original_method
        self.hooks = hooks

    @property
    def __signature__(self) -> inspect.Signature:
        # generate reads the arguments that the model accepts from it.
        return inspect.signature(self.original_method)


class _PrepareInputs(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = self.original_method(*args, **kwargs)
        self.hooks.generation_loop.prepare(_position_source(kwargs), inputs.get(POSITIONS))
        return inputs


class _UpdateModelKwargs(WrappedMethod):
    def __call__(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        before = _position_source(model_kwargs)
        updated = self.original_method(outputs, model_kwargs, *args, **kwargs)
        tokens = args[1] if len(args) > 1 else kwargs.get("num_new_tokens", 1)
        self.hooks.generation_loop.update(before, _position_source(updated), tokens)
        return updated


class Admission(threading.local):
    """Lengths that the present generate of this thread asks for.

    generate says beforehand how long each sequence may become: its prompt and `max_new_tokens`, of
    which the model never reads the last. The frequencies of that length rotate the sequence from
    its first token on, so no cached key is ever re-rotated. Outside of generate a sequence is
    admitted with what its first forward holds.

    Attributes:
        lengths: Tokens of each row with all that may be read; None outside of generate.
        prompt: Tokens of the prompt in its longest row, and its device.
        new_tokens: How many generated tokens may be read: all but the last.
        is_draft: Whether an assistant generates a draft, whose cache no request announces.
        is_new: Whether the lengths have yet to be compared with those that the cache serves.
    """

    def __init__(self) -> None:
        self.lengths: list[float] | None = None
        self.prompt = (0, torch.device("cpu"))
        self.new_tokens = 0
        self.is_draft = self.is_new = False

    @contextmanager
    def generate(self) -> Iterator[None]:
        """Keep the lengths of an outer generate for after this one."""
        outer = dict(vars(self))
        try:
            yield
        finally:
            vars(self).update(outer)

    def admit(self, model_kwargs: dict[str, Any], is_draft: bool) -> None:
        """Note the lengths of a generate's rows.

        Args:
            model_kwargs: The generate's arguments for the model, with those that it made.
            is_draft: Whether the tokens are a draft of assisted decoding.
        """
        if is_draft and self.lengths is not None:
            return  # early exit drafts for the outer generate's rows
        cached = cached_positions(cache_among(model_kwargs))
        positions, last = prompt_positions(model_kwargs, cached, *self.prompt)
        spans = first_and_last_positions(positions).tolist()
        self.lengths = [
            max(largest, end + self.new_tokens) - first + 1
            for (first, largest), end in zip(spans, last, strict=True)
        ]
        self.is_draft, self.is_new = is_draft, True

    def lengths_of_rows(self, lengths: list[float], reaches: list[float]) -> list[float]:
        """Return the lengths whose frequencies rows get.

        Args:
            lengths: Tokens of each row so far.
            reaches: The length that each row's present frequencies serve; NaN if it has none.
        """
        self.is_new = False
        admitted = self.lengths or [0.0]
        if len(admitted) != len(lengths):  # one for all, or rows that generate does not count
            admitted = [max(admitted)] * len(lengths)
        needs = list(map(max, lengths, admitted))
        return [
            reach if need <= reach else need  # False for NaN
            for need, reach in zip(needs, reaches, strict=True)
        ]

    def require_draft(self, need: float) -> None:
        """Raise unless cached keys may be re-rotated, which only those of a draft may.

        Args:
            need: The length that the frequencies must serve.

        Raises:
            ValueError: The keys are a sequence's own. The message says what to do instead.
        """
        if self.is_draft:
            return
        raise Refused(
            "with growth='admission' a sequence keeps the factor that its cache began with, and "
            f"this one asks for the factor of {math.floor(need):,} tokens: expected a sequence "
            "that stays within the length it was admitted with. Say the whole length before its "
            "first token (`handle.fix_length(...)`), or read the text again into a new cache, or "
            "use growth='stepped', which rotates cached keys again"
        )


def watch_admission(model: nn.Module, length_hooks: HookedDecoders, undo_log: UndoLog) -> None:
    """Report the lengths that a model's generate asks for to `LengthHooks` that fix them.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        if not hooks.method.fixed_at_admission:
            continue
        wrappers: dict[str, type[WrappedMethod]] = {
            GENERATE: _Generate,
            PREPARE_LENGTH: _PrepareLength,
            PREPARE_CACHE: _PrepareCache,
        }
        for module in generating_modules(model, decoder, *wrappers):
            for name, wrapper in wrappers.items():
                undo_log.set(module, name, wrapper(getattr(module, name), hooks))


class _Generate(WrappedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.hooks.admission.generate():
            return self.original_method(*args, **kwargs)


class _PrepareLength(WrappedMethod):
    def __call__(self, **kwargs: Any) -> Any:
        config, admission = self.original_method(**kwargs), self.hooks.admission
        ids, inputs = kwargs["input_ids_length"], kwargs["inputs_tensor"]
        admission.prompt = (max(ids, inputs.shape[1]), inputs.device)
        admission.new_tokens = max(config.max_length - ids - 1, 0)
        return config


class _PrepareCache(WrappedMethod):
    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = self.original_method(generation_config, model_kwargs, *args, **kwargs)
        self.hooks.admission.admit(model_kwargs, bool(generation_config.is_assistant))
        return result


def limit_candidates(model: nn.Module, length_hooks: HookedDecoders, undo_log: UndoLog) -> None:
    """End the drafts of assisted decoding where frequencies change.

    Tokens processed together use the frequencies of the last one. A draft token beyond a change of
    frequencies, accepted or not, would change how the tokens before it are rotated. So drafts end
    at the length that the next token's frequencies serve, and assisted decoding rotates every token
    as token-by-token decoding does.

    Args:
        model: The patched model, or a wrapper of it.
        length_hooks: Each decoder that follows lengths, its rotary module and its `LengthHooks`.
        undo_log: Log of the changes.
    """
    for decoder, _, hooks in length_hooks:
        for module in generating_modules(model, decoder, CANDIDATE_GENERATOR):
            factory = _LimitedGeneratorFactory(getattr(module, CANDIDATE_GENERATOR), hooks)
            undo_log.set(module, CANDIDATE_GENERATOR, factory)


class _LimitedGeneratorFactory(WrappedMethod):
    """Wrapper of `_get_candidate_generator` that limits the drafts of the generators it makes."""

    def __call__(self, *, input_ids: torch.Tensor, model_kwargs: dict[str, Any], **options: Any):
        generator = self.original_method(input_ids=input_ids, model_kwargs=model_kwargs, **options)
        sequence = _SequencePositions(input_ids, model_kwargs, self.hooks.axes)
        limit = _CandidateLimit(generator, self.hooks, sequence)
        generator.get_candidates = limit.get_candidates
        generator.update_candidate_strategy = limit.update_candidate_strategy
        return generator


class _SequencePositions:
    """Positions, when decoding begins, of the one sequence that assisted decoding extends."""

    def __init__(
        self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], axes: int | None
    ) -> None:
        self.tokens = input_ids.shape[1]  # number of ids
        embeddings = model_kwargs.get(EMBEDDINGS)
        width = max(self.tokens, 0 if embeddings is None else embeddings.shape[1])
        cached = cached_positions(cache_among(model_kwargs))
        positions, last = prompt_positions(model_kwargs, cached, width, input_ids.device, axes)
        # `largest` is not the last token's position where positions start anew.
        self.first, self.largest = first_and_last_positions(positions)[0].tolist()
        self.last = last[0]  # position of the last token: the highest of several axes


class _CandidateLimit:
    """Wrappers of a candidate generator's two methods."""

    def __init__(self, generator: Any, hooks: LengthFollower, sequence: _SequencePositions) -> None:
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


_ROTATION_ATTRIBUTE = "_rope_patch_rotation"


class BatchingGuard:
    """Wrapper of `init_continuous_batching` that refuses paged caches of several rotations.

    Continuous batching keeps the keys of many requests in the blocks of one paged cache, where they
    cannot be re-rotated. Its forward calls run in a thread of their own, where an error would only
    fail the requests. So the method that starts it raises in the caller's thread.

    Attributes:
        module: The model.
        original_method: What is wrapped.
        rotation: Names what positions do to keys; a manager's cache is filled under one name.
        length_hooks: Hooks that follow lengths.
        refusal: Why the model is refused, whatever its lengths; None if it is not.
    """

    def __init__(
        self,
        module: nn.Module,
        rotation: str | None,
        length_hooks: Sequence[LengthFollower],
        refusal: str | None,
    ) -> None:
        self.module = module
        self.original_method = getattr(module, START_BATCHING)
        self.rotation = rotation
        self.length_hooks = length_hooks
        self.refusal = refusal

    def check(self) -> None:
        """Raise if no paged cache is right for the model."""
        if self.refusal is not None:
            raise Refused(self.refusal)
        for hooks in self.length_hooks:
            if hooks.fixed_length is None:
                raise Refused(paged_cache_refusal(hooks.method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        if self.rotation is None:
            return self.original_method(*args, **kwargs)
        lengths = [f"{hooks.fixed_length:g}" for hooks in self.length_hooks]
        rotation = " ".join([self.rotation, *lengths])
        manager = batching_manager(self.module)
        if manager is not None and vars(manager).get(_ROTATION_ATTRIBUTE) != rotation:
            raise Refused(manager_refusal(self.module))
        manager = self.original_method(*args, **kwargs)
        setattr(manager, _ROTATION_ATTRIBUTE, rotation)
        return manager


def guard_batching(
    model: nn.Module,
    undo_log: UndoLog,
    *,
    rotation: str | None = None,
    length_hooks: Sequence[LengthFollower] = (),
    refusal: str | None = None,
) -> None:
    """Have a model refuse continuous batching whose paged cache would mix rotations.

    Any paged cache does while frequencies depend on lengths, and so does a manager that was created
    under another rotation.

    Args:
        model: The model.
        undo_log: Log of the changes.
        rotation: Names what positions do to keys; None if that stays for as long as the model can
            have a manager.
        length_hooks: The patch's hooks that follow lengths.
        refusal: Why any paged cache is refused; None if it is not.
    """
    for module in batching_modules(model):
        guard = BatchingGuard(module, rotation, length_hooks, refusal)
        undo_log.set(module, START_BATCHING, guard)


def require_batching(model: nn.Module) -> None:
    """Raise if a model refuses continuous batching, before anything starts it.

    Raises:
        ValueError: It does. The message says why, and what to do instead.
    """
    for module in model.modules():
        guard = vars(module).get(START_BATCHING)
        while isinstance(guard, BatchingGuard):
            guard.check()
            guard = guard.original_method


def require_no_paged_cache(cache: Any, refusal: str) -> None:
    """Raise if the keys of a forward call go to a paged cache.

    Args:
        cache: What the forward is given, or None.
        refusal: The message, which names what to use instead.

    Raises:
        ValueError: They do, or the cache does not count its tokens.
    """
    if is_paged(cache):
        raise Refused(refusal)
    require_counted_cache(cache)


def require_no_batching_manager(model: nn.Module) -> None:
    """Raise if a model keeps a manager of continuous batching, whose cache may share old keys.

    Raises:
        ValueError: It does. The message says how to remove the manager.
    """
    for module in model.modules():
        if batching_manager(module) is not None:
            raise Refused(manager_refusal(module))


def manager_refusal(module: nn.Module) -> str:
    """Return the message that refuses a manager and says how to remove it."""
    return (
        f"{type(module).__name__} keeps a manager of continuous batching "
        "(persistent_manager=True), whose paged cache holds keys of another rotation: call "
        "model.destroy_cached_continuous_batching_manager() first"
    )


def paged_cache_refusal(method: object) -> str:
    """Return the message that refuses continuous batching and names what to use instead."""
    return (
        f"{method} follows the length of each sequence, and keys in the paged cache of continuous "
        "batching cannot be rotated again: expected a method whose frequencies stay, such as yarn; "
        "or say the length beforehand (`handle.fix_length(...)`), or use model.generate"
    )


def position_map_refusal(position_map: object) -> str:
    """Return the message that refuses continuous batching under a position map."""
    return (
        f"{position_map} compares each query with all keys of its sequence, and the paged cache of "
        "continuous batching holds the keys of many: expected a method that changes frequencies "
        "alone, such as yarn; or use model.generate"
    )


def slots_refusal(encoding: str) -> str:
    """Return the message that refuses continuous batching under an encoding that reads slots.

    Args:
        encoding: Names the encoding.
    """
    return (
        f"{encoding} measures distances by slots of the cache, and continuous batching packs many "
        "requests into one row of slots: expected a model that rotates, or that adds its positions "
        "to embeddings; or use model.generate"
    )
