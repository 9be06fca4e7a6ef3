"""Benchmark problems: queries and keys of well-known models, and their rotation in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

VIEWS = "views"
PACKED = "packed"
BHSD = "bhsd-gradients"
LAYOUTS = {
    VIEWS: "queries and keys as transposed views of what two projections wrote, gradients too",
    PACKED: "queries and keys as slices of what one packed projection wrote",
    BHSD: "as views, but gradients are contiguous in [B, H, S, D], as eager attention makes them",
}

_DECODED_AT = 4096  # position of the token in problems of a single one
_SEED = 0
_WEIGHT_STD = 0.1  # standard deviation of norm weights, whose mean is 1

# Largest relative error against float64, by dtype: a few times its rounding and that of cos and
# sin. In float32 transformers' angles, products in that precision, are off by more than rounding.
TOLERANCES = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}

_CHUNK_ELEMENTS = 2**24  # elements that exist in float64 at once


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The heads of one model.

    Attributes:
        name: Name in `--shapes`.
        family: The model's folder in transformers.
        heads: Query heads, H.
        key_heads: Key heads, K.
        head_dim: D, all of which rotates.
        layers: Layers of the whole model.
        theta: Base of the rotation.
        norm: transformers' class for the norm of each head before the rotation; None: no norm.
        offset: Added to the norm's weight.
        eps: Added to the mean of squares.
    """

    name: str
    family: str
    heads: int
    key_heads: int
    head_dim: int
    layers: int
    theta: float
    norm: str | None = None
    offset: float = 0.0
    eps: float = 1e-6

    def __str__(self) -> str:
        operation = "norm and rotation" if self.norm else "rotation"
        return (
            f"{self.name}: {operation} of {self.heads} + {self.key_heads} heads of {self.head_dim}"
        )

    def inv_freq(self) -> torch.Tensor:
        """Return radians per token, float32 `[D / 2]`."""
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1.0 / self.theta**steps


_LLAMA = Shape(
    name="llama-3-8b",
    family="llama",
    heads=32,
    key_heads=8,
    head_dim=128,
    layers=32,
    theta=5e5,
)
_QWEN = Shape(
    name="qwen3-8b",
    family="qwen3",
    heads=32,
    key_heads=8,
    head_dim=128,
    layers=36,
    theta=1e6,
    norm="Qwen3RMSNorm",
)
_GEMMA = Shape(
    name="gemma-3-12b",
    family="gemma3",
    heads=16,
    key_heads=8,
    head_dim=256,
    layers=48,
    theta=1e6,
    norm="Gemma3RMSNorm",
    offset=1.0,
)
SHAPES = {shape.name: shape for shape in (_LLAMA, _QWEN, _GEMMA)}


@dataclass(frozen=True)
class Sample:
    """One set of input tensors, `[B, S, H, D]` each, with their strides.

    Attributes:
        q: Queries.
        k: Keys.
        grads: Gradients of both outputs, `[B, H, S, D]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor]

    def clone(self) -> Sample:
        """Return a copy with the same layout, for implementations that work in place."""
        q, k, *grads = map(_clone_layout, (self.q, self.k, *self.grads))
        return Sample(q.requires_grad_(), k.requires_grad_(), (grads[0], grads[1]))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One shape at one size, with the tensors that its samples share."""

    shape: Shape
    batch: int
    length: int
    layout: str
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Return the bytes of queries and keys, N; reading and writing them moves twice as many."""
        heads = self.shape.heads + self.shape.key_heads
        return self.batch * self.length * heads * self.shape.head_dim * self.dtype.itemsize

    @cached_property
    def inv_freq(self) -> torch.Tensor:
        """Return `Shape.inv_freq` on the device."""
        return self.shape.inv_freq().to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Return the positions, int64 `[1, S]`."""
        start = _DECODED_AT if self.length == 1 else 0
        return torch.arange(start, start + self.length, device=self.device)[None]

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[1, S, D]`, as transformers computes and rounds them."""
        angles = self.positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @cached_property
    def packed_freqs(self) -> torch.Tensor:
        """Return the packed frequencies, which our ops take instead."""
        from rope_patch.ops.angles import pack_frequencies

        return pack_frequencies(self.inv_freq)

    @cached_property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """Return the weights of the query and key norms; empty without norms."""
        if self.shape.norm is None:
            return ()
        generator = torch.Generator().manual_seed(_SEED)
        size = (2, self.shape.head_dim)
        values = 1 - self.shape.offset + _WEIGHT_STD * torch.randn(size, generator=generator)
        rows = values.to(self.device, self.dtype).unbind()
        return tuple(torch.nn.Parameter(row.clone()) for row in rows)

    def sample(self, seed: int) -> Sample:
        """Draw queries, keys and gradients."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape, dims = self.shape, (self.batch, self.length)
        heads = (shape.heads, shape.key_heads)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        if self.layout == PACKED:
            qkv = draw(*dims, shape.heads + 2 * shape.key_heads, shape.head_dim)
            q, k, _ = qkv.split((*heads, shape.key_heads), dim=2)
        else:
            q, k = (draw(*dims, n, shape.head_dim) for n in heads)
        if self.layout == BHSD:
            grads = [draw(self.batch, n, self.length, shape.head_dim) for n in heads]
        else:
            grads = [draw(*dims, n, shape.head_dim).transpose(1, 2) for n in heads]
        return Sample(
            q.detach().requires_grad_(), k.detach().requires_grad_(), (grads[0], grads[1])
        )


def _clone_layout(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, also of a slice; its gaps stay uninitialised."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    base = torch.empty(max(extent, 0), dtype=x.dtype, device=x.device)
    return base.as_strided(x.shape, x.stride()).copy_(x.detach())


def samples_needed(problem: Problem, cache: int) -> int:
    """Return how many samples, used in turn, keep each one out of a cache of that size."""
    return min(max(math.ceil(4 * cache / problem.bytes), 1), 8)


def relative_errors(
    problem: Problem,
    sample: Sample,
    rotated: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Return relative errors, ‖got − right‖ / ‖right‖, of outputs and gradients by name.

    Args:
        problem: The problem.
        sample: The rotated tensors.
        rotated: Both outputs, `[B, H, S, D]`.
        gradients: Gradients of queries, keys and, if any, the weights; empty to compare none.

    Returns:
        Errors of `q`, `k`, `dq`, `dk`, and of `dw` for both weights together.
    """
    squared_errors: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)

    def compare(name: str, actual: torch.Tensor, exact: torch.Tensor | None) -> None:
        assert exact is not None  # backward has run
        if actual.shape != exact.shape:
            raise ValueError(f"{name} is {list(actual.shape)}, expected {list(exact.shape)}")
        squared_errors[name] += float((actual.double() - exact).square().sum())
        size[name] += float(exact.square().sum())

    weights = [weight.detach().double().requires_grad_() for weight in problem.weights]
    for tokens, heads, out in _exact_chunks(problem, sample, weights):
        for i, name in enumerate("qk"):
            compare(name, rotated[i].detach()[:, :, tokens], out[i])
            if gradients:
                compare(f"d{name}", gradients[i][:, tokens], heads[i].grad)
    for gradient, weight in zip(
        gradients[2:], weights, strict=False
    ):  # frozen weights have no gradients
        compare("dw", gradient, weight.grad)
    return {name: (squared_errors[name] / size[name]) ** 0.5 for name in squared_errors}


def _exact_chunks(
    problem: Problem, sample: Sample, weights: Sequence[torch.Tensor]
) -> Iterator[tuple[slice, list[torch.Tensor], list[torch.Tensor]]]:
    """Yield chunks of the sequence: tokens, exact inputs with gradients, exact outputs."""
    shape = problem.shape
    angles = problem.positions[0, :, None].double() * problem.inv_freq.double()
    step = max(1, _CHUNK_ELEMENTS // (problem.batch * shape.heads * shape.head_dim))
    for start in range(0, problem.length, step):
        tokens = slice(start, start + step)
        heads = [x.detach()[:, tokens].double().requires_grad_() for x in (sample.q, sample.k)]
        cos, sin = angles[tokens].cos(), angles[tokens].sin()
        out = []
        for i, x in enumerate(heads):
            if weights:
                scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.eps)
                x = x * scale * (weights[i] + shape.offset)
            first, second = x.transpose(1, 2).chunk(2, dim=-1)
            out.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        grads = [grad[:, :, tokens].double() for grad in sample.grads]
        torch.autograd.backward(out, grads)
        yield tokens, heads, [x.detach() for x in out]
