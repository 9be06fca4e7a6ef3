"""Dispatch of the public ops: Triton kernels where they run, plain torch everywhere else.

In eager mode kernels are launched directly, because a custom op costs several times the Python of
the launch itself. In graphs they are custom ops.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from rope_patch.ops import plain_torch, reference, self_check
from rope_patch.ops.angles import rerotation_frequencies
from rope_patch.ops.modes import copy_to_device, is_interpreted, needs_plain_torch
from rope_patch.ops.output_inversion import can_recompute_from_output
from rope_patch.ops.self_check import (
    QK_NORM_ROPE,
    REROTATE,
    ROPE,
    KernelVariant,
    layout_fields,
    norm_fields,
    variant_fields,
)
from rope_patch.ops.validation import may_share_memory, overlaps_itself, validate_shapes
from rope_patch.utils.installation import install_hint

logger = logging.getLogger("rope_patch")

KERNELS = ("auto", "reference", "triton", "hf")

_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_MIN_TRITON, _MAX_TRITON = (3, 6), (3, 9)

# Modules of `ops/kernels`, imported once Triton is known to run.
_kernel_modules: dict[str, Any] = {}


def triton_unavailable_reason() -> str | None:
    """Return why Triton's kernels cannot run here, or None; logged once, if there is a GPU."""
    return _triton_unavailable_reason()


@functools.cache
def _triton_unavailable_reason() -> str | None:
    try:
        version = importlib.import_module("triton").__version__
        release = tuple(int(part) for part in version.split(".")[:2])
        if not _MIN_TRITON <= release <= _MAX_TRITON:
            problem = f"Triton is {version}, and 3.6 to 3.9 are supported"
        else:
            names = ("rope", "qk_norm_rope", "rerotate", "cache_write")
            for name in (*names, "attention", "attention_backward"):
                _kernel_modules[name] = importlib.import_module(f"rope_patch.ops.kernels.{name}")
            return None
    except Exception as error:  # a broken installation can raise anything
        problem = f"Triton cannot be imported ({error})"
    if torch.cuda.is_available():  # a CPU has no kernels to miss
        logger.info("%s: rotating in plain torch", problem)
    return problem


def kernel_module(name: str) -> Any:
    """Return a module of `ops/kernels`, once Triton is known to run."""
    return _kernel_modules[name]


def use_triton(x: torch.Tensor, kernels: str = "auto") -> bool:
    """Return whether to use Triton's kernels for a tensor.

    Args:
        x: Queries, or a tensor of their device, type and dtype.
        kernels: "auto" uses them where they run, "triton" requires them, anything else never does.

    Raises:
        ValueError: `kernels` is "triton" and they cannot run.
    """
    if kernels == "auto":
        is_supported = x.is_cuda and type(x) in _PLAIN_TYPES and x.dtype in _DTYPES
        runs = is_supported and triton_unavailable_reason() is None
        return runs and (torch.compiler.is_compiling() or not needs_plain_torch())
    if kernels != "triton":
        return False
    if problem := triton_unavailable_reason():
        raise ValueError(
            f'kernels="triton" was asked for, but {problem[0].lower()}{problem[1:]}: install it '
            f'({install_hint("kernels")}), or leave kernels at "auto"'
        )
    if not x.is_cuda and not is_interpreted():
        raise ValueError(
            f'kernels="triton" needs tensors on a GPU, got {x.device.type}: move them, leave '
            'kernels at "auto", or set TRITON_INTERPRET=1 before starting Python to test'
        )
    if x.dtype not in _DTYPES:
        raise ValueError(
            f'kernels="triton" takes bfloat16, float16 and float32, got {x.dtype}: cast, or leave '
            'kernels at "auto"'
        )
    if not torch.compiler.is_compiling() and needs_plain_torch():
        raise ValueError(
            'kernels="triton" cannot be traced (torch.jit.trace) or transformed (forward-mode AD, '
            'torch.func): leave kernels at "auto", which then rotates in plain torch'
        )
    return True


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    packed_freqs: torch.Tensor | None = None,
    *,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
    inplace: bool = False,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys to their positions (RoFormer, arXiv:2104.09864, equation 34).

    Triton rotates both in one launch. Angles are exact at any position, arithmetic is in float32,
    and the result is rounded once. Differentiable in q and k, to any order.

    Args:
        q: Queries, `[B, S, H, D]`; any strides.
        k: Keys, `[B, S, K, D]`, or None.
        positions: Token positions, integers `[S]` or `[B, S]`; `[A, B, S]` with `sections`.
        packed_freqs: Frequencies from `pack_frequencies`, `[R / 2 + 1]` or `[B, R / 2 + 1]`. The
            first R <= D dimensions rotate, the others keep their values.
        sections: For tokens with a position on each of A axes (M-RoPE, arXiv:2409.12191): the axis
            that each pair rotates by, integers `[R / 2]`.
        interleaved: Whether a pair is two neighbours (GPT-J, Cohere) rather than the same index in
            both halves of the rotated dimensions (Llama).
        heads_dim: Dimension of the heads: 2, or 1 for `[B, H, S, D]`.
        inplace: Overwrite q and k, which must not overlap, and tell autograd. If their old values
            are needed, the backward pass raises; leaves that require gradients raise at once.
        kernels: "auto", "reference" for plain torch, or "triton".

    Returns:
        Both, rotated, in their memory layouts (q and k themselves if `inplace`); None for keys that
        are None.

    Raises:
        ValueError: Shapes or dtypes do not match, or the kernels cannot run.
    """
    if positions is None or packed_freqs is None:
        raise ValueError(
            "positions and packed_freqs are needed: see rope_patch.ops.pack_frequencies"
        )
    if inplace:
        _require_own_memory(q, k)
    rest = (positions, packed_freqs, sections, interleaved, heads_dim)
    if not use_triton(q, kernels):
        return plain_torch.rope(q, k, *rest, inplace, kernels)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or (k is not None and k.requires_grad)
    )
    if torch.compiler.is_compiling():
        if not self_check.may_trace(ROPE, q.device, q.dtype, kernels):
            return plain_torch.rope(q, k, *rest, inplace, kernels)
        outputs = [*torch.ops.rope_patch.rope(q, k, *rest, False), None]
        if inplace:
            return plain_torch.copy_inplace(q, k, outputs[0], outputs[1])
        return outputs[0], outputs[1]
    shape = q.shape  # each look at a shape takes a tenth of a microsecond
    checked = (
        ROPE, q.device, q.dtype, shape[-1], shape[heads_dim], None if k is None else k.dtype,
        0 if k is None else k.size(heads_dim), packed_freqs.size(-1), interleaved, heads_dim,
        sections is None, inplace, needs_grad,
    )  # fmt: skip
    if checked not in self_check.passed:
        validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
        fields = variant_fields(q, k, packed_freqs, sections, interleaved, heads_dim, needs_grad)
        variant = KernelVariant(op=ROPE, inplace=inplace, **fields, **layout_fields(q, k))
        if not self_check.passes(checked, kernels, variant):
            return plain_torch.rope(q, k, *rest, inplace, kernels)
    kernel = _kernel_modules["rope"]
    if needs_grad:
        return kernel.RopeFunction.apply(q, k, *rest, False, inplace)
    if inplace:
        torch.autograd.graph.increment_version([x for x in (q, k) if x is not None])
    return kernel.launch(q, k, *rest, False, inplace)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    sections: torch.Tensor | None = None,
    interleaved: bool = False,
    heads_dim: int = 2,
    save: str = "input",
    inplace: bool = False,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm (arXiv:1910.07467) to queries and keys, then `rope`; round once.

    Triton takes one launch forward and one backward, and another for the gradients of the weights
    if they are trained, summed always in the same order.

    Args:
        q: Queries, `[B, S, H, D]`; any strides.
        k: Keys, `[B, S, K, D]`.
        q_weight: `[D]` if each head is normed by itself (Qwen 3, Gemma 3), `[H, D]` if all heads of
            a token are normed together (OLMo 2).
        k_weight: The same, `[D]` or `[K, D]`.
        positions: See `rope`.
        packed_freqs: See `rope`.
        eps: Added to the mean of squares.
        offset: Added to the weights: 0 for Llama's form, 1 for Gemma's.
        sections: See `rope`.
        interleaved: See `rope`.
        heads_dim: See `rope`.
        save: What autograd saves besides the reciprocal norms: "input", q and k; or "output", the
            results, which attention saves anyway, so that it costs next to no memory. The backward
            pass then recomputes the normed input from rounded results. That is accurate where the
            two weights of each rotated pair are of similar size; elsewhere the input is saved, and
            always in compiled graphs, which do not have the weights' values. The first call with a
            weight reads it, and the first one after each in-place change.
        inplace: Overwrite q and k. Gradients need their old values, so they must not be required.
        kernels: See `rope`.

    Returns:
        Both, in the dtypes of q and k (q and k themselves if `inplace`).

    Raises:
        ValueError: Shapes or dtypes do not match, the kernels cannot run, or gradients are required
            in place.
    """
    if save not in ("input", "output"):
        raise ValueError(f'save must be "input" or "output", got {save!r}')
    trains_weights = torch.is_grad_enabled() and (q_weight.requires_grad or k_weight.requires_grad)
    needs_grad = trains_weights or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    )
    if inplace and needs_grad:
        raise ValueError(
            "inplace=True overwrites q and k, which gradients need: call qk_norm_rope in place "
            "under torch.no_grad() only"
        )
    if inplace:
        _require_own_memory(q, k)
    rest = (
        q, k, q_weight, k_weight, positions, packed_freqs, sections, eps, offset, interleaved,
        heads_dim,
    )  # fmt: skip
    if not use_triton(q, kernels):
        return plain_torch.qk_norm_rope(*rest, inplace, kernels)
    if torch.compiler.is_compiling():
        if not self_check.may_trace(QK_NORM_ROPE, q.device, q.dtype, kernels):
            return plain_torch.qk_norm_rope(*rest, inplace, kernels)
        outputs = torch.ops.rope_patch.qk_norm_rope(*rest, needs_grad)
        return plain_torch.copy_inplace(q, k, *outputs[:2]) if inplace else (outputs[0], outputs[1])
    recompute_input = (
        needs_grad
        and save == "output"
        and can_recompute_from_output(
            q_weight, k_weight, packed_freqs, offset=offset, interleaved=interleaved
        )
    )
    shape = q.shape
    checked = (
        QK_NORM_ROPE, q.device, q.dtype, shape[-1], shape[heads_dim], k.dtype, k.size(heads_dim),
        packed_freqs.size(-1), interleaved, heads_dim, sections is None, q_weight.dtype,
        q_weight.ndim, offset, inplace, needs_grad, trains_weights, recompute_input,
    )  # fmt: skip
    if checked not in self_check.passed:
        validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
        fields = variant_fields(q, k, packed_freqs, sections, interleaved, heads_dim, needs_grad)
        fields |= norm_fields(q_weight, offset, trains_weights) | layout_fields(q, k)
        fields |= {"inplace": inplace, "recompute_input": recompute_input}
        if not self_check.passes(checked, kernels, KernelVariant(op=QK_NORM_ROPE, **fields)):
            return plain_torch.qk_norm_rope(*rest, inplace, kernels)
    kernel = _kernel_modules["qk_norm_rope"]
    if needs_grad:
        return kernel.QKNormRopeFunction.apply(*rest, recompute_input)
    if inplace:
        torch.autograd.graph.increment_version([q, k])
    return kernel.launch_forward(*rest, False, inplace)[:2]


@torch.no_grad()
def rerotate_(
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    *,
    interleaved: bool = False,
    kernels: str = "auto",
) -> None:
    """Re-rotate keys from one set of frequencies to another, in place and exactly.

    Triton takes one launch for all layers of one shape, dtype and memory layout, after a copy of
    their addresses to the device that the CPU does not wait for, and no other memory. Keys in 16
    bits are rounded stochastically, so that they do not drift over many changes. The random bits
    are a hash of the value, so equal keys always become equal keys.

    Args:
        layers: Keys of one or several layers on one device, `[B, K, S, D]` each, in memory that
            does not overlap. The first R dimensions of each head are rotated.
        positions: Token positions, `[B, S]` or `[S]`.
        old: The frequencies of the keys, `[R / 2 + 1]` or `[B, R / 2 + 1]`; see `pack_frequencies`.
            Like `new`, on the keys' device or on the CPU.
        new: The frequencies to rotate them to.
        interleaved: See `rope`.
        kernels: See `rope`.

    Raises:
        ValueError: Shapes or dtypes do not match, or the kernels cannot run.
    """
    if not layers:
        return
    difference = rerotation_frequencies(old, new)
    if difference.device.type == "cpu":
        difference = copy_to_device(difference, layers[0].device)
    groups = []
    if all(use_triton(keys, kernels) and not overlaps_itself(keys) for keys in layers):
        groups = _kernel_modules["rerotate"].group_layers(layers)
    if not groups or not all(
        _can_rerotate(group, positions, difference, interleaved, kernels) for group in groups
    ):
        plain_torch.require_torch_backend(kernels)
        for keys in layers:
            validate_shapes(keys, None, positions, difference, None, 1)
        reference.rerotate_(layers, positions, difference, interleaved=interleaved)
        return
    for group in groups:
        _kernel_modules["rerotate"].launch(group, positions, difference, interleaved)
        torch.autograd.graph.increment_version(group)  # as any in-place operation does


def _require_own_memory(q: torch.Tensor, k: torch.Tensor | None) -> None:
    """Raise if overwriting q and k would overwrite what is still read."""
    if torch.compiler.is_compiling() or type(q) not in _PLAIN_TYPES or needs_plain_torch():
        return  # tensors without memory, whose results are new tensors first
    if overlaps_itself(q) or (k is not None and (overlaps_itself(k) or may_share_memory(q, k))):
        raise ValueError(
            "inplace=True needs q and k in memory that does not overlap, for every element (an "
            "expanded tensor has none): leave inplace out, or clone() them first"
        )


def _can_rerotate(
    group: Sequence[torch.Tensor],
    positions: torch.Tensor,
    packed_freqs: torch.Tensor,
    interleaved: bool,
    kernels: str,
) -> bool:
    """Return whether the kernel passed its check for a group of layers like this one."""
    keys, has_table = group[0], len(group) > 1
    if torch.compiler.is_compiling():
        return self_check.may_trace(REROTATE, keys.device, keys.dtype, kernels)
    shape = keys.shape
    checked = (
        REROTATE, keys.device, keys.dtype, shape[-1], shape[1], packed_freqs.size(-1), interleaved,
        has_table,
    )  # fmt: skip
    if checked in self_check.passed:
        return True
    validate_shapes(keys, None, positions, packed_freqs, None, 1)
    fields = variant_fields(keys, None, packed_freqs, None, interleaved, 1, False)
    fields |= {"several_layers": has_table} | layout_fields(keys, None)
    return self_check.passes(checked, kernels, KernelVariant(op=REROTATE, **fields))


# Does what torch.compiler.assume_constant_result does, without importing the compiler.
for _constant in (triton_unavailable_reason, is_interpreted, self_check.may_trace):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010
