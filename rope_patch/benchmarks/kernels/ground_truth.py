"""Ground truth: norm and rotation in float64 with exact angles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from rope_patch.benchmarks.kernels.shapes import Problem, Sample

# Largest relative error against float64, by dtype: a few times its rounding and that of cos and
# sin. In float32 transformers' angles, products in that precision, are off by more than rounding.
TOLERANCES = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}

_CHUNK_ELEMENTS = 2**24  # elements in float64 at once


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
