"""A model's attention forward with this package's rotation and its norms of queries and keys.

The forward stays the class's own code. A copy of it, bound to one instance, finds our rotation
under the name `apply_rotary_pos_emb`. The norms ahead of it pass their input through, and the
rotation applies them. Other users of the class or the function are not affected.
"""

from __future__ import annotations

import copy
import functools
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.ops import qk_norm_rope, rope
from rope_patch.ops.cpu import rope_from_cos_sin
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.reference import rms_norm
from rope_patch.patching.architecture.attention_source import (
    APPLY,
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.kernels.cache_write import CacheWrite, active
from rope_patch.patching.kernels.exclusive_memory import are_exclusive, is_overwriting_possible
from rope_patch.patching.kernels.position_passthrough import use_exact_positions
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

    def bind(self) -> None:
        """Copy the function."""
        source = self.source_function()
        names = {**source.__globals__, **self.names(source)}
        # torch.compile would look names up in the module of that name.
        names.pop("__name__", None)
        self.function = types.FunctionType(
            source.__code__, names, source.__name__, source.__defaults__, source.__closure__
        )
        self.function.__kwdefaults__ = source.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)

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
        self.norm_spec = shared_norm_spec(module)
        usage = inspect_forward(type(module))
        self.norm_names: tuple[str, ...] = usage.norm_names or ()
        self.rebinds = usage.rebinds
        self.cache_name = usage.cache_name
        super().__init__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.cache_name
        cache = None if name is None else kwargs.get(name)
        if cache is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.function(self.module, *args, **kwargs)
        write = CacheWrite.of(cache, self.module)
        if write is None:
            return self.function(self.module, *args, **kwargs)
        kwargs[str(name)] = write
        outer, active.write = active.write, write
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            active.write = outer

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
        deferred = (
            self.norm_spec is not None
            and use_exact_positions(q, self.kernels)
            and self.norms_are_deferred()
        )
        if cos.is_floating_point():
            if deferred:
                q, k = self._normalize(q, k, unsqueeze_dim)
            return self._rotate_from_cos_sin(q, k, cos, sin, unsqueeze_dim, overwrites)
        options: Any = {
            "interleaved": self.interleaved,
            "heads_dim": unsqueeze_dim,
            "kernels": self.kernels,
            "inplace": overwrites and self.kernels != "reference",  # which would make copies first
        }
        norms: dict[str, Any] = {}
        if deferred:
            assert self.norm_spec is not None
            q_weight, k_weight = self._weights(q)
            norms = {"q_weight": q_weight, "k_weight": k_weight, "eps": self._eps()}
            norms["offset"] = self.norm_spec.offset
        write = None if torch.compiler.is_compiling() else active.write
        if write is not None and write.attention is self.module:
            rotated = write.defer(q, k, cos, sin, norms=norms, **options)
            if rotated is not None:
                return rotated
        op: Any = qk_norm_rope if deferred else rope
        return op(q, k, positions=cos, packed_freqs=sin, **norms, **options)

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

    def norms_are_deferred(self) -> bool:
        """Return whether both norms pass their input through, so that `rotate` applies them."""
        return all(_is_still_deferred(self.module, name) for name in self.norm_names)

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
        tensors = (q, cos, sin) if k is None else (q, k, cos, sin)
        if q.device.type != "cpu" or torch.compiler.is_compiling() or needs_plain_torch():
            return self._original_apply(*tensors, unsqueeze_dim=heads_dim)
        if self.halve_tables:
            cos, sin = (c[..., : c.shape[-1] // 2] for c in (cos, sin))
        options: Any = {"heads_dim": heads_dim, "repeated": not self.halve_tables}
        options |= {"interleaved": self.interleaved, "may_overwrite": may_overwrite}
        rotated = rope_from_cos_sin(q, k, cos, sin, **options)
        return rotated[0] if k is None else rotated

    def _normalize(
        self, q: torch.Tensor, k: torch.Tensor, heads_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.norm_spec is not None
        options: Any = {"eps": self._eps(), "offset": self.norm_spec.offset, "heads_dim": heads_dim}
        normed = (
            rms_norm(x, weight, **options).to(x.dtype)
            for x, weight in zip((q, k), self._weights(q), strict=True)
        )
        return next(normed), next(normed)

    def _weights(self, q: torch.Tensor) -> list[torch.Tensor]:
        """Return the norms' weights, `[D]` each; `[H, D]` and `[K, D]` for norms over all heads."""
        weights = [getattr(self.module, name).weight for name in self.norm_names]
        if all(weight.shape[0] == q.shape[-1] for weight in weights):
            return weights
        return [weight.view(-1, q.shape[-1]) for weight in weights]

    def _eps(self) -> float:
        assert self.norm_spec is not None
        return getattr(getattr(self.module, self.norm_names[0]), self.norm_spec.eps_attribute)

    def retire(self) -> None:
        """Rotate as the class does from now on: undone, but a wrapper still calls this."""
        self.kernels = "hf"
        self.cache_name = None
        self.function = undecorated_forward(type(self.module))

    def for_replica(self, replica: Any) -> PatchedAttentionForward:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        forward = PatchedAttentionForward.__new__(PatchedAttentionForward)
        # Norms are replicated before their attention, so replicas defer none.
        forward.__setstate__({**self.__getstate__(), "module": replica, "norm_spec": None})
        return forward


class DeferredNorm:
    """A norm's forward that passes its input through where the rotation applies the norm."""

    def __init__(
        self,
        attention_forward: PatchedAttentionForward,
        name: str,
        norm: nn.Module,
        original_forward: Any,
    ) -> None:
        self.attention_forward = attention_forward
        self.name = name
        self.norm = norm
        self.original_forward = original_forward

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if (
            use_exact_positions(hidden_states, self.attention_forward.kernels)
            and self.attention_forward.norms_are_deferred()
        ):
            return hidden_states
        return self.original_forward(hidden_states)

    def for_replica(self, replica: Any) -> Any:
        """Return the norm's original forward: replicas defer no norm."""
        return functools.partial(self.original_forward.__func__, replica)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredNorm:
        """Copy the norm, alone (PEFT's modules_to_save) or along with its attention."""
        attention = self.attention_forward.module
        forward = (
            copy.deepcopy(self.attention_forward, memo)
            if id(attention) in memo
            else self.attention_forward
        )
        clone = DeferredNorm.__new__(DeferredNorm)
        memo[id(self)] = clone
        clone.attention_forward, clone.name = forward, self.name
        clone.norm = copy.deepcopy(self.norm, memo)
        clone.original_forward = copy.deepcopy(self.original_forward, memo)
        return clone


def _is_still_deferred(attention: nn.Module, name: str) -> bool:
    """Return whether a norm is deferred, with no wrapper and no hook added since."""
    norm: Any = getattr(attention, name)
    forward = vars(norm).get("forward")
    return (
        isinstance(forward, DeferredNorm)
        and forward.norm is norm
        and forward.attention_forward.module is attention
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
        and type(norm.weight) in (torch.Tensor, nn.Parameter)
        and norm.weight.device.type != "meta"
    )


@dataclass(frozen=True)
class RMSNormSpec:
    """Parameters of an RMSNorm that this package computes.

    Attributes:
        offset: Added to the weight.
        eps_attribute: The attribute that holds eps, added to the mean of squares.
    """

    offset: float
    eps_attribute: str


def shared_norm_spec(attention: nn.Module) -> RMSNormSpec | None:
    """Return the spec that both norms ahead of the rotation share, or None."""
    norms: list[Any] = [
        getattr(attention, n, None) for n in inspect_forward(type(attention)).norm_names or ()
    ]
    if not norms or any(list(getattr(norm, "_parameters", ())) != ["weight"] for norm in norms):
        return None
    form = norm_spec_of(type(norms[0]))
    if form is None or norm_spec_of(type(norms[1])) != form:
        return None
    return (
        form
        if getattr(norms[0], form.eps_attribute) == getattr(norms[1], form.eps_attribute)
        else None
    )


def norm_spec_of(norm_class: Any) -> RMSNormSpec | None:
    """Return the spec of a norm class, found by probing it; None if it is no such RMSNorm."""
    return _probe_norm(norm_class)


@functools.cache
def _probe_norm(norm_class: Any) -> RMSNormSpec | None:
    with torch_defaults():
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 8, generator=generator) for n in (4, 1))
        x = x * 1e-3  # so small that eps matters
        for eps in ("variance_epsilon", "eps"):
            stranger = norm_class.__new__(norm_class)
            nn.Module.__init__(stranger)
            stranger.weight = nn.Parameter(weight[0])
            setattr(stranger, eps, 1e-6)
            try:
                got = norm_class.forward(stranger, x)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                continue
            for offset in (0.0, 1.0):
                if torch.allclose(got, rms_norm(x, weight[0], eps=1e-6, offset=offset), rtol=1e-5):
                    return RMSNormSpec(offset, eps)
    return None


def install_attention_forward(
    attention: nn.Module, kernels: str, interleaved: bool, halve_tables: bool, undo_log: UndoLog
) -> None:
    """Install this package's rotation in an attention, below all hooks around its forward."""
    slot = forward_attribute(attention)
    forward = PatchedAttentionForward(attention, kernels, interleaved, halve_tables)
    undo_log.set(attention, slot, forward)
    if forward.norm_spec is None:
        return
    for name in forward.norm_names:
        norm = getattr(attention, name)
        # Skip offloaded weights, which are gone when the rotation runs, and replaced norms.
        if not {"_old_forward", "forward"} & vars(norm).keys():
            undo_log.set(norm, "forward", DeferredNorm(forward, name, norm, norm.forward))


def forward_attribute(module: nn.Module) -> str:
    """Return the attribute that holds a module's own forward, which accelerate's hooks move."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def has_foreign_forward(attention: nn.Module) -> bool:
    """Return whether other code replaced an attention's forward."""
    forward = vars(attention).get(forward_attribute(attention))
    own = getattr(forward, "__func__", None) is type(attention).forward
    return not (forward is None or own or isinstance(forward, ReboundForward))
