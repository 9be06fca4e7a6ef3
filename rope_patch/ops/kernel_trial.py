"""A small problem for one variant of a kernel, and how far its results are from float64.

The truth is the plain torch reference in float64 on the CPU, which shares neither the compiler nor
the device with the kernel. Numbers come from a generator of their own, so no random state changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rope_patch.ops import reference
from rope_patch.ops.angles import pack_frequencies
from rope_patch.ops.kernel_variant import (
    QK_NORM_ROPE,
    QK_NORM_ROPE_INTO_CACHE,
    REROTATE,
    ROPE,
    ROPE_INTO_CACHE,
    KernelVariant,
    Layout,
)

# Largest error in units of rounding that arithmetic in float32 and one rounding leave. In 16 bits
# the one rounding dominates; in float32 the approximations of cosine, sine and root do.
_LIMITS = {torch.float32: 64.0, torch.float16: 4.0, torch.bfloat16: 4.0}
_RECOMPUTED_LIMIT = 8.0  # of gradients whose input is recomputed from rounded outputs

# From these on, rows of positions count up. Angles of far ones need all 64 bits.
_FIRST_POSITIONS = (0, 10_000_019)
_AXES = 3
_THETA = 1e4
_ATTENTION_FACTOR = 1.1
_WEIGHT_SPREAD = 0.1
_EPS = 1e-6
_SEED = 0
_LAYER_NAMES = ("keys", "keys of the second layer")

# Slots of a cache before and after those that are written, which keep their numbers.
_SLOTS_BEFORE, _SLOTS_AFTER = 3, 2


class Comparison(NamedTuple):
    """How far one result of a kernel is from float64.

    Attributes:
        name: Of the result.
        error: Largest error in units of rounding: half the spacing of the dtype's numbers at the
            largest number of the same head.
        limit: Largest error that is right.
    """

    name: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        """Return whether the result is right."""
        return self.error <= self.limit


def run_trial(variant: KernelVariant, *, batch: int = 2, tokens: int = 3) -> list[Comparison]:
    """Run a kernel on a small problem and compare all its results with float64.

    Gradients are computed without the autograd engine: a backward pass that recomputes activations
    calls ops in a thread of the engine, which would then wait for itself.

    Args:
        variant: What to run.
        batch: Rows of the problem.
        tokens: Tokens of a row.
    """
    problem = _Problem(variant, batch, tokens)
    with torch.inference_mode(False), torch.enable_grad():
        truths = _exact_results(variant, problem)  # first, because kernels can write anywhere
    with torch.inference_mode(False), torch.no_grad():
        results = _RUNS[variant.op](variant, problem)
    return [
        Comparison(name, _rounding_error(result, truths[name], unit), limit)
        for name, result in results.items()
        for unit, limit in [_tolerance(variant, name, result.dtype)]
    ]


# -- the problem -----------------------------------------------------------------------------------


class _Problem:
    """Inputs on the CPU in the kernel's dtypes; `on_device` moves them."""

    def __init__(self, variant: KernelVariant, batch: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)

        def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Any:
            x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return (mean + scale * x).to(dtype)

        def draw_heads(count: int, dtype: torch.dtype, dim: int = variant.head_dim) -> Any:
            sizes = [batch, tokens, dim]
            sizes.insert(variant.heads_dim, count)
            return draw(*sizes, dtype=dtype)

        def draw_weight(count: int) -> Any:
            shape = (count, variant.head_dim)[0 if variant.norm_all_heads else 1 :]
            mean = 1 - variant.offset
            return draw(*shape, dtype=variant.weight_dtype, scale=_WEIGHT_SPREAD, mean=mean)

        heads = max(variant.heads, 1)
        self.variant = variant
        self.q = draw_heads(heads, variant.dtype)
        self.q_grad = draw_heads(heads, variant.dtype)
        self.k = self.k_grad = None
        if variant.key_heads:
            self.k = draw_heads(variant.key_heads, variant.key_dtype)
            self.k_grad = draw_heads(variant.key_heads, variant.key_dtype)
        self.weights = (
            (draw_weight(heads), draw_weight(variant.key_heads)) if variant.has_norms else ()
        )
        if variant.writes_cache:
            sizes = (batch, variant.key_heads, _SLOTS_BEFORE + tokens + _SLOTS_AFTER)
            self.v = draw_heads(variant.key_heads, variant.dtype, variant.value_dim)
            self.key_cache = draw(*sizes, variant.head_dim, dtype=variant.dtype)
            self.value_cache = draw(*sizes, variant.value_dim, dtype=variant.dtype)
            self.start = torch.tensor(_SLOTS_BEFORE, device="cpu")
        starts = torch.tensor(_FIRST_POSITIONS, device="cpu")[torch.arange(batch, device="cpu") % 2]
        self.positions = starts[:, None] + torch.arange(tokens, device="cpu")
        pairs = torch.arange(variant.rotary_dim // 2, dtype=torch.float64, device="cpu")
        inv_freq = _THETA ** -(pairs / max(len(pairs), 1))
        self.packed_freqs = pack_frequencies(inv_freq, _ATTENTION_FACTOR)
        self.sections = None
        if variant.sections:
            self.sections = torch.arange(len(pairs), device="cpu") % _AXES
            self.positions = torch.stack([self.positions + 5 * axis for axis in range(_AXES)])

    def heads_on_device(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries and keys on the device, in the layouts of the variant."""
        variant = self.variant
        return self._place(self.q, variant.q_layout), (
            None if self.k is None else self._place(self.k, variant.k_layout)
        )

    def grads_on_device(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of both outputs on the device."""
        return self._place(self.q_grad, self.variant.q_layout), (
            None if self.k_grad is None else self._place(self.k_grad, self.variant.k_layout)
        )

    def caches_on_device(self) -> list[torch.Tensor]:
        """Return values, both caches and the first slot on the device."""
        variant = self.variant
        caches = [
            self.on_device(cache) if layout is None else self._place(cache, layout)
            for cache, layout in (
                (self.key_cache, variant.key_cache_layout),
                (self.value_cache, variant.value_cache_layout),
            )
        ]
        return [self._place(self.v, variant.v_layout), *caches, self.on_device(self.start)]

    def on_device(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device."""
        return x.to(self.variant.device)

    def angles_on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return positions, packed frequencies and sections on the device."""
        sections = None if self.sections is None else self.on_device(self.sections)
        return self.on_device(self.positions), self.on_device(self.packed_freqs), sections

    def _place(self, x: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        if layout is None:  # tokens before heads, as projections write them
            order = [0, 3 - self.variant.heads_dim, self.variant.heads_dim, 3]
            copied = x.permute(order).clone(memory_format=torch.contiguous_format)
            return self.on_device(copied).permute(order)
        strides = layout.resized(tuple(x.shape))
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
        memory = torch.zeros(extent, dtype=x.dtype, device="cpu")
        memory.as_strided(x.shape, strides).copy_(x)
        return self.on_device(memory).as_strided(x.shape, strides)


# -- the kernels -----------------------------------------------------------------------------------


def _run_rope(variant: KernelVariant, problem: _Problem) -> dict[str, torch.Tensor]:
    from rope_patch.ops.kernels import rope

    rest = (*problem.angles_on_device(), variant.interleaved, variant.heads_dim)
    inputs: Any = (*problem.heads_on_device(), *rest, False, variant.inplace)
    outputs = rope.launch(*inputs)
    results = {"q": outputs[0], "k": outputs[1]}
    if variant.needs_grad:
        inputs = (*problem.grads_on_device(), *rest, True)
        grads = rope.launch(*inputs)
        results |= {"gradient of q": grads[0], "gradient of k": grads[1]}
    return {name: x for name, x in results.items() if x is not None}


def _run_qk_norm_rope(variant: KernelVariant, problem: _Problem) -> dict[str, torch.Tensor]:
    from rope_patch.ops.kernels import qk_norm_rope

    q, k = problem.heads_on_device()
    weights = [problem.on_device(weight) for weight in problem.weights]
    inputs: Any = (
        q, k, *weights, *problem.angles_on_device(), _EPS, variant.offset,
        variant.interleaved, variant.heads_dim,
    )  # fmt: skip
    if not variant.needs_grad:
        inputs += (False, variant.inplace)
        return dict(zip(("q", "k"), qk_norm_rope.launch_forward(*inputs), strict=False))
    for x in inputs[: 4 if variant.trains_weights else 2]:
        x.requires_grad_()
    with torch.enable_grad():
        outputs = qk_norm_rope.QKNormRopeFunction.apply(*inputs, variant.recompute_input)
    grads = outputs[0].grad_fn.apply(*problem.grads_on_device())
    names = [f"gradient of {name}" for name in ("q", "k", "q_weight", "k_weight")]
    results = {"q": outputs[0], "k": outputs[1], **dict(zip(names, grads, strict=False))}
    return {name: x.detach() for name, x in results.items() if x is not None}


def _run_rerotate(variant: KernelVariant, problem: _Problem) -> dict[str, torch.Tensor]:
    from rope_patch.ops.kernels import rerotate

    layers = [problem.heads_on_device()[0] for _ in range(2 if variant.several_layers else 1)]
    for keys in layers[1:]:  # other numbers, so that a layer cannot pass for another one
        keys.neg_()
    positions, packed_freqs, _ = problem.angles_on_device()
    rerotate.launch(layers, positions, packed_freqs, variant.interleaved)
    return dict(zip(_LAYER_NAMES, layers, strict=False))


def _run_into_cache(variant: KernelVariant, problem: _Problem) -> dict[str, torch.Tensor]:
    from rope_patch.ops.kernels import cache_write

    q, k = problem.heads_on_device()
    v, key_cache, value_cache, start = problem.caches_on_device()
    weights = [problem.on_device(weight) for weight in problem.weights]
    norms: Any = (*weights, _EPS, variant.offset) if weights else None
    inputs: Any = (q, k, v, key_cache, value_cache, start, *problem.angles_on_device(), norms)
    inputs += (variant.interleaved, variant.heads_dim)
    q = cache_write.launch(*inputs)
    return {"q": q, "key cache": key_cache, "value cache": value_cache}


_RUNS = {
    ROPE: _run_rope,
    QK_NORM_ROPE: _run_qk_norm_rope,
    REROTATE: _run_rerotate,
    ROPE_INTO_CACHE: _run_into_cache,
    QK_NORM_ROPE_INTO_CACHE: _run_into_cache,
}


# -- the comparison --------------------------------------------------------------------------------


def _exact_results(variant: KernelVariant, problem: _Problem) -> dict[str, torch.Tensor]:
    """Return results and gradients in float64, by name."""
    inputs = [x.double().requires_grad_() for x in (problem.q, problem.k) if x is not None]
    weights = [x.double().requires_grad_() for x in problem.weights]
    layout: Any = {
        "sections": problem.sections,
        "interleaved": variant.interleaved,
        "heads_dim": variant.heads_dim,
    }
    angles = (problem.positions, problem.packed_freqs)
    outputs: Any
    if variant.has_norms:
        arguments: Any = (*inputs, *weights, *angles)
        norm = {"eps": _EPS, "offset": variant.offset}
        outputs = reference.qk_norm_rope(*arguments, **(layout | norm))
    else:
        outputs = reference.rope(inputs[0], [*inputs, None][1], *angles, **layout)
    outputs = [x for x in outputs if x is not None]
    names = ["q", "k"]
    if variant.op == REROTATE:
        names, outputs = list(_LAYER_NAMES), [*outputs, -outputs[0]]
    results = dict(zip(names, (x.detach() for x in outputs), strict=False))
    if variant.writes_cache:
        caches = ((problem.key_cache, results.pop("k")), (problem.value_cache, problem.v.double()))
        for name, (cache, x) in zip(("key cache", "value cache"), caches, strict=True):
            heads_first = x if variant.heads_dim == 1 else x.transpose(1, 2)
            results[name] = cache.double()
            results[name][:, :, _SLOTS_BEFORE:-_SLOTS_AFTER] = heads_first
    if variant.needs_grad:
        grads = [x.double() for x in (problem.q_grad, problem.k_grad) if x is not None]
        gradients = torch.autograd.grad(outputs, [*inputs, *weights], grads)
        leaves = [*names[: len(inputs)], "q_weight", "k_weight"]
        results |= {f"gradient of {n}": x for n, x in zip(leaves, gradients, strict=False)}
    return results


def _tolerance(variant: KernelVariant, name: str, dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """Return the dtype whose units of rounding count, and the largest error in them."""
    dtype = torch.float32 if dtype == torch.float64 else dtype  # kernels compute in float32
    if variant.recompute_input and name.startswith("gradient"):
        return variant.dtype, max(_RECOMPUTED_LIMIT, _LIMITS[variant.dtype])
    return dtype, _LIMITS[dtype]


def _rounding_error(result: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest error in units of rounding; infinite for NaN."""
    info = torch.finfo(dtype)
    largest = truth.abs().amax(-1, keepdim=True).clamp_min(info.tiny)
    errors = (result.to("cpu", torch.float64) - truth).abs() / (largest * (info.eps / 2))
    return float(errors.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
