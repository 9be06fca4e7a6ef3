"""Norms of queries and keys that are left to the rotation, which applies them in its launch.

The copy of an attention's forward calls a `DeferredNorm` in place of each norm. It returns its
input if the rotation applies the norm, and calls the norm's module if not. The modules themselves
stay as they are, and are called whenever something can see that: hooks, wrappers, other weights.
"""

from __future__ import annotations

import functools
import threading
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.ops.modes import has_global_hooks
from rope_patch.ops.reference import rms_norm
from rope_patch.patching.architecture.attention_source import inspect_forward
from rope_patch.patching.defaults import torch_defaults
from rope_patch.patching.kernels.position_passthrough import use_exact_positions

Weights = tuple[torch.Tensor, torch.Tensor]


class _Deferral(threading.local):
    """Whether norms are deferred in the call of an attention that this thread is in.

    Its first norm decides, so that a hook which was added since the last call is seen. The other
    norm and the rotation follow, so that each norm is applied exactly once.

    Attributes:
        norms: Those that were decided on; None outside of an attention, and ahead of its norms.
        weights: Both weights if the norms are deferred, else None.
    """

    norms: DeferrableNorms | None = None
    weights: Weights | None = None


_deferral = _Deferral()


def end_deferral() -> None:
    """Forget what was decided for an attention at the end of its call."""
    _deferral.norms = _deferral.weights = None


class DeferrableNorms:
    """The norms of an attention's queries and keys.

    Attributes:
        attention: The attention.
        names: Attributes of the attention.
        modules: The norms that were there when the attention was patched.
        spec: What both compute.
        kernels: See `rope_patch.patch`.
    """

    def __init__(
        self, attention: nn.Module, names: tuple[str, str], spec: RMSNormSpec, kernels: str
    ) -> None:
        self.attention = attention
        self.names = names
        self.modules: list[Any] = [getattr(attention, name) for name in names]
        self.spec = spec
        self.kernels = kernels

    @classmethod
    def find(cls, attention: nn.Module, kernels: str) -> DeferrableNorms | None:
        """Return the norms of an attention; None if it has none that this package computes."""
        names, spec = inspect_forward(type(attention)).norm_names, shared_norm_spec(attention)
        if names is None or spec is None:
            return None
        return cls(attention, names, spec, kernels)

    def rename(self, code: types.CodeType) -> types.CodeType:
        """Return a forward's code that calls deferred norms in place of the norms."""
        names = [deferred_name(n) if n in self.names else n for n in code.co_names]
        return code.replace(co_names=tuple(names))

    def deferred_weights(self, x: torch.Tensor) -> Weights | None:
        """Return the norms' weights if both are left to the rotation, else None.

        Args:
            x: Queries or keys.
        """
        if torch.compiler.is_compiling():
            return self._find_weights(x)
        if _deferral.norms is not self:
            _deferral.weights = self._find_weights(x)
            _deferral.norms = self
        return _deferral.weights

    def _find_weights(self, x: torch.Tensor) -> Weights | None:
        if not use_exact_positions(x, self.kernels) or has_global_hooks():
            return None
        (q_name, k_name), (q_norm, k_norm) = self.names, self.modules
        modules = self.attention._modules
        if modules.get(q_name) is not q_norm or modules.get(k_name) is not k_norm:
            return None
        q_weight, k_weight = _readable_weight(q_norm), _readable_weight(k_norm)
        return None if q_weight is None or k_weight is None else (q_weight, k_weight)

    def eps(self) -> float:
        """Return what is added to the mean of squares."""
        return getattr(self.modules[0], self.spec.eps_attribute)

    def apply(
        self, q: torch.Tensor, k: torch.Tensor, weights: Weights, heads_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, normed by the norms themselves, whose bits they get."""
        if all(len(weight) == q.shape[-1] for weight in weights):
            return self.modules[0](q), self.modules[1](k)
        # All heads of a token are normed together, in its own memory.
        tokens = [x.transpose(1, 2) if heads_dim == 1 else x for x in (q, k)]
        normed = [
            norm(x.flatten(2)).view(x.shape) for norm, x in zip(self.modules, tokens, strict=True)
        ]
        q, k = (x.transpose(1, 2) if heads_dim == 1 else x for x in normed)
        return q, k

    def retire(self) -> None:
        """Defer no norms from now on: the patch is undone, but a wrapper still calls this."""
        self.kernels = "hf"


class DeferredNorm:
    """What an attention's forward calls in place of a norm."""

    def __init__(self, norms: DeferrableNorms, name: str) -> None:
        self.norms = norms
        self.name = name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.norms.deferred_weights(x) is not None:
            return x
        return getattr(self.norms.attention, self.name)(x)


def deferred_name(name: str) -> str:
    """Return the attribute of an attention with the deferred norm for a norm's attribute."""
    return f"_deferred_{name}"


def _readable_weight(norm: Any) -> torch.Tensor | None:
    """Return a norm's weight if a call of the norm would only apply it, else None."""
    if (
        "forward" in norm.__dict__  # accelerate's hooks offload weights; `kernelize` replaces it
        or norm._forward_hooks
        or norm._forward_pre_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
        or norm._compiled_call_impl is not None
    ):
        return None
    weight = norm._parameters.get("weight")
    if weight is None:  # a plain tensor in its place, as FSDP sets it
        weight = norm.weight
    is_readable = type(weight) in (nn.Parameter, torch.Tensor) and not weight.is_meta
    return weight if is_readable else None


def split_heads(weights: Weights, head_dim: int) -> Weights:
    """Return weights, `[D]` each; `[H, D]` and `[K, D]` for norms over all heads."""
    q_weight, k_weight = weights
    if q_weight.shape[0] == head_dim and k_weight.shape[0] == head_dim:
        return weights
    return q_weight.view(-1, head_dim), k_weight.view(-1, head_dim)


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
