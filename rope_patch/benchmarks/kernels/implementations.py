"""Built-in implementations: transformers' own code, eager and compiled, and ours."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_patch.benchmarks.kernels.problems import Problem, Shape
from rope_patch.evaluation.report.table import one_line
from rope_patch.transformers_api.models import model_file

# Takes queries and keys `[B, S, H, D]`, returns both rotated `[B, H, S, D]`, for attention.
Call = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


_MAX_REASON = 160  # characters of a reason


class Unavailable(Exception):
    """The reason why an implementation cannot be measured here."""


def describe_error(error: Exception) -> str:
    """Return an error as one line for the results."""
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    first = next(iter(str(error).strip().splitlines()), "")
    return one_line(f"{type(error).__name__}: {first}")[:_MAX_REASON]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to rotate.

    Attributes:
        name: Name in `--contenders`.
        title: Name in the report.
        build: Returns the call for a problem; raises `Unavailable` or ImportError if it cannot.
        in_place: Whether it overwrites its inputs, so that it gets fresh ones every time.
        frozen: Whether it lacks gradients of the norms' weights.
    """

    name: str
    title: str
    build: Callable[[Problem], Call]
    in_place: bool = False
    frozen: bool = False


def builtin_implementations() -> list[Implementation]:
    """Return the implementations that need no other package."""
    return [
        Implementation(name="hf", title="HF eager", build=_transformers),
        Implementation(name="hf-compile", title="HF, torch.compile", build=_compiled),
        Implementation(name="ours", title="rope_patch, exact angles", build=_ours),
        Implementation(
            name="ours-output",
            title="rope_patch, exact angles, output saved",
            build=_ours_from_output,
        ),
        Implementation(
            name="ours-frozen",
            title="rope_patch, exact angles, frozen weights",
            build=_ours_with_frozen_weights,
            frozen=True,
        ),
        Implementation(
            name="ours-tables", title="rope_patch, cos and sin given", build=_ours_from_cos_sin
        ),
        Implementation(
            name="ours-inplace",
            title="rope_patch, cos and sin given, in place",
            build=_ours_in_place,
            in_place=True,
        ),
        Implementation(name="ours-reference", title="rope_patch, reference", build=_reference),
    ]


def auto_implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Return the implementation that `kernels="auto"` uses on a device."""
    from rope_patch.ops.dispatch import use_triton

    if device.type == "cpu":
        return "ours-tables"
    return "ours" if use_triton(torch.empty(0, device=device, dtype=dtype)) else "hf"


def _transformers(problem: Problem) -> Call:
    modeling = _modeling(problem)
    rotate, norms = modeling.apply_rotary_pos_emb, _norms(problem, modeling)
    cos, sin = problem.cos_sin

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return _norm_and_rotate(norms, rotate, q, k, cos, sin)

    return call


def _modeling(problem: Problem) -> Any:
    family = problem.shape.family
    return model_file(family)


def _norms(problem: Problem, modeling: Any) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return transformers' norms of the query and key heads."""
    if problem.shape.norm is None:
        return [_identity] * 2
    modules = []
    for weight in problem.weights:
        module = getattr(modeling, problem.shape.norm)(problem.shape.head_dim, problem.shape.eps)
        module.weight = weight
        modules.append(module)
    return modules


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _compiled(problem: Problem) -> Call:
    """Return transformers' code, compiled once for all lengths of more than one token."""
    compiled, modeling = _compiled_for(problem.shape), _modeling(problem)
    norms, rotate = _norms(problem, modeling), modeling.apply_rotary_pos_emb
    cos, sin = problem.cos_sin
    unmarked = [cos, sin] * (problem.length > 1)  # a single token has a graph of its own

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        while unmarked:
            for x in (q, k, unmarked.pop()):
                torch._dynamo.maybe_mark_dynamic(x, 1)
        return compiled(norms, rotate, q, k, cos, sin)

    return call


@contextlib.contextmanager
def user_inductor_cache() -> Iterator[None]:
    """Keep Inductor's compiled code in the user's cache, which outlives /tmp."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ[name] = str(root / "rope_patch" / "inductor")
    try:
        yield
    finally:
        del os.environ[name]


@functools.lru_cache(maxsize=1)
def _compiled_for(shape: Shape) -> Callable[..., Any]:
    """Return the compiled function of a shape; the previous shape's graphs are dropped."""
    torch._dynamo.reset()
    # A graph break, or more recompilations than torch allows, must not be timed as compiled code.
    return torch.compile(_norm_and_rotate, fullgraph=True)


def _norm_and_rotate(
    norms: list[Any],
    rotate: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Any:
    return rotate(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)


def _ours(problem: Problem) -> Call:
    from rope_patch import ops

    return _bind_op(problem, ops.qk_norm_rope if problem.weights else ops.rope, kernels=_kernels())


def _ours_from_output(problem: Problem) -> Call:
    from rope_patch import ops

    if not problem.weights:
        raise Unavailable("a rotation without a norm saves neither input nor output")
    return _bind_op(problem, ops.qk_norm_rope, save="output", kernels=_kernels())


def _ours_with_frozen_weights(problem: Problem) -> Call:
    from rope_patch import ops

    if not problem.weights:
        raise Unavailable("a rotation has no weights")
    frozen = tuple(weight.detach() for weight in problem.weights)
    return _bind_op(problem, ops.qk_norm_rope, weights=frozen, kernels=_kernels())


def _kernels() -> str:
    """Return the `kernels` that a user gets; "triton" in Triton's interpreter, to check it."""
    from rope_patch.ops.dispatch import is_interpreted

    return "triton" if is_interpreted() else "auto"


def _reference(problem: Problem) -> Call:
    from rope_patch.ops import reference

    return _bind_op(problem, reference.qk_norm_rope if problem.weights else reference.rope)


def _bind_op(
    problem: Problem,
    op: Callable[..., Any],
    weights: tuple[torch.Tensor, ...] | None = None,
    **options: Any,
) -> Call:
    """Return a call of one of our ops, which take positions and packed frequencies."""
    if problem.weights:
        options |= {"eps": problem.shape.eps, "offset": problem.shape.offset}
    op_inputs = (
        *(problem.weights if weights is None else weights),
        problem.positions,
        problem.packed_freqs,
    )

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        return op(q.transpose(1, 2), k.transpose(1, 2), *op_inputs, heads_dim=1, **options)

    return call


def _ours_in_place(problem: Problem) -> Call:
    """Rotate over the input, as `inplace=True` does; its backward is that of ours-tables."""
    from rope_patch.ops.plain_torch import rope_from_cos_sin

    if problem.device.type != "cpu":
        raise Unavailable("it is measured on a CPU only")
    norms = _norms(problem, _modeling(problem))
    cos, sin = problem.cos_sin

    class Rotation(torch.autograd.Function):
        """Rotate leaves in their own memory, which autograd alone refuses."""

        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
            q, k = q.detach(), k.detach()
            # `may_overwrite` acts on large inputs: a single token is copied first.
            return rope_from_cos_sin(q, k, cos, sin, heads_dim=1, may_overwrite=True)

        @staticmethod
        def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Any:
            return rope_from_cos_sin(dq, dk, cos, -sin, heads_dim=1)

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        q, k = (norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
        return Rotation.apply(q, k)

    return call


def _ours_from_cos_sin(problem: Problem) -> Call:
    from rope_patch.ops.plain_torch import rope_from_cos_sin

    norms = _norms(problem, _modeling(problem))  # on a CPU a model keeps its own norms
    cos, sin = problem.cos_sin

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        q, k = (norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
        return rope_from_cos_sin(q, k, cos, sin, heads_dim=1)

    return call
