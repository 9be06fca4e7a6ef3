"""A model's attention forward with this package's rotation and its norms of queries and keys.

The forward stays the class's own code. A copy of it, bound to one instance, finds our rotation
under the name `apply_rotary_pos_emb`, which applies the norms ahead of it, too. Other users of the
class or the function are not affected.
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from rope_patch.ops import qk_norm_rope, rope
from rope_patch.ops.cpu import needs_reference, rope_from_cos_sin
from rope_patch.patching.architecture.attention_source import (
    APPLY,
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.kernels.cache_write import CacheWrite, active
from rope_patch.patching.kernels.deferred_norms import (
    DeferrableNorms,
    DeferredNorm,
    deferred_name,
    end_deferral,
    split_heads,
)
from rope_patch.patching.kernels.exclusive_memory import are_exclusive, is_overwriting_possible
from rope_patch.patching.undo_log import UndoLog

# Smaller queries and keys are copied, because the proof that nobody reads them takes longer.
_MIN_OVERWRITTEN_NUMEL = 2**17


class ReboundForward(ABC):
    """A copy of an attention's forward that finds other functions under some global names.

    An object rather than a function, so that copies of a model get their own.

    Attributes:
        module: The attention.
        function: The copy.
    """

    function: Any

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.bind()

    def source_function(self) -> Any:
        """Return the function to copy."""
        # For a replica `self.module` is a proxy, whose type() is not the module's class.
        attention_class: Any = self.module.__class__
        return undecorated_forward(attention_class)

    @abstractmethod
    def names(self, function: Any) -> dict[str, Any]:
        """Return what the copy finds under which global names."""

    def code(self, function: Any) -> types.CodeType:
        """Return the copy's code."""
        return function.__code__

    def bind(self) -> None:
        """Copy the function."""
        source = self.source_function()
        names = {**source.__globals__, **self.names(source)}
        # torch.compile would look names up in the module of that name.
        names.pop("__name__", None)
        self.function = types.FunctionType(
            self.code(source), names, source.__name__, source.__defaults__, source.__closure__
        )
        self.function.__kwdefaults__ = source.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(self.module, *args, **kwargs)
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            end_deferral()

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("function", "_original_apply")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.bind()


class PatchedAttentionForward(ReboundForward):
    """An attention's forward that calls this package's rotation."""

    def __init__(self, module: nn.Module, kernels: str, interleaved: bool, halved: bool) -> None:
        self.kernels = kernels
        self.interleaved = interleaved
        self.halve_tables = halved
        self.norms = DeferrableNorms.find(module, kernels)
        usage = inspect_forward(type(module))
        self.rebinds = usage.rebinds
        self.cache_name = usage.cache_name
        super().__init__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.cache_name
        cache = None if name is None else kwargs.get(name)
        if cache is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        write = CacheWrite.of(cache, self.module)
        if write is None:
            return super().__call__(*args, **kwargs)
        kwargs[str(name)] = write
        outer, active.write = active.write, write
        try:
            return super().__call__(*args, **kwargs)
        finally:
            active.write = outer

    def code(self, function: Any) -> types.CodeType:
        """Return the copy's code, which calls deferred norms in place of the norms."""
        return function.__code__ if self.norms is None else self.norms.rename(function.__code__)

    def names(self, function: Any) -> dict[str, Any]:
        """Return what the copy finds under which global names."""
        attention_class: Any = self.module.__class__
        self._original_apply = function.__globals__[APPLY]
        one_tensor = inspect_forward(attention_class).one_tensor
        return {APPLY: self.rotate_one if one_tensor else self.rotate}

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        """Replace `apply_rotary_pos_emb`: by cos and sin, or positions and packed frequencies."""
        overwrites = self._may_overwrite(q.numel() + k.numel()) and are_exclusive(q, k)
        norms = self.norms
        weights = None if norms is None else norms.deferred_weights(q)
        if cos.is_floating_point():
            if norms is not None and weights is not None:
                q, k = norms.apply(q, k, weights, unsqueeze_dim)
            return self._rotate_from_cos_sin(q, k, cos, sin, unsqueeze_dim, overwrites)
        options: Any = {
            "interleaved": self.interleaved,
            "heads_dim": unsqueeze_dim,
            "kernels": self.kernels,
            "inplace": overwrites and self.kernels != "reference",  # which would make copies first
        }
        norm_options: dict[str, Any] = {}
        if norms is not None and weights is not None:
            q_weight, k_weight = split_heads(weights, q.shape[-1])
            norm_options = {"q_weight": q_weight, "k_weight": k_weight, "eps": norms.eps()}
            norm_options["offset"] = norms.spec.offset
        write = None if torch.compiler.is_compiling() else active.write
        if write is not None and write.attention is self.module:
            rotated = write.defer(q, k, cos, sin, norms=norm_options, **options)
            if rotated is not None:
                return rotated
        op: Any = qk_norm_rope if norm_options else rope
        return op(q, k, positions=cos, packed_freqs=sin, **norm_options, **options)

    def rotate_one(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> torch.Tensor:
        """Replace an `apply_rotary_pos_emb` that rotates one tensor."""
        overwrites = self._may_overwrite(x.numel()) and are_exclusive(x)
        if cos.is_floating_point():
            return self._rotate_from_cos_sin(x, None, cos, sin, unsqueeze_dim, overwrites)
        options: Any = {
            "interleaved": self.interleaved,
            "heads_dim": unsqueeze_dim,
            "inplace": overwrites and self.kernels != "reference",
        }
        return rope(x, None, cos, sin, kernels=self.kernels, **options)[0]

    def _may_overwrite(self, numel: int) -> bool:
        """Return whether queries and keys are overwritten if nothing else can read them."""
        is_large = numel >= _MIN_OVERWRITTEN_NUMEL
        return is_large and self.rebinds and is_overwriting_possible(self.module)

    def _rotate_from_cos_sin(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads_dim: int,
        may_overwrite: bool,
    ) -> Any:
        """Rotate to the bits of transformers' own function."""
        apply = self._original_apply
        options: Any = {"heads_dim": heads_dim, "repeated": not self.halve_tables}
        options |= {"interleaved": self.interleaved}
        wide = None
        if not needs_reference(q, k, cos, sin):
            types = (q.dtype, cos.dtype, q.shape[-1], cos.shape[-1])
            wide = _is_rounded_once(apply, k is None, *types, *options.values())
        if wide is None:
            tensors = (q, cos, sin) if k is None else (q, k, cos, sin)
            return apply(*tensors, unsqueeze_dim=heads_dim)
        cos, sin = _halved(cos, sin) if self.halve_tables else (cos, sin)
        options |= {"may_overwrite": may_overwrite, "wide": wide}
        rotated = rope_from_cos_sin(q, k, cos, sin, **options)
        return rotated[0] if k is None else rotated

    def retire(self) -> None:
        """Rotate as the class does from now on: undone, but a wrapper still calls this."""
        self.kernels = "hf"
        if self.norms is not None:
            self.norms.retire()
        self.cache_name = None
        self.function = undecorated_forward(type(self.module))

    def for_replica(self, replica: Any) -> PatchedAttentionForward:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        forward = PatchedAttentionForward.__new__(PatchedAttentionForward)
        # Replicas defer no norms: their weights are no parameters.
        forward.__setstate__({**self.__getstate__(), "module": replica, "norms": None})
        return forward


def _halved(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


@functools.cache
@torch_defaults()
def _is_rounded_once(
    apply: Any,
    one_tensor: bool,
    dtype: torch.dtype,
    tables_dtype: torch.dtype,
    head_dim: int,
    tables_width: int,
    heads_dim: int,
    repeated: bool,
    interleaved: bool,
) -> bool | None:
    """Return how a model's `apply_rotary_pos_emb` rounds, found by calling it.

    Returns:
        Whether `rope_from_cos_sin` gives its bits with `wide`; None if with neither value.
    """
    if str(apply.__module__).startswith("liger_kernel"):
        return True  # Liger's, which stands in the model's file, is not to be called
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 64, head_dim) if heads_dim == 1 else (1, 64, 2, head_dim)
    x = torch.randn(shape, generator=generator).to(dtype)
    angle = torch.rand(1, 64, tables_width // 2, generator=generator) * 6
    angle = angle.repeat_interleave(2, -1) if interleaved and repeated else angle.repeat(1, 1, 2)
    cos, sin = angle.cos().to(tables_dtype), angle.sin().to(tables_dtype)
    try:
        given = (x.clone(), cos, sin) if one_tensor else (x.clone(), x.clone(), cos, sin)
        expected = apply(*given, unsqueeze_dim=heads_dim)
    except (TypeError, ValueError, RuntimeError):
        return None  # then it runs itself, and raises itself
    expected = expected if one_tensor else expected[0]
    tables = (cos, sin) if repeated else _halved(cos, sin)
    options: Any = {"heads_dim": heads_dim, "repeated": repeated, "interleaved": interleaved}
    for wide in (False, True):
        got = rope_from_cos_sin(x, None, *tables, wide=wide, **options)[0]
        if got.dtype == expected.dtype and got.equal(expected):
            return wide
    return None


def install_attention_forward(
    attention: nn.Module, kernels: str, interleaved: bool, halve_tables: bool, undo_log: UndoLog
) -> None:
    """Install this package's rotation in an attention, below all hooks around its forward."""
    slot = forward_attribute(attention)
    forward = PatchedAttentionForward(attention, kernels, interleaved, halve_tables)
    undo_log.set(attention, slot, forward)
    if forward.norms is not None:
        for name in forward.norms.names:
            undo_log.set(attention, deferred_name(name), DeferredNorm(forward.norms, name))


def forward_attribute(module: nn.Module) -> str:
    """Return the attribute that holds a module's own forward, which accelerate's hooks move."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def has_foreign_forward(attention: nn.Module) -> bool:
    """Return whether other code replaced an attention's forward."""
    forward = vars(attention).get(forward_attribute(attention))
    own = getattr(forward, "__func__", None) is type(attention).forward
    return not (forward is None or own or isinstance(forward, ReboundForward))
