"""Who rotates: Triton's kernels where they run, plain torch everywhere else.

In eager mode kernels are launched directly, because going through an operator would cost several
times the Python of the launch itself. In graphs they are operators.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from rope_patch.ops import reference
from rope_patch.ops.angles import cos_sin, rerotation_frequencies
from rope_patch.ops.cpu import rope_from_cos_sin
from rope_patch.ops.modes import needs_plain_torch
from rope_patch.ops.validation import validate_shapes

logger = logging.getLogger("rope_patch")

KERNELS = ("auto", "reference", "triton", "hf")

_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_MIN_TRITON, _MAX_TRITON = (3, 6), (3, 9)

# Weights of a rotated pair further apart than this make a normed x that is derived from rounded
# outputs too wrong: the error grows with the ratio, and at 64 it is that of a rounding or two.
_MAX_PAIR_RATIO = 64.0

# Weights below this make outputs that float16 has no bits for.
_MIN_WEIGHT = 2.0**-14


# Modules of `ops/kernels`, once Triton has turned out to run.
_kernel_modules: dict[str, Any] = {}


def triton_unavailable_reason() -> str | None:
    """Why Triton's kernels cannot run here, or None; logged once, where there is a GPU."""
    return _triton_unavailable_reason()


@functools.cache
def _triton_unavailable_reason() -> str | None:
    try:
        version = importlib.import_module("triton").__version__
        known = tuple(int(part) for part in version.split(".")[:2])
        if not _MIN_TRITON <= known <= _MAX_TRITON:
            problem = f"Triton is {version}, and 3.6 to 3.9 are supported"
        else:
            for name in ("autograd", "custom_ops", "rope", "qk_norm_rope"):
                _kernel_modules[name] = importlib.import_module(f"rope_patch.ops.kernels.{name}")
            return None
    except Exception as error:  # a broken installation can raise anything
        problem = f"Triton cannot be imported ({error})"
    if torch.cuda.is_available():  # on a CPU there is nothing to miss
        logger.info("%s: rotating in plain torch", problem)
    return problem


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


# torch.compiler.assume_constant_result, without importing the compiler for it.
for _constant in (triton_unavailable_reason, is_interpreted):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


def use_triton(x: torch.Tensor, kernels: str = "auto") -> bool:
    """Whether a tensor is one for Triton's kernels.

    Args:
        x: Queries, or what has their device, type and dtype.
        kernels: "auto" where it can be; "triton" demands it; anything else never.

    Raises:
        ValueError: It is demanded and cannot be.
    """
    if kernels == "auto":
        fits = (
            x.is_cuda
            and type(x) in _PLAIN_TYPES
            and x.dtype in _DTYPES
            and triton_unavailable_reason() is None
        )
        return fits and (torch.compiler.is_compiling() or not needs_plain_torch())
    if kernels != "triton":
        return False
    if problem := triton_unavailable_reason():
        raise ValueError(
            f'kernels="triton" was asked for, but {problem[0].lower()}{problem[1:]}: install it '
            "(pip install 'rope-patch[kernels]'), or leave kernels at \"auto\""
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
    """Rotates queries and keys to their positions (RoFormer, arXiv:2104.09864, equation 34).

    One launch for both where Triton runs; angles are exact at any position, arithmetic is in
    float32, and the result is rounded once. Differentiable in q and k, to any order.

    Args:
        q: Queries, `[B, S, H, D]`; any strides.
        k: Keys, `[B, S, K, D]`, or None.
        positions: Tokens, integers `[S]` or `[B, S]`; `[A, B, S]` with `sections`.
        packed_freqs: Frequencies, see `make_turns`, `[R / 2 + 1]` or `[B, R / 2 + 1]`; R <= D
            dimensions rotate, the others stay.
        sections: Where tokens have a position on each of A axes, which one each pair turns by,
            integers `[R / 2]` (M-RoPE, arXiv:2409.12191).
        interleaved: Whether a pair is two neighbours (GPT-J, Cohere) rather than the same place in
            both halves of the rotated dimensions (Llama).
        heads_dim: Where the heads are: 2, or 1 for `[B, H, S, D]`.
        inplace: Write over q and k, as autograd is told: whoever needs them as they were gets an
            error in the backward pass, and leaves that require gradients get one at once.
        kernels: "auto", "reference" for plain torch, or "triton".

    Returns:
        Both, rotated, laid out as they came (q and k themselves where `inplace`); None for keys
        that were None.

    Raises:
        ValueError: Tensors that do not fit together, or kernels that cannot run.
    """
    if positions is None or packed_freqs is None:
        raise ValueError("positions and turns are needed: see rope_patch.ops.make_turns")
    if not use_triton(q, kernels):
        _require_torch_backend(kernels)
        validate_shapes(q, k, positions, packed_freqs, sections, heads_dim)
        given: Any = {"interleaved": interleaved, "heads_dim": heads_dim}
        if kernels == "auto":  # quicker on a CPU, and itself the reference elsewhere
            cos, sin = cos_sin(positions, packed_freqs, sections)
            turned = rope_from_cos_sin(q, k, cos, sin, repeated=False, **given)
        else:
            turned = reference.rope(q, k, positions, packed_freqs, sections=sections, **given)
        return _copy_inplace(q, k, *turned) if inplace else turned
    rest = (positions, packed_freqs, sections, interleaved, heads_dim, False)
    if torch.compiler.is_compiling():
        made = [*torch.ops.rope_patch.rope(q, k, *rest), None]
        return _copy_inplace(q, k, made[0], made[1]) if inplace else (made[0], made[1])
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        return _kernel_modules["autograd"].Rope.apply(q, k, *rest, inplace)
    if inplace:
        torch.autograd.graph.increment_version([x for x in (q, k) if x is not None])
    return _kernel_modules["rope"].rope(q, k, *rest, inplace)


def _copy_inplace(
    q: torch.Tensor, k: torch.Tensor | None, turned_q: torch.Tensor, turned_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q.copy_(turned_q)
    if k is not None and turned_k is not None:
        k.copy_(turned_k)
    return q, k


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
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of queries and keys (arXiv:1910.07467), and `rope`, rounded once.

    One launch where Triton runs, and one backward with a sum for the weights' gradients, which is
    taken in the same order each time.

    Args:
        q: Queries, `[B, S, H, D]`; any strides.
        k: Keys, `[B, S, K, D]`.
        q_weight: `[D]` where each head is normed by itself (Qwen 3, Gemma 3), `[H, D]` where all
            heads of a token are normed together (OLMo 2).
        k_weight: The same, `[D]` or `[K, D]`.
        positions: See `rope`.
        packed_freqs: See `rope`.
        eps: Added to the mean of squares.
        offset: Added to the weights: 0 for Llama's form, 1 for Gemma's.
        sections: See `rope`.
        interleaved: See `rope`.
        heads_dim: See `rope`.
        save: What is kept for the backward pass beside reciprocal norms: "input", q and k; or
            "output", the results, which attention keeps anyway, so that next to nothing is added.
            The normed input is then derived from rounded results, which is close where the weights
            of a rotated pair are of like size; where they are not, the input is kept.
        kernels: See `rope`.

    Returns:
        Both, in the dtypes they came in.

    Raises:
        ValueError: Tensors that do not fit together, or kernels that cannot run.
    """
    if save not in ("input", "output"):
        raise ValueError(f'save must be "input" or "output", got {save!r}')
    if not use_triton(q, kernels):
        _require_torch_backend(kernels)
        validate_shapes(q, k, positions, packed_freqs, sections, heads_dim, q_weight, k_weight)
        return reference.qk_norm_rope(
            q, k, q_weight, k_weight, positions, packed_freqs, eps=eps, offset=offset, sections=sections,
            interleaved=interleaved, heads_dim=heads_dim,
        )  # fmt: skip
    rest = (
        q, k, q_weight, k_weight, positions, packed_freqs, sections, eps, offset, interleaved, heads_dim,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        normed = torch.ops.rope_patch.qk_norm_rope(*rest)
        return normed[0], normed[1]
    if torch.is_grad_enabled() and any(x.requires_grad for x in rest[:4]):
        rederive = save == "output" and can_recompute_from_output(
            q_weight, k_weight, packed_freqs, offset=offset, interleaved=interleaved
        )
        return _kernel_modules["autograd"].QKNormRope.apply(*rest, rederive)
    return _kernel_modules["qk_norm_rope"].forward(*rest, False)[:2]


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
    """Takes rotated keys from one set of frequencies to another, in place and exactly.

    A launch a layer where Triton runs, and nothing beside the keys is held meanwhile. Keys in 16
    bits are rounded up or down by chance, so that they do not drift over many changes; the chance
    is a hash, so the same keys always become the same.

    Args:
        layers: Keys of one layer or of several on one device, `[B, K, S, D]` each, of which the
            first R dimensions of each head are rotated.
        positions: Tokens, `[B, S]` or `[S]`.
        old: What the keys were rotated by, `[R / 2 + 1]` or `[B, R / 2 + 1]`; see `make_turns`.
        new: What to rotate them by.
        interleaved: See `rope`.
        kernels: See `rope`.

    Raises:
        ValueError: Tensors that do not fit together, or kernels that cannot run.
    """
    between = rerotation_frequencies(old, new)
    if not all(use_triton(keys, kernels) for keys in layers):
        _require_torch_backend(kernels)
        for keys in layers:
            validate_shapes(keys, None, positions, between, None, 1)
        reference.rerotate_(layers, positions, between, interleaved=interleaved)
        return
    how = (None, interleaved, 1, False, True, True)
    for keys in layers:
        _kernel_modules["rope"].rope(keys, None, positions, between, *how)
        torch.autograd.graph.increment_version(keys)  # as any operation in place does


def can_recompute_from_output(
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    packed_freqs: torch.Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> bool:
    """Whether weights let the normed input be derived from the output.

    Rounding errors are as large as a pair is long; turned back they fall on both of its numbers,
    and dividing by the smaller weight makes them grow by the ratio of the two.
    """
    return all(
        _pair_weight_ratio(weight.detach() + offset, 2 * (packed_freqs.shape[-1] - 1), interleaved)
        <= _MAX_PAIR_RATIO
        for weight in (q_weight, k_weight)
    )


def _pair_weight_ratio(weight: torch.Tensor, rotary_dim: int, interleaved: bool) -> float:
    """The largest ratio of the two weights of a pair; infinite where one is next to 0."""
    size = weight.abs().float()
    pairs = size[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    low, high = torch.aminmax(pairs, dim=-1 if interleaved else -2)
    if not bool((size >= _MIN_WEIGHT).all()):
        return float("inf")
    return float((high / low).max()) if rotary_dim else 1.0


def _require_torch_backend(kernels: str) -> None:
    if kernels not in ("auto", "reference"):
        raise ValueError(f'kernels must be "auto", "reference" or "triton" here, got {kernels!r}')
