"""The handle of a patched model, which applies and undoes a patch plan."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rope_patch.methods import Frequencies
from rope_patch.methods.base import require_tokens
from rope_patch.methods.position_map import PositionMap
from rope_patch.original_config import FIELD, trained_config_length, trained_record
from rope_patch.patching.architecture.frequency_buffers import set_frequencies, warn_about_cast
from rope_patch.patching.architecture.mla_scale import base_softmax_scale
from rope_patch.patching.architecture.rotary_modules import find_rotaries, warn_about_liger
from rope_patch.patching.attention_interception import install_temperature
from rope_patch.patching.dynamic.frequency_table import TraceRefusal
from rope_patch.patching.dynamic.generation import (
    guard_batching,
    limit_candidates,
    position_map_refusal,
    watch_admission,
    watch_generate,
)
from rope_patch.patching.kernels.eligibility import install_kernels, summarize_kernels
from rope_patch.patching.length_warning import (
    install_length_warning,
    make_length_warning,
    read_dropped_texts_again,
)
from rope_patch.patching.method_wrappers import describe_start, method_origin, unwrap
from rope_patch.patching.plan import PatchPlan, saved_frequencies
from rope_patch.patching.position_maps.mapped_attention import install_position_map
from rope_patch.patching.position_maps.position_hooks import PositionHooks
from rope_patch.patching.positions import PositionRule, install_position_rule
from rope_patch.patching.stamp import (
    install_cache_stamps,
    require_static,
    rotation_digest,
    stamp_cache,
)
from rope_patch.patching.start_tokens import install_start_tokens
from rope_patch.patching.torch_state import support_replicas, torch_defaults
from rope_patch.patching.undo_log import ConfigOverride, UndoLog
from rope_patch.utils.errors import text_html

logger = logging.getLogger("rope_patch")


class Patch:
    """Handle of a patched model: describes the patch and undoes it.

    Works as a context manager. Leaving the block, exception or not, undoes whatever patch is in
    effect then, and restores what this one replaced: another patch, or the unpatched model. A
    patch that was undone by its own handle is not restored.

    Attributes:
        extension: The request, with all that the config and the method's defaults decided;
            `patch(model, handle.extension)` asks for the same patch.
        method: The method with its options.
        trained_length: Tokens the model was trained on at once.
        length: Target length in tokens; None if the method follows every length without a target.
        factor: length / trained_length, or None.
        geometries: The unextended rotation of each layer type that changed (None: all layers).
        frequencies: The rotation in effect at the target length, for the same layer types; at the
            trained length where there is no target (see `frequencies_at`).
        original_config: The text config that the patch extends: of the model as it was trained.
        is_trained: Whether weights were trained under this very rotation.
        original_frequencies: Frequencies of the unpatched model, for the layer types that changed.
        softmax_mscale: mscale applied in the softmax scale (squared) for MLA models; 1 for all
            others.
        mla_attentions: The attentions with mscale in their softmax scale.
    """

    @torch_defaults()
    def __init__(self, plan: PatchPlan) -> None:
        self.extension = plan.resolved_extension
        self.method = plan.method
        self.trained_length = plan.trained_length
        self.length = plan.length
        self.factor = None if plan.length is None else plan.length / plan.trained_length
        self.geometries = plan.geometries
        self.original_config = plan.config
        # A plan that starts from a rotation that no config states restores that rotation.
        record = trained_record(plan.config)
        self.is_trained = record is not None and record["rope_parameters"] is None
        self._model_config = plan.model_config
        self._unchanged_layer_types = plan.unchanged_layer_types
        self._length_hooks = [hooks for _, _, hooks in plan.length_hooks]
        self.frequencies = plan.frequencies()
        if self._length_hooks:
            self.frequencies = self.frequencies_at(plan.length or plan.trained_length)
        self.softmax_mscale = plan.softmax_mscale
        self.mla_attentions = plan.mla_attentions
        self.original_frequencies = {
            layer_type: traits.frequencies[layer_type]
            for traits in plan.rotaries
            for layer_type in plan.geometries
            if layer_type in traits.frequencies
        }
        self._rotation_digest = rotation_digest(plan, self.frequencies)
        self._kernel_summary = summarize_kernels(
            plan.extension.kernels,
            plan.rotation_sites,
            has_position_map=plan.position_map is not None,
        )
        self._length_warning = make_length_warning(plan)
        self._position_rule: PositionRule | None = None
        self._position_hooks: list[PositionHooks] = []
        self._context_parallel_group: Any = None
        # Needed when a `with` block ends, until the patch is over.
        self._model: nn.Module | None = None
        self._plan: PatchPlan | None = None
        self._previous: Patch | None = None
        self._entered = self._over = False
        self._undo_log = UndoLog()
        self._config_override = ConfigOverride()
        self._active = False

    @property
    def original(self) -> dict[str, Any]:
        """Return `max_position_embeddings` and `rope_parameters` of the config before the patch.

        With `rope_patch` if the model was trained under the rotation that they state.
        """
        names = ["max_position_embeddings", "rope_parameters"]
        names += [FIELD] if trained_config_length(self.original_config) else []
        return {name: getattr(self.original_config, name) for name in names}

    def model_config(self, model: nn.Module) -> Any:
        """Return the text config that tells another patch of a model what it starts from."""
        if not self.is_trained:
            return self._model_config
        # `mark_trained` recorded the rotation there. A copy, because undoing changes it.
        return copy.deepcopy(find_rotaries(model)[0].module.config)

    @property
    def active(self) -> bool:
        """Return whether the patch is in effect: neither undone nor replaced."""
        return self._active

    @property
    def is_length_dependent(self) -> bool:
        """Return whether the frequencies depend on the length of each sequence."""
        return bool(self._length_hooks)

    @property
    def is_in_config(self) -> bool:
        """Return whether a config states all that the patch does, at every length."""
        method = self.method
        return (
            method.has_config_form
            and not (method.is_dynamic and self.is_length_dependent)
            and not method.start_token_count
            and not method.attention_changes(math.inf, self.trained_length)
        )

    @property
    def longest_text(self) -> int | None:
        """Return the tokens of the longest text the patch is for; None if it has no limit."""
        return None if self._length_warning is None else self._length_warning.length

    @property
    def undo_log(self) -> UndoLog:
        """Return the log of the changes: what other code adds to it ends with the patch."""
        return self._undo_log

    def undo(self) -> None:
        """Restore the unpatched model, bit for bit; do nothing if the patch is not active.

        Changes that other code made since stay: settings in the config, and attributes of modules,
        which a warning names. The unpatched model cannot refuse caches: do not reuse caches that
        the patch filled, or managers of continuous batching.
        """
        self._deactivate()
        self._over = True
        if not self._entered:
            self._model = self._plan = self._previous = None

    def frequencies_at(self, length: float) -> dict[str | None, Frequencies]:
        """Return the rotation of a sequence of `length` tokens, by layer type that changed."""
        if self._length_hooks:
            return self._length_hooks[0].frequencies(length)
        return self.frequencies

    def fix_length(self, length: int | None) -> None:
        """Treat every sequence as `length` tokens long from here on, instead of measuring each.

        For training on one length, which then needs no device synchronisation and no
        communication, and for caches whose keys cannot be re-rotated. Does nothing if the
        frequencies do not depend on the length.

        Args:
            length: Tokens; None measures each sequence again.
        """
        if length is not None:
            require_tokens("length", length)
        for hooks in self._length_hooks:
            hooks.fixed_length = length

    def accept_cache(self, cache: Any, positions: torch.Tensor | None = None) -> None:
        """Declare that this very rotation rotated a cache's keys, for a rebuilt cache.

        For caches that are rebuilt from stored tensors. Caches that the patched model filled, and
        their copies (`copy.deepcopy`, pickles), are accepted without it.

        Args:
            cache: Any of transformers' caches. Its keys are not checked.
            positions: The position of each token in it, -1 for padding, `[B, S]`; from 0 on unless
                given. Position maps alone need them.

        Raises:
            ValueError: The frequencies follow the sequence, so only the model can tell; or the
                positions are not one for each token.
            TypeError: Not a cache.
        """
        require_static(self.method, self._length_hooks)
        stamp_cache(cache, self._rotation_digest)
        for hooks in self._position_hooks[:1]:  # all would write the same
            hooks.accept_cache(cache, positions)

    def share_length(self, group: Any) -> None:
        """Declare that processes hold parts of the same sequences; lengths are those of the whole.

        Not needed under accelerate's context parallelism. Needed for torch's without accelerate,
        or for sequences that are split in another way. Each process must be given the positions in
        the whole sequence.

        Args:
            group: The processes, a torch.distributed group; None ends it.
        """
        self._context_parallel_group = group
        for hooks in self._length_hooks:
            hooks.group = group
        if self._position_rule is not None:
            self._position_rule.group = group

    def summary(self) -> str:
        """Return a few lines that describe what is in effect."""
        method = self.method
        lines = [f"{self}" + ("" if self.active else " (undone)")]
        shown, where = self.frequencies, ""
        if method.is_dynamic and self.is_length_dependent:
            length = self.length or 2 * self.trained_length
            shown, where = self.frequencies_at(length), f" at {length:,} tokens"
        for layer_type, geometry in self.geometries.items():
            changed = shown[layer_type]
            stretch = geometry.inv_freq() / changed.inv_freq
            stretch = stretch.nan_to_num(nan=1.0, posinf=torch.inf)  # pairs that never rotated
            pairs = int(((stretch - 1).abs() > 1e-6).sum())
            slowest = "no longer rotates" if stretch.isinf().any() else f"×{stretch.max():.4g}"
            lines.append(
                f"  {layer_type or 'all layers'}: theta {geometry.theta:g}, {pairs} of "
                f"{len(stretch)} pairs changed{where} (slowest: {slowest}), "
                f"attention factor {changed.attention_factor:.6g}"
            )
        lines += [f"  {layer_type}: unchanged" for layer_type in self._unchanged_layer_types]
        if tokens := method.start_token_count:
            lines.append(
                f"  positions below {tokens:,} keep the rotation from before, in all of these"
            )
        lines += describe_start(self.original_config, self.geometries)
        if self.softmax_mscale != 1:
            lines.append(
                f"  softmax scale ×{self.softmax_mscale**2:.6g}: heads that rotate only in part "
                "have the attention factor there"
            )
        if origin := method_origin(method):
            lines.append(f"  a method from outside: {origin}")
        inner = unwrap(method)
        if isinstance(inner, PositionMap):
            lines.append(f"  {inner.describe(self.trained_length)}")
        if (temperature := method.query_temperature) is not None:
            formula = temperature.describe(self.trained_length)
            lines.append(f"  attention logits ×{formula}, by each query's position")
        options = {k: v for k, v in method.options().items() if k != "factor"}
        options = {k: v for k, v in options.items() if v is not None and v != ""}
        if options:
            shown_options = ", ".join(f"{k}={_abbreviate(v)}" for k, v in options.items())
            lines.append(f"  options: {shown_options}")
        lines.append(f"  {self._kernel_summary}")
        return "\n".join(lines)

    def __str__(self) -> str:
        length = "any length" if self.length is None else f"{self.length:,} tokens"
        return f"{self.method}, {self.trained_length:,} → {length}"

    def _repr_html_(self) -> str:
        return text_html(self.summary() if self.active else repr(self))

    def __repr__(self) -> str:
        return f"<rope_patch.Patch {self}{'' if self.active else ' (undone)'}>"

    def __enter__(self) -> Patch:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        model, before = self._model, self._previous
        self._entered = False
        self.undo()
        if model is None:  # the patch was over when the block began
            return
        if active_patch := current(model):
            active_patch.undo()
        if before is not None:
            before._restore(model)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a module must not copy the model around it.
        return {**vars(self), "_model": None}

    def _deactivate(self) -> None:
        """Undo the changes, but keep what is needed to apply them again."""
        foreign = self._undo_log.undo() + self._config_override.undo()
        self._active = False
        if foreign:
            logger.warning(
                "%s: replaced after the model was patched, so undoing leaves it as it is",
                ", ".join(foreign),
            )

    def _restore(self, model: nn.Module) -> None:
        """Apply the patch again after another one, unless it is over."""
        # A copied handle has no model of its own, so it takes `model`, that of the other patch.
        if self._plan is not None and not self._over:
            self._apply(model if self._model is None else self._model, self._plan)

    @torch_defaults()
    def _apply(self, model: nn.Module, plan: PatchPlan) -> None:
        """Change the model; restore it if any step fails."""
        self._model, self._plan = model, plan
        try:
            rotaries = [traits.rotary for traits in plan.rotaries]
            self._position_rule = rule = install_position_rule(
                model,
                rotaries,
                self._undo_log,
                counts_tokens=plan.depends_on_positions,
                # Models with several positions for a token count them themselves.
                counts_lengths=bool(plan.length_hooks)
                and not any(traits.is_mrope for traits in plan.rotaries),
            )
            rule.group = self._context_parallel_group
            if not plan.length_hooks and not plan.mapped_sites:
                install_cache_stamps(model, rotaries, self._rotation_digest, self._undo_log)
            if self._length_warning is not None:
                install_length_warning(self._length_warning, model, rotaries, self._undo_log)
            guard_batching(
                model,
                self._undo_log,
                rotation=self._rotation_digest,
                length_hooks=self._length_hooks,
                refusal=position_map_refusal(plan.position_map) if plan.position_map else None,
            )
            warn_about_cast(rotaries)
            # Hooks replace these where frequencies depend on the length.
            initial = self.frequencies_at(1)
            for traits in plan.rotaries:
                rotary = traits.rotary
                live = {**saved_frequencies(traits, plan), **initial}
                set_frequencies(rotary, traits.frequencies, live, self._undo_log)
                if start_token_count := plan.method.start_token_count:
                    install_start_tokens(traits, plan.geometries, start_token_count, self._undo_log)
                self._undo_log.set(rotary.module, "extra_repr", partial(str, str(self)))
                self._undo_log.set(rotary.module, "_rope_patch", self)
            for attention in plan.mla_attentions:
                scale = base_softmax_scale(attention) * plan.shortest_softmax_mscale**2
                if plan.length_hooks and math.isclose(scale, attention.scaling):
                    continue  # short texts keep their logits, bit for bit
                self._undo_log.set(attention, "scaling", scale)
            for decoder, _, hooks in plan.length_hooks:
                self._undo_log.hook(decoder, before=TraceRefusal(str(self.method)))
                hooks.position_rule = rule
                hooks.attach(decoder, self._undo_log)
            limit_candidates(model, plan.length_hooks, self._undo_log)
            watch_generate(model, plan.length_hooks, self._undo_log)
            read_dropped_texts_again(model, self._undo_log)
            watch_admission(model, plan.length_hooks, self._undo_log)
            for site in plan.rotation_sites:
                lengths = [h for _, _, h in plan.length_hooks if site.rotary in h.rotaries]
                install_kernels(
                    site,
                    plan.extension.kernels,
                    self._undo_log,
                    keeps_bits=lengths[0].keeps_bits if lengths else None,
                    has_position_map=plan.position_map is not None,
                )
            if (position_map := plan.position_map) is not None:
                self._position_hooks = install_position_map(
                    plan.mapped_sites,
                    position_map,
                    position_map.reach(plan.trained_length),
                    self.frequencies,
                    self._rotation_digest,
                    plan.extension.kernels,
                    self._undo_log,
                )
            if (temperature := plan.method.query_temperature) is not None:
                sites, length = plan.temperature_sites, plan.trained_length
                install_temperature(sites, temperature, length, self._undo_log)
            exact = [site.rotary for site in plan.rotation_sites if site.uses_passthrough]
            for _, _, hooks in plan.length_hooks:
                if all(rotary in exact for rotary in hooks.rotaries):
                    hooks.kernels = plan.extension.kernels
            support_replicas(self._undo_log)
            ours = {id(r.rotary.module): r.problem is None for r in plan.rotation_sites}
            for traits in plan.rotaries:
                warn_about_liger(
                    traits.owner,
                    traits.rotary,
                    uses_our_kernels=ours.get(id(traits.rotary.module), False),
                    undo_log=self._undo_log,
                )
            # transformers' own dynamic scaling reads max_position_embeddings as the trained length.
            # Without a config form of the method, a larger one would promise too much.
            target_length = (
                plan.length if plan.method.has_config_form and not plan.is_dynamic else None
            )
            fields = {
                "max_position_embeddings": target_length or plan.trained_length,
                "rope_parameters": plan.rope_parameters(),
                **plan.layer_thetas(),
            }
            self._config_override.apply(model, type(plan.config), fields)
            self._active = True
        except BaseException:
            self.undo()
            raise


def current(model: nn.Module) -> Patch | None:
    """Return the handle of the patch that is in effect on a model, or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}")
    for module in model.modules():
        if handle := vars(module).get("_rope_patch"):
            return handle
    return None


def _abbreviate(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"[{', '.join(value)}]"
    return f"[{len(value)} numbers]" if isinstance(value, tuple | list) else str(value)
