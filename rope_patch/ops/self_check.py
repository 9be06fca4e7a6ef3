"""Check each kernel at its first use on a device, so that wrong numbers go nowhere unseen.

The first call of an op with a new kind of tensors (`KernelVariant`) runs the kernels that the call
needs, backward included, on a few tokens (`run_trial`), and compares them with float64. The
compiled kernels are those of the call itself, so the check costs milliseconds beside their
compilation. If a kernel is wrong or does not run, one warning says what to report, and the op
computes such tensors in plain torch until the process ends, forward and backward.

The trial runs in a thread of its own. There, no mode of the caller is active (gradients, inference,
autocast, dispatch modes, saved-tensor hooks, torch.compile), and its stream is none of the user's.
A stream that captures a CUDA graph allows no trial: the kernel runs unchecked, and the next call
outside of a capture checks it.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_patch.ops import reference
from rope_patch.ops.angles import pack_frequencies
from rope_patch.ops.modes import is_interpreted
from rope_patch.utils.errors import describe_error
from rope_patch.utils.installation import own_version, version

logger = logging.getLogger("rope_patch")

VARIABLE = "ROPE_PATCH_SELF_CHECK"

# Keys of calls whose kernels are right, or are not to be checked. Ops look their key up here first.
passed: set[Hashable] = set()

# Why the kernels of other keys are not used.
_problems: dict[Hashable, str] = {}

# Warnings about kernels that are not used, by op, device and dtype.
_reports: dict[Hashable, str] = {}

_lock = threading.Lock()

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def passes(key: Hashable, kernels: str, variant: KernelVariant) -> bool:
    """Return whether to use the kernels for calls with a key; check them at the first one.

    Args:
        key: Everything that the kernels of a call are compiled for.
        kernels: See `rope_patch.ops.rope`.
        variant: The kernels of this call.

    Raises:
        RuntimeError: The kernels do not work, and `kernels` is "triton".
        ValueError: The environment variable has an unknown value.
    """
    with _lock:
        if key in passed:  # checked by another thread, which this one waited for
            return True
        if key not in _problems:
            if not _is_enabled():
                passed.add(key)
                return True
            try:
                problem = _find_problem(variant)
            except _CannotCheckNow:
                return True
            if problem is None:
                passed.add(key)
                return True
            _problems[key] = problem
        elif kernels != "triton":
            return False
        _report(_problems[key], kernels, variant)
        return False


def may_trace(op: str, device: torch.device, dtype: torch.dtype, kernels: str) -> bool:
    """Return whether torch.compile may put an op's kernels into a graph; runs nothing.

    Graphs are traced with tensors that have no numbers, so only earlier calls outside of graphs
    tell: one wrong kernel of the op, in this dtype and on this device, is enough against it.

    Args:
        op: See `KernelVariant`.
        device: Of queries.
        dtype: Of queries.
        kernels: See `passes`.

    Raises:
        RuntimeError: Kernels of this op do not work, and `kernels` is "triton".
    """
    report = _reports.get((op, device, dtype))
    if report is not None and kernels == "triton":
        raise RuntimeError(report)
    return report is None


class _CannotCheckNow(Exception):
    """The device cannot run a trial at the moment."""


def _is_enabled() -> bool:
    """Return whether to check: by the variable, else everywhere but in Triton's interpreter."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} must be 1 (check kernels at their first use) or 0 (do not), got {value!r}"
        )
    if not value:
        return not is_interpreted()
    return value == "1"


def _find_problem(variant: KernelVariant) -> str | None:
    """Run a trial in a thread of its own; return what is wrong with the kernels, or None."""
    if variant.device.type == "cuda" and (
        not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()
    ):
        raise _CannotCheckNow
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rope_patch-self-check") as pool:
        return pool.submit(_try_kernels, variant).result()


def _try_kernels(variant: KernelVariant) -> str | None:
    with ExitStack() as stack:
        if variant.device.type == "cuda":
            stack.enter_context(torch.cuda.device(variant.device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(variant.device)))
        try:
            return _describe_wrong(run_trial(variant))
        except torch.OutOfMemoryError as error:
            raise _CannotCheckNow from error
        except Exception as error:  # a compiler or a driver can raise anything
            return f"does not run on {variant.device} ({describe_error(error)})"


def _describe_wrong(comparisons: list[Comparison]) -> str | None:
    """Return what is wrong with a kernel's results, or None."""
    worst = max(comparisons, key=lambda comparison: comparison.error / comparison.limit)
    if worst.is_right:
        return None
    return (
        f"is wrong: {worst.name} is off by {worst.error:.3g} units of rounding, not {worst.limit:g}"
    )


# -- reports ---------------------------------------------------------------------------------------


def _report(problem: str, kernels: str, variant: KernelVariant) -> None:
    what = f"rope_patch's kernel {variant.op} {problem}"
    details = (
        f"Please report this with the output of `rope-patch bench --self-test`: {variant}; "
        f"{describe_device(variant.device)}; {describe_versions()}."
    )
    refusal = (
        f'kernels="triton" was asked for, but {what}. Leave kernels at "auto", which then '
        f"computes in plain torch. {details}"
    )
    is_new = _reports.setdefault((variant.op, variant.device, variant.dtype), refusal) is refusal
    if kernels == "triton":
        raise RuntimeError(refusal)
    logger.log(
        logging.WARNING if is_new else logging.DEBUG,
        "%s. Tensors like these are computed in plain torch from now on. %s %s=0 skips the check.",
        what,
        details,
        VARIABLE,
    )


def describe_device(device: torch.device) -> str:
    """Return a device's name, compute capability and driver."""
    if device.type != "cuda":
        return f"{device}, {platform.machine()}, Triton's interpreter"
    properties = torch.cuda.get_device_properties(device)
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return (
        f"{device}, {properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{runtime}, driver {_driver_version()}"
    )


def _driver_version() -> str:
    """Return the version of NVIDIA's or AMD's driver, where Linux tells it."""
    for path in _DRIVER_FILES:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(r"\d+(\.\d+)+", text):
            return match[0]
    return "unknown"


def describe_versions() -> str:
    """Return the versions of Python and of all packages that a kernel depends on."""
    packages = {
        "rope_patch": own_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    return ", ".join(f"{name} {v}" for name, v in packages.items()) + (
        f", Python {platform.python_version()}, {platform.system()}"
    )


# -- variants --------------------------------------------------------------------------------------

ROPE, QK_NORM_ROPE, REROTATE = "rope", "qk_norm_rope", "rerotate_"

# `rope_into_cache` without and with norms.
ROPE_INTO_CACHE, QK_NORM_ROPE_INTO_CACHE = "rope_into_cache", "qk_norm_rope_into_cache"

MAPPED_ATTENTION = "mapped_attention"

# Triton compiles other code for strides that are multiples of 16.
_STRIDE_UNIT = 16


class Layout(NamedTuple):
    """The memory layout of a tensor: its sizes and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def resized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return strides for another shape: equal order, equal gaps, equal divisibility by 16."""
        strides, extent, real_extent = [0] * len(shape), 1, 1
        for i in sorted(range(len(shape)), key=lambda i: (self.strides[i], -i)):
            stride = extent + (self.strides[i] - extent) % _STRIDE_UNIT
            if stride == extent and self.strides[i] > real_extent:
                stride += _STRIDE_UNIT
            strides[i] = stride
            extent, real_extent = stride * shape[i], self.strides[i] * self.shape[i]
        return tuple(strides)


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """What one compiled kernel, or a forward kernel with its backward, is compiled for.

    Attributes:
        op: `ROPE`, `QK_NORM_ROPE`, `REROTATE`, `ROPE_INTO_CACHE`, `QK_NORM_ROPE_INTO_CACHE` or
            `MAPPED_ATTENTION`.
        device: Where it runs.
        dtype: Of queries.
        key_dtype: Of keys.
        heads: Query heads.
        key_heads: Key heads; 0 without keys.
        head_dim: Dimensions of a head.
        rotary_dim: How many of them rotate.
        interleaved: See `rope_patch.ops.rope`.
        heads_dim: See `rope_patch.ops.rope`.
        sections: Whether pairs rotate by positions on several axes.
        inplace: Whether queries and keys are overwritten.
        needs_grad: Whether the backward pass is run, too.
        weight_dtype: Of the norm's weights.
        norm_all_heads: Whether all heads of a token are normed together.
        offset: Added to the weights.
        trains_weights: Whether the weights have gradients, which takes a kernel of its own.
        recompute_input: Whether the backward pass starts from the output.
        several_layers: Whether keys of several layers are re-rotated in one launch.
        q_layout: Memory layout of queries to imitate; None: tokens before heads.
        k_layout: The same for keys.
        value_dim: Dimensions of a value that is written into a cache, or attended to.
        v_layout: Memory layout of values; None: tokens before heads.
        key_cache_layout: Memory layout of the cache for keys; None: contiguous.
        value_cache_layout: The same for values.
        tile_rows: Rows of a tile of queries in attention.
        shift_parts: Parts of the pairs that have shifts of their own; see `AttentionRegions`.
        has_softcap: Whether logits have a soft cap.
        sink_dtype: Of attention sinks; None without.
        shares_keys: Whether several programs share the keys of a query.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    key_dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    heads_dim: int = 2
    sections: bool = False
    inplace: bool = False
    needs_grad: bool = False
    weight_dtype: torch.dtype = torch.float32
    norm_all_heads: bool = False
    offset: float = 0.0
    trains_weights: bool = False
    recompute_input: bool = False
    several_layers: bool = False
    q_layout: Layout | None = None
    k_layout: Layout | None = None
    value_dim: int = 0
    v_layout: Layout | None = None
    key_cache_layout: Layout | None = None
    value_cache_layout: Layout | None = None
    tile_rows: int = 0
    shift_parts: int = 1
    has_softcap: bool = False
    sink_dtype: torch.dtype | None = None
    shares_keys: bool = False

    @property
    def has_norms(self) -> bool:
        """Return whether queries and keys are normed."""
        return self.op in (QK_NORM_ROPE, QK_NORM_ROPE_INTO_CACHE)

    @property
    def writes_cache(self) -> bool:
        """Return whether keys and values are written into a cache."""
        return self.op in (ROPE_INTO_CACHE, QK_NORM_ROPE_INTO_CACHE)

    def __str__(self) -> str:
        heads = f"{self.heads} + {self.key_heads}" if self.key_heads else str(self.heads)
        backward = "backward with weights" if self.trains_weights else "backward"
        parts = [
            f"{self.op} in {_name(self.dtype)}",
            f"{heads} heads of {self.head_dim}, {self.rotary_dim} rotated",
            "neighbours" if self.interleaved else "halves",
            f"heads_dim {self.heads_dim}",
            "sections" if self.sections else "",
            "in place" if self.inplace else "",
            f"weights in {_name(self.weight_dtype)}" if self.has_norms else "",
            "all heads normed together" if self.norm_all_heads else "",
            backward if self.needs_grad else "",
            "input recomputed" if self.recompute_input else "",
            "several layers" if self.several_layers else "",
            f"values of {self.value_dim}, {self.tile_rows} rows" if self.tile_rows else "",
            f"{self.shift_parts} shifts a token" if self.shift_parts > 1 else "",
            "soft cap" if self.has_softcap else "",
            f"sinks in {_name(self.sink_dtype)}" if self.sink_dtype else "",
            "shared keys" if self.shares_keys else "",
        ]
        return ", ".join(part for part in parts if part)


def variant_fields(
    q: torch.Tensor,
    k: torch.Tensor | None,
    packed_freqs: torch.Tensor,
    sections: torch.Tensor | None,
    interleaved: bool,
    heads_dim: int,
    needs_grad: bool,
) -> dict[str, Any]:
    """Return the attributes of `KernelVariant` that all ops have."""
    return {
        "device": q.device,
        "dtype": q.dtype,
        "key_dtype": q.dtype if k is None else k.dtype,
        "heads": q.shape[heads_dim],
        "key_heads": 0 if k is None else k.shape[heads_dim],
        "head_dim": q.shape[-1],
        "rotary_dim": 2 * (packed_freqs.shape[-1] - 1),
        "interleaved": interleaved,
        "heads_dim": heads_dim,
        "sections": sections is not None,
        "needs_grad": needs_grad,
    }


def norm_fields(weight: torch.Tensor, offset: float, trains_weights: bool) -> dict[str, Any]:
    """Return the attributes that a norm adds."""
    return {
        "weight_dtype": weight.dtype,
        "norm_all_heads": weight.ndim == 2,
        "offset": offset,
        "trains_weights": trains_weights,
    }


def layout_fields(q: torch.Tensor, k: torch.Tensor | None) -> dict[str, Any]:
    """Return the memory layouts of queries and keys."""
    layouts = (x if x is None else _layout(x) for x in (q, k))
    return dict(zip(("q_layout", "k_layout"), layouts, strict=True))


def cache_fields(
    v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> dict[str, Any]:
    """Return the attributes that the write into a cache adds."""
    return {
        "value_dim": v.shape[-1],
        "v_layout": _layout(v),
        "key_cache_layout": _layout(key_cache),
        "value_cache_layout": _layout(value_cache),
    }


def _layout(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), x.stride())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the trial -------------------------------------------------------------------------------------

# Largest error in units of rounding that arithmetic in float32 and one rounding leave. In 16 bits
# the one rounding dominates; in float32 the approximations of cosine, sine and root do.
_LIMITS = {torch.float32: 64.0, torch.float16: 4.0, torch.bfloat16: 4.0}
_RECOMPUTED_LIMIT = 8.0  # the limit of gradients whose input is recomputed from rounded outputs

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

    The truth is the plain torch reference on the CPU, which shares neither the compiler nor the
    device with the kernel. Numbers come from a generator of their own, so no random state changes.
    Gradients are computed without the autograd engine: a backward pass that recomputes activations
    calls ops in a thread of the engine, which would then wait for itself.

    Args:
        variant: What to run.
        batch: Rows of the problem.
        tokens: Tokens of a row.
    """
    if variant.op == MAPPED_ATTENTION:
        return _try_attention(variant, batch)
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


# -- attention -------------------------------------------------------------------------------------

# Keys at their own distance, keys before the queries, and the shifts of far ones, in tokens.
_NEAR, _EARLIER, _FAR_SHIFT = 20, 70, 100_003
_SOFTCAP = 3.0

# Logits and weights are rounded, too, and sums are long.
_ATTENTION_LIMITS = {torch.float32: 64.0, torch.float16: 16.0, torch.bfloat16: 16.0}


def _try_attention(variant: KernelVariant, batch: int) -> list[Comparison]:
    """Run the kernel of attention on a tile of queries, and compare it with float64."""
    from rope_patch.ops.attention_reference import attend
    from rope_patch.ops.kernels import attention, attention_backward

    generator = torch.Generator().manual_seed(_SEED)
    steps = max(1, variant.tile_rows // (variant.heads // variant.key_heads))
    slots = _EARLIER + steps

    def draw(heads: int, tokens: int, dim: int, order: list[int]) -> Any:
        x = torch.randn(batch, heads, tokens, dim, generator=generator, device="cpu")
        return x.to(variant.dtype).permute(order).contiguous().permute(order)

    q = draw(variant.heads, steps, variant.head_dim, [0, 2, 1, 3])
    k, v = (
        draw(variant.key_heads, slots, dim, [0, 1, 2, 3])
        for dim in (variant.head_dim, variant.value_dim)
    )
    sinks = None
    if variant.sink_dtype is not None:
        drawn = torch.randn(variant.heads, generator=generator, device="cpu")
        sinks = drawn.to(variant.sink_dtype)
    regions = _two_regions(variant, steps, slots)
    how: Any = {
        "scaling": variant.head_dim**-0.5,
        "softcap": _SOFTCAP if variant.has_softcap else None,
        "interleaved": variant.interleaved,
    }
    out_grad = draw(variant.heads, steps, variant.value_dim, [0, 2, 1, 3])
    names = ["output", "log-sum-exp", *(f"gradient of {x}" for x in ("q", "k", "v"))]
    with torch.inference_mode(False), torch.enable_grad():
        leaves: Any = [x.double().requires_grad_() for x in (q, k, v)]
        truths = list(attend(leaves[0], leaves[1], leaves[2], regions, sinks=sinks, **how))
        if variant.needs_grad:
            truths += torch.autograd.grad(truths[0], leaves, out_grad.double())
    with torch.inference_mode(False), torch.no_grad():
        inputs = tuple(x.to(variant.device) for x in (q, k, v))
        sinks = None if sinks is None else sinks.to(variant.device)
        here = (regions.to(variant.device), *how.values())
        shares = 2 if variant.shares_keys else 1
        results: Any = attention.launch(*(*inputs, sinks, *here, shares))
        if variant.needs_grad:
            saved: Any = (out_grad.to(variant.device), *inputs, *results, *here)
            results += attention_backward.launch_backward(*saved)[:3]
    limit = _ATTENTION_LIMITS[variant.dtype]
    return [
        Comparison(name, _rounding_error(result, truth.detach(), variant.dtype), limit)
        for name, result, truth in zip(names[: len(truths)], results, truths, strict=True)
    ]


def _two_regions(variant: KernelVariant, steps: int, slots: int) -> Any:
    """Return the last keys of each query unturned, and those before them turned on both sides."""
    from rope_patch.ops.attention_reference import AttentionRegions

    queries, keys = (torch.arange(n, device="cpu") for n in (steps, slots))
    stop = queries + slots - steps + 1
    start = stop - _NEAR
    parts = torch.arange(1, variant.shift_parts + 1, device="cpu")
    query_shift, key_shift = (_FAR_SHIFT + 7 * x[:, None] // parts for x in (queries, keys))
    pairs = torch.arange(variant.rotary_dim // 2, dtype=torch.float64, device="cpu")
    return AttentionRegions(
        torch.stack([start, torch.zeros_like(start)])[None].int(),
        torch.stack([stop, start])[None].int(),
        torch.stack([torch.zeros_like(query_shift), query_shift])[None],
        torch.stack([torch.zeros_like(key_shift), key_shift])[None],
        torch.tensor([0, 1], dtype=torch.int32, device="cpu"),
        pack_frequencies(_THETA ** -(pairs / max(len(pairs), 1))),
    )


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
