"""patch() and the handle it returns."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.methods.base import require_tokens
from rope_patch.patching.architecture.probe import set_frequencies, warn_about_cast
from rope_patch.patching.architecture.rotary_modules import find_owner
from rope_patch.patching.config_copy import ConfigOverride
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.dynamic.assisted_decoding import limit_candidates
from rope_patch.patching.dynamic.batching_guard import guard_batching, require_no_batching_manager
from rope_patch.patching.dynamic.compile_op import TraceRefusal
from rope_patch.patching.dynamic.generation_loop import watch_generate
from rope_patch.patching.kernels.eligibility import install_kernels, summarize_kernels
from rope_patch.patching.kernels.liger import warn_about_liger
from rope_patch.patching.mla_scale import base_softmax_scale
from rope_patch.patching.plan import PatchPlan, make_plan
from rope_patch.patching.position_guard import PositionIdsGuard, install_position_guards
from rope_patch.patching.replicas import support_replicas
from rope_patch.patching.request_keywords import require_keywords
from rope_patch.patching.stamp import (
    install_cache_stamps,
    require_static,
    rotation_digest,
    stamp_cache,
)
from rope_patch.patching.start_tokens import install_start_tokens
from rope_patch.patching.summary import summarize
from rope_patch.patching.undo_log import UndoLog

logger = logging.getLogger("rope_patch")


class Patch:
    """A patched model's handle: what is in effect, and how to undo it.

    Works as a context manager. Leaving the block, exception or not, undoes whatever patch is in
    effect then, and puts back what this one replaced: another patch, or the unpatched model. A
    patch that was undone by its own handle is not put back.

    Attributes:
        method: The method with its options.
        trained_length: Tokens the model was trained on at once.
        length: Tokens it is now meant for; None if it follows every length and none was named.
        factor: length / trained_length, or None.
        geometries: The unextended rotation of each layer type that was changed (None: all layers).
        frequencies: The rotation in effect at the target length, for the same layer types; at the
            trained length where there is no target (see `frequencies_at`).
        original_config: The text config of the unpatched model.
        original_frequencies: What the unpatched model rotates by, for the layer types that changed.
        softmax_mscale: By the square of what softmax scales are multiplied, where an architecture
            has the attention factor there instead of in cos and sin; else 1.
        mla_attentions: The attentions that have it there.
    """

    @torch_defaults()
    def __init__(self, plan: PatchPlan) -> None:
        self.method = plan.method
        self.trained_length = plan.trained_length
        self.length = plan.length
        self.factor = None if plan.length is None else plan.length / plan.trained_length
        self.geometries = plan.geometries
        self.original_config = plan.config
        self._unchanged_layer_types = plan.unchanged_layer_types
        self._length_hooks = [following for _, _, following in plan.length_hooks]
        self.frequencies = plan.frequencies()
        if self._length_hooks:
            self.frequencies = self.frequencies_at(plan.length or plan.trained_length)
        self.softmax_mscale = plan.softmax_mscale
        self.mla_attentions = plan.mla_attentions
        self.original_frequencies = {
            kind: found[kind]
            for _, found in plan.rotaries
            for kind in plan.geometries
            if kind in found
        }
        self._rotation_digest = rotation_digest(plan, self.frequencies)
        self._kernel_summary = summarize_kernels(plan.kernels, plan.rotation_sites)
        self._position_guards: list[PositionIdsGuard] = []
        self._context_parallel_group: Any = None
        # What leaving a `with` block needs, until the patch is over.
        self._model: nn.Module | None = None
        self._plan: PatchPlan | None = None
        self._previous: Patch | None = None
        self._entered = self._over = False
        self._undo_log = UndoLog()
        self._config_override = ConfigOverride()
        self._active = False

    @property
    def original(self) -> dict[str, Any]:
        """What the config said before: `max_position_embeddings` and `rope_parameters`."""
        names = ("max_position_embeddings", "rope_parameters")
        return {name: getattr(self.original_config, name) for name in names}

    @property
    def active(self) -> bool:
        """Whether the patch is in effect: neither undone nor replaced."""
        return self._active

    @property
    def is_length_dependent(self) -> bool:
        """Whether the frequencies follow the length of each sequence."""
        return bool(self._length_hooks)

    def undo(self) -> None:
        """Puts the unpatched model back, bit for bit; leaves it alone if the patch is not active.

        What somebody has changed since is theirs and stays: settings in the config, and attributes
        of modules, which a warning names. The model cannot refuse caches any more: those that the
        patch filled, and managers of continuous batching, are not for the model after it.
        """
        self._deactivate()
        self._over = True
        if not self._entered:
            self._model = self._plan = self._previous = None

    def frequencies_at(self, length: float) -> dict[str | None, Frequencies]:
        """The rotation of a sequence of `length` tokens, for each layer type that changed."""
        if self._length_hooks:
            return self._length_hooks[0].frequencies(length)
        return self.frequencies

    def fix_length(self, length: int | None) -> None:
        """Says how long every sequence is from here on, instead of looking at each.

        For training on one length, where nothing then waits for a device and processes need not
        ask each other, and for caches whose keys cannot be rotated again. Does nothing where the
        frequencies do not follow the sequence.

        Args:
            length: Tokens; None looks at each sequence again.
        """
        if length is not None:
            require_tokens("length", length)
        for following in self._length_hooks:
            following.fixed_length = length

    def accept_cache(self, cache: Any) -> None:
        """Say that this very rotation rotated a cache's keys, which a rebuilt cache cannot tell.

        For caches that are made from stored tensors. Caches that the patched model filled, and
        their copies (`copy.deepcopy`, pickles), are accepted without it.

        Args:
            cache: Any of transformers' caches, whose keys are taken as they are, unchecked.

        Raises:
            ValueError: The frequencies follow the sequence, so only the model can tell.
            TypeError: Not a cache.
        """
        require_static(self.method, self._length_hooks)
        stamp_cache(cache, self._rotation_digest)

    def share_length(self, group: Any) -> None:
        """Says that processes hold parts of the same sequences, so lengths are the largest of all.

        Under accelerate's context parallelism this is known; call it where torch's is used without
        accelerate, or where sequences are split in another way. Each process must be given the
        positions in the whole sequence.

        Args:
            group: The processes, a torch.distributed group; None ends it.
        """
        self._context_parallel_group = group
        for following in self._length_hooks:
            following.group = group
        for placed in self._position_guards:
            placed.group = group

    def summary(self) -> str:
        """What is in effect, a few lines to print."""
        return summarize(self, self._unchanged_layer_types, self._kernel_summary)

    def __str__(self) -> str:
        length = "any length" if self.length is None else f"{self.length:,} tokens"
        return f"{self.method}, {self.trained_length:,} → {length}"

    def __repr__(self) -> str:
        return f"<rope_patch.Patch {self}{'' if self.active else ' (undone)'}>"

    def __enter__(self) -> Patch:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        model, before = self._model, self._previous
        self._entered = False
        self.undo()
        if model is None:  # it was over when the block began
            return
        if standing := current(model):
            standing.undo()
        if before is not None:
            before._restore(model)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a module must not take along what was patched around it.
        return {**vars(self), "_model": None}

    def _deactivate(self) -> None:
        """Undo what was changed, so that it can be applied again."""
        foreign = self._undo_log.undo() + self._config_override.undo()
        self._active = False
        if foreign:
            logger.warning(
                "%s: replaced after the model was patched, so undoing leaves it as it is",
                ", ".join(foreign),
            )

    def _restore(self, model: nn.Module) -> None:
        """Apply the patch again after another one, unless it is over.

        Args:
            model: What the other one was applied to; a copied handle knows no model of its own.
        """
        if self._plan is not None and not self._over:
            self._apply(model if self._model is None else self._model, self._plan)

    @torch_defaults()
    def _apply(self, model: nn.Module, plan: PatchPlan) -> None:
        """Changes the model; leaves it as it was if anything goes wrong on the way."""
        self._model, self._plan = model, plan
        try:
            rotaries = [rotary for rotary, _ in plan.rotaries]
            self._position_guards = install_position_guards(model, rotaries, self._undo_log)
            if not plan.length_hooks:
                install_cache_stamps(model, rotaries, self._rotation_digest, self._undo_log)
            guard_batching(model, self._rotation_digest, self._length_hooks, self._undo_log)
            for placed in self._position_guards:
                placed.group = self._context_parallel_group
            warn_about_cast(rotaries)
            # Where the frequencies follow the sequence, hooks put others in their place.
            initial = self.frequencies_at(1)
            for rotary, before in plan.rotaries:
                set_frequencies(rotary, before, initial, self._undo_log)
                if kept := plan.method.start_token_count:
                    install_start_tokens(
                        model, rotary, plan.geometries, before, plan.config, kept, self._undo_log
                    )
                self._undo_log.set(rotary.module, "extra_repr", partial(str, str(self)))
                self._undo_log.set(rotary.module, "_rope_patch", self)
            for attention in plan.mla_attentions:
                scale = base_softmax_scale(attention) * self.softmax_mscale**2
                self._undo_log.set(attention, "scaling", scale)
            for decoder, rotary, following in plan.length_hooks:
                self._undo_log.hook(decoder, before=TraceRefusal(str(self.method)))
                following.attach(decoder, rotary, self._undo_log)
            limit_candidates(model, plan.length_hooks, self._undo_log)
            watch_generate(model, plan.length_hooks, self._undo_log)
            for rotation in plan.rotation_sites:
                install_kernels(rotation, plan.kernels, self._undo_log)
                for _, rotary, following in plan.length_hooks:
                    if rotary is rotation.rotary and rotation.uses_passthrough:
                        following.kernels = plan.kernels
            support_replicas(self._undo_log)
            ours = {id(r.rotary.module): r.problem is None for r in plan.rotation_sites}
            for rotary in rotaries:
                here = ours.get(id(rotary.module), False)
                warn_about_liger(
                    find_owner(model, rotary),
                    rotary,
                    uses_our_kernels=here,
                    undo_log=self._undo_log,
                )
            # transformers' own dynamic scaling takes this field for the trained length, and where
            # no config has a form for the method, a larger one would promise too much.
            reached = plan.length if plan.method.has_config_form and not plan.is_dynamic else None
            fields = {
                "max_position_embeddings": reached or plan.trained_length,
                "rope_parameters": plan.rope_parameters(),
            }
            self._config_override.apply(model, type(plan.config), fields)
            self._active = True
        except BaseException:
            self.undo()
            raise


@require_keywords
def patch(
    model: nn.Module,
    method: str,
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    kernels: str = "auto",
    start: str = "auto",
    **options: Any,
) -> Patch:
    """Takes a live model to a longer context, in place.

    A model that is patched already gets the new patch instead; undoing still returns to the
    original. With `with`, leaving the block puts the replaced patch back.

    Args:
        model: A transformers decoder with RoPE, or anything around one (PEFT, accelerate, compile).
        method: A name from `rope_patch.list_methods()`.
        factor: Target length / trained length. Exactly one of `factor` and `length`; dynamic
            methods and `nope` need neither.
        length: Target length in tokens; for dynamic methods the largest one expected.
        trained_length: Tokens of pretraining, if the config does not tell the truth about them.
        layer_types: Which layers to change, where a model has several types; all but the
            sliding-window ones unless given.
        kernels: Who applies the rotation. "auto": Triton's kernels on a GPU, plain torch on a CPU,
            and transformers' own code in compiled graphs, which Inductor makes as fast, and where
            an architecture rotates in a way of its own. "reference" and "triton" demand plain torch
            and Triton, "hf" is transformers' own code throughout.
        start: What is stretched where the checkpoint's own config scales its rotation already.
            "unscaled": the frequencies and the length before that; "running": the frequencies that
            the model runs with, and its full length. "auto" replaces `linear`, `dynamic` and `yarn`
            and builds on the others (`llama3`, `longrope`, ...), which were trained in.
        **options: The method's options.

    Returns:
        The handle, with `.undo()`.

    Raises:
        ValueError: A request that cannot be met or would change nothing. The model is as before.
        TypeError: A value of the wrong type. The model is as before.
    """
    plan = check(
        model,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        kernels=kernels,
        start=start,
        **options,
    )
    handle = Patch(plan)
    if standing := current(model):
        standing._deactivate()
        handle._previous = standing
        if not standing._entered:  # nobody leaves it, so it need not know what it replaced
            standing._previous = None
    try:
        handle._apply(model, plan)
    except BaseException:
        if standing:
            standing._restore(model)
        raise
    if logger.isEnabledFor(logging.INFO):
        logger.info("patched %s: %s", type(model).__name__, handle.summary().replace("\n ", ";"))
    return handle


@torch_defaults()
def check(
    model: nn.Module,
    method: str,
    *,
    factor: float | None = None,
    length: int | None = None,
    trained_length: int | None = None,
    layer_types: list[str] | None = None,
    kernels: str = "auto",
    start: str = "auto",
    **options: Any,
) -> PatchPlan:
    """Raises whatever `patch` would raise for the same arguments; changes nothing."""
    standing = current(model)
    require_no_batching_manager(model)
    return make_plan(
        model,
        standing.original_config if standing else None,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=layer_types,
        kernels=kernels,
        start=start,
        options=options,
    )


def current(model: nn.Module) -> Patch | None:
    """The handle of the patch that is in effect on a model, or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}")
    for module in model.modules():
        if handle := vars(module).get("_rope_patch"):
            return handle
    return None


def unpatch(model: nn.Module) -> None:
    """Undoes the patch that is in effect on a model.

    Raises:
        ValueError: There is none.
    """
    handle = current(model)
    if handle is None:
        raise ValueError(f"{type(model).__name__} is not patched: there is nothing to undo")
    handle.undo()
