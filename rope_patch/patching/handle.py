"""patch() and the handle it returns."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.methods.base import require_tokens
from rope_patch.patching.architecture.probe import report_cast, set_frequencies
from rope_patch.patching.architecture.rotary_modules import find_owner
from rope_patch.patching.config_copy import ConfigSwap
from rope_patch.patching.defaults import as_by_default
from rope_patch.patching.dynamic.assisted_decoding import limit_candidates
from rope_patch.patching.dynamic.batching_guard import guard_batching, require_no_manager
from rope_patch.patching.dynamic.compile_op import TraceRefusal
from rope_patch.patching.dynamic.generation_loop import watch_generate
from rope_patch.patching.kernels.eligibility import put_ours, who_rotates
from rope_patch.patching.kernels.liger import watch_for_liger
from rope_patch.patching.mla_scale import unsharpened
from rope_patch.patching.plan import Plan, make_plan
from rope_patch.patching.position_guard import Placed, require_places
from rope_patch.patching.replicas import support_replicas
from rope_patch.patching.request_keywords import named_after_method
from rope_patch.patching.stamp import digest, require_static, stamp, stamp_caches
from rope_patch.patching.start_tokens import keep_start
from rope_patch.patching.summary import summarize
from rope_patch.patching.undo_log import Swaps

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
        sharpening: By the square of what softmax scales are multiplied, where an architecture has
            the attention factor there instead of in cos and sin; else 1.
        sharpened: The attentions that have it there.
    """

    @as_by_default()
    def __init__(self, plan: Plan) -> None:
        self.method = plan.method
        self.trained_length = plan.trained_length
        self.length = plan.length
        self.factor = None if plan.length is None else plan.length / plan.trained_length
        self.geometries = plan.geometries
        self.original_config = plan.config
        self._unchanged = plan.unchanged
        self._followings = [following for _, _, following in plan.followings]
        self.frequencies = plan.frequencies()
        if self._followings:
            self.frequencies = self.frequencies_at(plan.length or plan.trained_length)
        self.sharpening = plan.sharpening
        self.sharpened = plan.sharpened
        self.original_frequencies = {
            kind: found[kind]
            for _, found in plan.rotaries
            for kind in plan.geometries
            if kind in found
        }
        self._rotation = digest(plan, self.frequencies)
        self._rotating = who_rotates(plan.kernels, plan.rotations)
        self._placed: list[Placed] = []
        self._group: Any = None
        # What leaving a `with` block needs, until the patch is over.
        self._model: nn.Module | None = None
        self._plan: Plan | None = None
        self._before: Patch | None = None
        self._entered = self._over = False
        self._swaps = Swaps()
        self._config = ConfigSwap()
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
    def follows(self) -> bool:
        """Whether the frequencies follow the length of each sequence."""
        return bool(self._followings)

    def undo(self) -> None:
        """Puts the unpatched model back, bit for bit; leaves it alone if the patch is not active.

        What somebody has changed since is theirs and stays: settings in the config, and attributes
        of modules, which a warning names. The model cannot refuse caches any more: those that the
        patch filled, and managers of continuous batching, are not for the model after it.
        """
        self._remove()
        self._over = True
        if not self._entered:
            self._model = self._plan = self._before = None

    def frequencies_at(self, length: float) -> dict[str | None, Frequencies]:
        """The rotation of a sequence of `length` tokens, for each layer type that changed."""
        if self._followings:
            return self._followings[0].frequencies(length)
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
        for following in self._followings:
            following.fixed = length

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
        require_static(self.method, self._followings)
        stamp(cache, self._rotation)

    def share_length(self, group: Any) -> None:
        """Says that processes hold parts of the same sequences, so lengths are the largest of all.

        Under accelerate's context parallelism this is known; call it where torch's is used without
        accelerate, or where sequences are split in another way. Each process must be given the
        positions in the whole sequence.

        Args:
            group: The processes, a torch.distributed group; None ends it.
        """
        self._group = group
        for following in self._followings:
            following.group = group
        for placed in self._placed:
            placed.group = group

    def summary(self) -> str:
        """What is in effect, a few lines to print."""
        return summarize(self, self._unchanged, self._rotating)

    def __str__(self) -> str:
        length = "any length" if self.length is None else f"{self.length:,} tokens"
        return f"{self.method}, {self.trained_length:,} → {length}"

    def __repr__(self) -> str:
        return f"<rope_patch.Patch {self}{'' if self.active else ' (undone)'}>"

    def __enter__(self) -> Patch:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        model, before = self._model, self._before
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

    def _remove(self) -> None:
        """Undo what was changed, so that it can be applied again."""
        foreign = self._swaps.undo() + self._config.undo()
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

    @as_by_default()
    def _apply(self, model: nn.Module, plan: Plan) -> None:
        """Changes the model; leaves it as it was if anything goes wrong on the way."""
        self._model, self._plan = model, plan
        try:
            rotaries = [rotary for rotary, _ in plan.rotaries]
            self._placed = require_places(model, rotaries, self._swaps)
            if not plan.followings:
                stamp_caches(model, rotaries, self._rotation, self._swaps)
            guard_batching(model, self._rotation, self._followings, self._swaps)
            for placed in self._placed:
                placed.group = self._group
            report_cast(rotaries)
            # Where the frequencies follow the sequence, hooks put others in their place.
            initial = self.frequencies_at(1)
            for rotary, before in plan.rotaries:
                set_frequencies(rotary, before, initial, self._swaps)
                if kept := plan.method.kept_tokens:
                    keep_start(
                        model, rotary, plan.geometries, before, plan.config, kept, self._swaps
                    )
                self._swaps.set(rotary.module, "extra_repr", partial(str, str(self)))
                self._swaps.set(rotary.module, "_rope_patch", self)
            for attention in plan.sharpened:
                scale = unsharpened(attention) * self.sharpening**2
                self._swaps.set(attention, "scaling", scale)
            for decoder, rotary, following in plan.followings:
                self._swaps.hook(decoder, before=TraceRefusal(str(self.method)))
                following.attach(decoder, rotary, self._swaps)
            limit_candidates(model, plan.followings, self._swaps)
            watch_generate(model, plan.followings, self._swaps)
            for rotation in plan.rotations:
                put_ours(rotation, plan.kernels, self._swaps)
                for _, rotary, following in plan.followings:
                    if rotary is rotation.rotary and rotation.hands_over:
                        following.kernels = plan.kernels
            support_replicas(self._swaps)
            ours = {id(r.rotary.module): r.problem is None for r in plan.rotations}
            for rotary in rotaries:
                here = ours.get(id(rotary.module), False)
                watch_for_liger(find_owner(model, rotary), rotary, ours=here, swaps=self._swaps)
            # transformers' own dynamic scaling takes this field for the trained length, and where
            # no config has a form for the method, a larger one would promise too much.
            reached = plan.length if plan.method.native and not plan.grows else None
            fields = {
                "max_position_embeddings": reached or plan.trained_length,
                "rope_parameters": plan.rope_parameters(),
            }
            self._config.apply(model, type(plan.config), fields)
            self._active = True
        except BaseException:
            self.undo()
            raise


@named_after_method
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
        standing._remove()
        handle._before = standing
        if not standing._entered:  # nobody leaves it, so it need not know what it replaced
            standing._before = None
    try:
        handle._apply(model, plan)
    except BaseException:
        if standing:
            standing._restore(model)
        raise
    if logger.isEnabledFor(logging.INFO):
        logger.info("patched %s: %s", type(model).__name__, handle.summary().replace("\n ", ";"))
    return handle


@as_by_default()
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
) -> Plan:
    """Raises whatever `patch` would raise for the same arguments; changes nothing."""
    standing = current(model)
    require_no_manager(model)
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
