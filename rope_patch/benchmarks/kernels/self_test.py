"""All kernels at the sizes of real models against float64: a table for a bug report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rope_patch.benchmarks.kernels.problems import SHAPES, Shape
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.ops.self_check import (
    MAPPED_ATTENTION,
    QK_NORM_ROPE,
    QK_NORM_ROPE_INTO_CACHE,
    REROTATE,
    ROPE,
    ROPE_INTO_CACHE,
    KernelVariant,
    describe_device,
    describe_versions,
    run_trial,
)
from rope_patch.utils.errors import Refused, describe_error
from rope_patch.utils.installation import install_hint

OK, WRONG, NOT_COMPILED, NOT_RUN = "ok", "wrong", "did not compile", "did not run"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Rows and tokens. From about a thousand tokens on, one program takes all heads of a token; Triton's
# interpreter would take minutes for these.
_SIZES = ((2, 3), (1, 1030))

# What the benchmark's shapes do not have: 64 dimensions; neighbours and a rotated half; positions
# on several axes; all heads of a token normed together.
_OTHER_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"heads": 32, "key_heads": 8, "head_dim": 64},
    "glm-4-9b": {"heads": 32, "key_heads": 2, "rotary_dim": 64, "interleaved": True},
    "qwen2-vl-7b": {"heads": 28, "key_heads": 4, "sections": True},
    "olmo-2-7b": {"op": QK_NORM_ROPE, "heads": 32, "key_heads": 32, "norm_all_heads": True},
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        kernel: The op and what it does.
        shape: The model whose heads it gets, and the tokens.
        dtype: Of queries, keys and weights.
        error: Largest error in units of rounding: half the spacing of the dtype's numbers at the
            largest number of the same head. None: the kernel did not run.
        limit: Largest error that is right.
        verdict: "ok", "wrong", "did not compile" or "did not run".
        problem: What is wrong.
    """

    kernel: str
    shape: str
    dtype: str
    error: float | None
    limit: float | None
    verdict: str
    problem: str = ""


@dataclass(frozen=True)
class SelfTest:
    """All lines, and where they were measured."""

    device: str
    versions: str
    rows: tuple[Row, ...]

    @property
    def is_ok(self) -> bool:
        """Return whether all kernels are right."""
        return all(row.verdict == OK for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the test as JSON values."""
        return {"ok": self.is_ok, **asdict(self)}

    def as_text(self) -> str:
        """Return the table in Markdown, with what failed below it."""
        lines = [
            f"Self-test of rope_patch's kernels on {self.device}",
            self.versions,
            "",
            "| kernel | shape | dtype | largest error, in units of rounding | allowed | |",
            "|:--|:--|:--|--:|--:|:--|",
        ]
        for row in self.rows:
            numbers = ["" if x is None else f"{x:.3g}" for x in (row.error, row.limit)]
            cells = (row.kernel, row.shape, row.dtype, *numbers, row.verdict)
            lines.append(f"| {' | '.join(cells)} |")
        failed = [row for row in self.rows if row.verdict != OK]
        lines += ["", f"{len(self.rows) - len(failed)} of {len(self.rows)} are right."]
        lines += [f"- {r.kernel}, {r.shape}, {r.dtype}: {r.problem}" for r in failed]
        return "\n".join(lines)


def run_self_test(shapes: tuple[str, ...] = (), dtypes: tuple[torch.dtype, ...] = ()) -> SelfTest:
    """Run all kernels on this machine's GPU, or in Triton's interpreter.

    Args:
        shapes: Names of models; all if empty.
        dtypes: All that the kernels take if empty.

    Raises:
        Refused: There is no GPU, no interpreter or no Triton, or a shape is unknown.
    """
    device = _choose_device()
    models = _models()
    if unknown := [name for name in shapes if name not in models]:
        raise Refused(f"the self-test has no shape {unknown[0]!r}: choose from {', '.join(models)}")
    sizes = _SIZES if device.type == "cuda" else _SIZES[:1]
    rows = [
        _test(kernel, f"{name}, {batch} x {tokens}", variant, batch, tokens)
        for name in shapes or models
        for dtype in dtypes or _DTYPES
        for kernel, variant in _variants(models[name], device, dtype)
        for batch, tokens in sizes
    ]
    return SelfTest(describe_device(device), describe_versions(), tuple(rows))


def _choose_device() -> torch.device:
    if problem := triton_unavailable_reason():
        raise Refused(
            f"the self-test runs Triton's kernels, but {problem[0].lower()}{problem[1:]}: install "
            f"it ({install_hint('kernels')})"
        )
    if is_interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused(
            "the self-test runs Triton's kernels, and torch finds no GPU here: run it on a machine "
            "with one, or set TRITON_INTERPRET=1 to interpret the kernels on this CPU, in a minute"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _models() -> dict[str, dict[str, Any]]:
    """Return the attributes of `KernelVariant` by the model's name."""
    return {name: _sizes_of(shape) for name, shape in SHAPES.items()} | _OTHER_MODELS


def _sizes_of(shape: Shape) -> dict[str, Any]:
    return {
        "op": QK_NORM_ROPE if shape.norm else ROPE,
        "heads": shape.heads,
        "key_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "offset": shape.offset,
    }


def _variants(
    model: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, KernelVariant]]:
    """Yield all kernels of a model, named, in the layout of its projections."""
    head_dim = model.get("head_dim", 128)
    settings: Any = {"op": ROPE, "head_dim": head_dim, "rotary_dim": head_dim, "heads_dim": 1}
    settings |= {"device": device, "dtype": dtype, "key_dtype": dtype, "weight_dtype": dtype}
    forward = KernelVariant(**(settings | model))
    backward = replace(forward, needs_grad=True)
    yield forward.op, forward
    yield f"{forward.op} in place", replace(forward, inplace=True)
    yield f"{forward.op} backward", backward
    if forward.op == QK_NORM_ROPE:
        trained = replace(backward, trains_weights=True)
        yield f"{forward.op} backward, weights", trained
        yield f"{forward.op} backward from outputs", replace(trained, recompute_input=True)
    elif not forward.sections:
        keys = replace(forward, op=REROTATE, heads=forward.key_heads, key_heads=0)
        yield REROTATE, keys
        yield f"{REROTATE}, several layers", replace(keys, several_layers=True)
    op = QK_NORM_ROPE_INTO_CACHE if forward.has_norms else ROPE_INTO_CACHE
    yield op, replace(forward, op=op, value_dim=head_dim)
    if not forward.sections and device.type == "cuda":  # the interpreter would take minutes
        mapped: Any = {"op": MAPPED_ATTENTION, "value_dim": head_dim, "norm_all_heads": False}
        yield MAPPED_ATTENTION, replace(backward, tile_rows=128, **mapped)
        step = replace(forward, tile_rows=16, shares_keys=True, **mapped)
        yield f"{MAPPED_ATTENTION}, a step", step


def _test(kernel: str, shape: str, variant: KernelVariant, batch: int, tokens: int) -> Row:
    name = str(variant.dtype).removeprefix("torch.")
    try:
        comparisons = run_trial(variant, batch=batch, tokens=tokens)
    except Exception as error:  # a compiler or a driver can raise anything
        from_compiler = any(cls.__module__.startswith("triton.") for cls in type(error).__mro__)
        verdict = NOT_COMPILED if from_compiler else NOT_RUN
        return Row(kernel, shape, name, None, None, verdict, describe_error(error))
    worst = max(comparisons, key=lambda comparison: comparison.error / comparison.limit)
    problem = "" if worst.is_right else f"{worst.name} is off by {worst.error:.3g}"
    verdict = OK if worst.is_right else WRONG
    return Row(kernel, shape, name, worst.error, worst.limit, verdict, problem)
