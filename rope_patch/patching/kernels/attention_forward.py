"""Have a model's attentions rotate by this package's kernels, norms of queries and keys included.

The forward stays the class's own code. A copy of it, bound to one instance, finds our rotation
under the name `apply_rotary_pos_emb`. Other users of the class or the function are not affected.
The rotary module then passes positions and packed frequencies (`PositionPassthrough`), and norms
ahead of the rotation are left to its launch (`DeferrableNorms`).
"""

from __future__ import annotations

import functools
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from rope_patch.ops import pack_frequencies, qk_norm_rope, rope, use_triton
from rope_patch.ops.modes import has_global_hooks, needs_plain_torch, version_counter
from rope_patch.ops.plain_torch import needs_reference, rope_from_cos_sin
from rope_patch.ops.reference import rms_norm
from rope_patch.patching.architecture.attention_source import (
    inspect_forward,
    undecorated_forward,
)
from rope_patch.patching.kernels.cache_write import CacheWrite, active
from rope_patch.patching.torch_state import forward_for_replica, torch_defaults
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.models import APPLY_ROTATION


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
    """An attention's forward that calls this package's rotation.

    Results have memory of their own, because hooks and views may still read the projections.
    """

    def __init__(self, module: nn.Module, kernels: str, interleaved: bool, halved: bool) -> None:
        self.kernels = kernels
        self.interleaved = interleaved
        self.halve_tables = halved
        self.norms = DeferrableNorms.find(module, kernels)
        self.cache_name = inspect_forward(type(module)).cache_name
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
        self._original_apply = function.__globals__[APPLY_ROTATION]
        one_tensor = inspect_forward(attention_class).one_tensor
        return {APPLY_ROTATION: self.rotate_one if one_tensor else self.rotate}

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        """Replace `apply_rotary_pos_emb`: by cos and sin, or positions and packed frequencies."""
        norms = self.norms
        weights = None if norms is None else norms.deferred_weights(q)
        if cos.is_floating_point():
            if norms is not None and weights is not None:
                q, k = norms.apply(q, k, weights, unsqueeze_dim)
            return self._rotate_from_cos_sin(q, k, cos, sin, unsqueeze_dim)
        options: Any = {
            "interleaved": self.interleaved,
            "heads_dim": unsqueeze_dim,
            "kernels": self.kernels,
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
        if cos.is_floating_point():
            return self._rotate_from_cos_sin(x, None, cos, sin, unsqueeze_dim)
        options: Any = {"interleaved": self.interleaved, "heads_dim": unsqueeze_dim}
        return rope(x, None, cos, sin, kernels=self.kernels, **options)[0]

    def _rotate_from_cos_sin(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads_dim: int,
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
        rotated = rope_from_cos_sin(q, k, cos, sin, wide=wide, **options)
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
    """Return which `wide` makes `rope_from_cos_sin` give the bits of `apply`; None if neither."""
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


def use_exact_positions(x: torch.Tensor, kernels: str) -> bool:
    """Return whether tensors like x are rotated from positions, rather than from cos and sin.

    Compiled graphs keep transformers' own code unless kernels are demanded: Inductor fuses the
    rotation and the norms with the ops around them, and saves as little for the backward pass.
    Traces, forward-mode AD and torch.func always keep it, because they do not support kernels.

    Args:
        x: A tensor with the device, type and dtype of the tensors to rotate.
        kernels: See `rope_patch.patch`.
    """
    if torch.compiler.is_compiling():
        return kernels != "auto" and (kernels == "reference" or use_triton(x, kernels))
    if kernels == "auto":
        return use_triton(x)  # checks the modes, too, but raises in none
    return not needs_plain_torch() and (kernels == "reference" or use_triton(x, kernels))


class _PackedFrequencies(NamedTuple):
    """Packed frequencies and what they were packed from."""

    inv_freq: torch.Tensor
    scale: Any
    inv_freq_version: int
    scale_version: int
    packed: torch.Tensor

    def is_of(self, inv_freq: torch.Tensor, scale: Any) -> bool:
        """Return whether they were packed from these very objects, unchanged since."""
        return (
            self.inv_freq is inv_freq
            and self.scale is scale
            and self.inv_freq_version == version_counter(inv_freq)
            and self.scale_version == version_counter(scale)
        )


class PositionPassthrough:
    """A rotary module's forward that returns positions and packed frequencies for our kernels.

    A model passes two tensors from its rotary module to every layer, which calls one function with
    them. If that function is ours, two other tensors can be passed in their place.

    Returns cos and sin of the original forward where our kernels do not run, and where a sequence
    is to keep the bits of the plain model, which no other rounding gives.
    """

    def __init__(
        self,
        module: nn.Module,
        prefixes: dict[str | None, str],
        original_forward: Any,
        kernels: str,
        keeps_bits: Callable[[], bool] | None = None,
    ) -> None:
        self.module = module
        self.keeps_bits = keeps_bits
        self.attribute_names = {
            layer_type: (f"{prefix}inv_freq", f"{prefix}attention_scaling")
            for layer_type, prefix in prefixes.items()
        }
        self.original_forward = original_forward
        self.kernels = kernels
        self._packed: dict[str | None, _PackedFrequencies] = {}

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keeps_bits = self.keeps_bits if self.kernels == "auto" else None
        # Asked second, because a compiled graph, which has transformers' code, cannot contain it.
        if not use_exact_positions(x, self.kernels) or (keeps_bits is not None and keeps_bits()):
            return self.original_forward(x, position_ids, *args, **kwargs)
        layer_type = next(iter((*args, *kwargs.values())), None)  # whatever its name
        return position_ids, self.packed_frequencies(layer_type, x.device)

    def packed_frequencies(self, layer_type: str | None, device: torch.device) -> torch.Tensor:
        """Return a layer type's packed frequencies, `[R / 2 + 1]` or `[B, R / 2 + 1]`.

        Packs again only on change, so most decode steps launch no kernel for it.
        """
        name, scale_name = self.attribute_names[layer_type]
        inv_freq, scale = getattr(self.module, name), getattr(self.module, scale_name)
        if not torch.compiler.is_compiling():  # a graph must not depend on eager state
            last = self._packed.get(layer_type)
            if last is not None and last.is_of(inv_freq, scale) and last.packed.device == device:
                return last.packed
        # An inference tensor could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            if inv_freq.ndim == 3:  # other frequencies for each row, `[B, 1, R / 2]`
                packed = pack_frequencies(inv_freq[:, 0], scale.reshape(-1))
            else:
                packed = pack_frequencies(inv_freq, scale)
            packed = packed.to(device)
        if not torch.compiler.is_compiling():
            self._packed[layer_type] = _PackedFrequencies(
                inv_freq, scale, version_counter(inv_freq), version_counter(scale), packed
            )
        return packed

    def retire(self) -> None:
        """Return cos and sin from now on: the patch is undone, but a wrapper still calls this."""
        self.kernels = "hf"

    def for_replica(self, replica: Any) -> PositionPassthrough:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        copied = PositionPassthrough.__new__(PositionPassthrough)
        own = forward_for_replica(self.original_forward, replica)
        copied.__dict__.update(self.__getstate__(), module=replica, original_forward=own)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": {}}


Weights = tuple[torch.Tensor, torch.Tensor]


class _Deferral(threading.local):
    """Whether norms are deferred in the call of an attention that this thread is in."""

    # The first norm of the call decides, so that a hook which was added since the last call is
    # seen. The other norm and the rotation follow, so that each norm is applied exactly once.
    norms: DeferrableNorms | None = None  # None outside of an attention, and ahead of its norms
    weights: Weights | None = None  # both weights if the norms are deferred


_deferral = _Deferral()


def end_deferral() -> None:
    """Forget what was decided for an attention at the end of its call."""
    _deferral.norms = _deferral.weights = None


class DeferrableNorms:
    """The norms of an attention's queries and keys, which the rotation applies in its launch.

    The copy of the attention's forward calls a `DeferredNorm` in place of each norm. It returns its
    input if the rotation applies the norm, and calls the norm's module if not. The modules
    themselves stay as they are, and are called whenever something can see that: hooks, wrappers,
    other weights.

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
        x = x * 1e-3  # small enough that eps matters
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
