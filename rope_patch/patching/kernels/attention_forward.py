"""Our rotation inside an attention's own forward, and its norms of queries and keys along with it.

The forward stays the class's own code. A copy of it, bound to one instance, finds our rotation
where it looks for `apply_rotary_pos_emb`; the norms ahead of it hand their input through, for the
rotation to norm as it goes. Whoever else calls the class or the function sees nothing of this.
"""

from __future__ import annotations

import copy
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.ops import qk_norm_rope, rope
from rope_patch.ops.cpu import rope_by_tables
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.reference import rms_norm
from rope_patch.patching.architecture.attention_source import APPLY, own_function, usage
from rope_patch.patching.defaults import as_by_default
from rope_patch.patching.kernels.position_passthrough import hands_over
from rope_patch.patching.undo_log import Swaps


class OurForward:
    """An attention's forward, in which the rotation is ours.

    An object rather than a function, so that copies of a model get their own.
    """

    def __init__(self, module: nn.Module, kernels: str, interleaved: bool, halved: bool) -> None:
        self.module = module
        self.kernels = kernels
        self.interleaved = interleaved
        self.halved = halved
        self.form = shared_norm_form(module)
        self.norm_names: tuple[str, ...] = usage(type(module)).norms or ()
        self._bind()

    def _bind(self) -> None:
        kind: Any = self.module.__class__  # not type(), which is the proxy's for a replica
        function = own_function(kind)
        ours = self.rotate_one if usage(kind).single else self.rotate
        self._theirs = function.__globals__[APPLY]
        names = {**function.__globals__, APPLY: ours}
        # torch.compile would look for the names in the module that this one names.
        del names["__name__"]
        self._function = types.FunctionType(
            function.__code__,
            names,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self._function.__kwdefaults__ = function.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, *args, **kwargs)

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        """In place of `apply_rotary_pos_emb`: cos and sin, or positions and turns."""
        deferred = self.form is not None and hands_over(q, self.kernels) and self.defers()
        if cos.is_floating_point():
            if deferred:
                q, k = self._norm(q, k, unsqueeze_dim)
            return self._by_tables(q, k, cos, sin, unsqueeze_dim)
        given: Any = {
            "interleaved": self.interleaved,
            "heads_dim": unsqueeze_dim,
            "kernels": self.kernels,
        }
        if not deferred:
            return rope(q, k, cos, sin, **given)
        assert self.form is not None
        given |= {"eps": self._eps(), "offset": self.form.offset}
        q_weight, k_weight = self._weights(q)
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, **given)

    def rotate_one(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> torch.Tensor:
        """The same where a model rotates one tensor at a time."""
        if cos.is_floating_point():
            return self._by_tables(x, None, cos, sin, unsqueeze_dim)
        given: Any = {"interleaved": self.interleaved, "heads_dim": unsqueeze_dim}
        return rope(x, None, cos, sin, kernels=self.kernels, **given)[0]

    def defers(self) -> bool:
        """Whether both norms hand their input through, for `rotate` to norm."""
        return all(_stands(self.module, name) for name in self.norm_names)

    def _by_tables(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads_dim: int,
    ) -> Any:
        tensors = (q, cos, sin) if k is None else (q, k, cos, sin)
        if q.device.type != "cpu" or torch.compiler.is_compiling() or needs_plain_torch():
            return self._theirs(*tensors, unsqueeze_dim=heads_dim)
        if self.halved:
            cos, sin = (c[..., : c.shape[-1] // 2] for c in (cos, sin))
        given: Any = {"heads_dim": heads_dim, "repeated": not self.halved}
        turned = rope_by_tables(q, k, cos, sin, interleaved=self.interleaved, **given)
        return turned[0] if k is None else turned

    def _norm(
        self, q: torch.Tensor, k: torch.Tensor, heads_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.form is not None
        given: Any = {"eps": self._eps(), "offset": self.form.offset, "heads_dim": heads_dim}
        normed = (
            rms_norm(x, weight, **given).to(x.dtype)
            for x, weight in zip((q, k), self._weights(q), strict=True)
        )
        return next(normed), next(normed)

    def _weights(self, q: torch.Tensor) -> list[torch.Tensor]:
        """`[D]` each, or `[H, D]` and `[K, D]` where all heads are normed together."""
        weights = [getattr(self.module, name).weight for name in self.norm_names]
        if all(weight.shape[0] == q.shape[-1] for weight in weights):
            return weights
        return [weight.view(-1, q.shape[-1]) for weight in weights]

    def _eps(self) -> float:
        assert self.form is not None
        return getattr(getattr(self.module, self.norm_names[0]), self.form.eps)

    def retire(self) -> None:
        """Rotate as the class does from now on: the patch is undone, but a wrapper calls this."""
        self.kernels = "hf"
        self._function = own_function(type(self.module))

    def for_replica(self, replica: Any) -> OurForward:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        made = OurForward.__new__(OurForward)
        # Norms are made before the attention that they belong to: replicas defer none.
        made.__setstate__({**self.__getstate__(), "module": replica, "form": None})
        return made

    # -- copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_function", "_theirs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()


class DeferredNorm:
    """A norm's forward that hands its input through where the rotation norms it anyway."""

    def __init__(self, forward: OurForward, name: str, norm: nn.Module, own: Any) -> None:
        self.forward = forward
        self.name = name
        self.norm = norm
        self.own = own

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hands_over(hidden_states, self.forward.kernels) and self.forward.defers():
            return hidden_states
        return self.own(hidden_states)

    def for_replica(self, replica: Any) -> Any:
        """Return the norm's own forward for a replica, of which none is deferred."""
        return functools.partial(self.own.__func__, replica)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredNorm:
        """A copy of the norm alone still belongs to the same attention (PEFT's modules_to_save)."""
        attention = self.forward.module
        forward = copy.deepcopy(self.forward, memo) if id(attention) in memo else self.forward
        made = DeferredNorm.__new__(DeferredNorm)
        memo[id(self)] = made
        made.forward, made.name = forward, self.name
        made.norm = copy.deepcopy(self.norm, memo)
        made.own = copy.deepcopy(self.own, memo)
        return made


def _stands(attention: nn.Module, name: str) -> bool:
    """Whether a norm is one that defers, with nothing put around it or hooked to it since."""
    norm: Any = getattr(attention, name)
    forward = vars(norm).get("forward")
    return (
        isinstance(forward, DeferredNorm)
        and forward.norm is norm
        and forward.forward.module is attention
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
        and type(norm.weight) in (torch.Tensor, nn.Parameter)
        and norm.weight.device.type != "meta"
    )


@dataclass(frozen=True)
class NormForm:
    """An RMSNorm as we compute it.

    Attributes:
        offset: Added to the weight.
        eps: The attribute that holds what is added to the mean of squares.
    """

    offset: float
    eps: str


def shared_norm_form(attention: nn.Module) -> NormForm | None:
    """The form of the two norms ahead of the rotation; None where there are none that we know."""
    norms: list[Any] = [getattr(attention, n, None) for n in usage(type(attention)).norms or ()]
    if not norms or any(list(getattr(norm, "_parameters", ())) != ["weight"] for norm in norms):
        return None
    form = norm_form(type(norms[0]))
    if form is None or norm_form(type(norms[1])) != form:
        return None
    return form if getattr(norms[0], form.eps) == getattr(norms[1], form.eps) else None


def norm_form(kind: Any) -> NormForm | None:
    """What a norm class computes, found out by asking it; None where that is not ours."""
    return _asked(kind)


@functools.cache
def _asked(kind: Any) -> NormForm | None:
    with as_by_default():
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 8, generator=generator) for n in (4, 1))
        x = x * 1e-3  # so small that eps matters
        for eps in ("variance_epsilon", "eps"):
            stranger = kind.__new__(kind)
            nn.Module.__init__(stranger)
            stranger.weight = nn.Parameter(weight[0])
            setattr(stranger, eps, 1e-6)
            try:
                got = kind.forward(stranger, x)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                continue
            for offset in (0.0, 1.0):
                if torch.allclose(got, rms_norm(x, weight[0], eps=1e-6, offset=offset), rtol=1e-5):
                    return NormForm(offset, eps)
    return None


def install(
    attention: nn.Module, kernels: str, interleaved: bool, halved: bool, swaps: Swaps
) -> None:
    """Puts our rotation into an attention, below whatever hooks stand around its forward."""
    slot = forward_slot(attention)
    forward = OurForward(attention, kernels, interleaved, halved)
    swaps.set(attention, slot, forward)
    if forward.form is None:
        return
    for name in forward.norm_names:
        norm = getattr(attention, name)
        # Offloaded weights are gone when the rotation runs, and somebody else's norm is theirs.
        if not {"_old_forward", "forward"} & vars(norm).keys():
            swaps.set(norm, "forward", DeferredNorm(forward, name, norm, norm.forward))


def forward_slot(module: nn.Module) -> str:
    """Where a module's own forward is: accelerate's hooks keep it in another attribute."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def has_foreign_forward(attention: nn.Module) -> bool:
    """Whether somebody has given an attention a forward that is neither its class's nor ours."""
    forward = vars(attention).get(forward_slot(attention))
    own = getattr(forward, "__func__", None) is type(attention).forward
    return not (forward is None or own or isinstance(forward, OurForward))
