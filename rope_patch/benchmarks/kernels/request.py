"""What a kernel benchmark measures: the request, its defaults by device, and its problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rope_patch.benchmarks.kernels.ground_truth import TOLERANCES
from rope_patch.benchmarks.kernels.implementations import Implementation
from rope_patch.benchmarks.kernels.shapes import BHSD, PACKED, SHAPES, VIEWS, Problem

_LENGTHS = {"cuda": (1, 1024, 8192, 131072), "cpu": (1, 128, 1024)}
_DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
_REPEATS = {"cuda": 10, "cpu": 5}
_BATCHES = (1,)
_LAYOUTS_MAX_LENGTH = 8192  # tokens; the layouts are compared at the longest length up to there

# Contenders that a GPU measures only if they are named: what no GPU rotates by, and what tunes
# itself for longer than all others are measured.
_LEFT_OUT = {"cuda": ("ours-tables", "ours-reference", "fla"), "cpu": ()}

# Sizes that a run names where the default leaves them out.
ALL_LENGTHS = (1, 128, 1024, 8192, 32768, 131072)
_ALL_BATCHES = (1, 4)


@dataclass(frozen=True, kw_only=True)
class KernelBenchRequest:
    """Request of a benchmark; None chooses by device.

    Attributes:
        shapes: Names from `SHAPES`.
        lengths: Lengths in tokens; 1 is a decode step.
        batches: Batch sizes.
        dtype: torch's name of a dtype; "auto" is bfloat16 on a GPU and float32 on a CPU.
        repeats: Repeats of every timing.
        contenders: Names of implementations; None means all, without slow ones on a GPU.
        rivals: Folder with the files of third-party implementations.
        steps: Whether to measure whole models, too, and to count their launches.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    dtype: str = "auto"
    repeats: int | None = None
    contenders: tuple[str, ...] | None = None
    rivals: Path | None = None
    steps: bool = True


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """A request with everything chosen; the attributes are `KernelBenchRequest`'s."""

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: str
    repeats: int
    contenders: tuple[str, ...]
    rivals: Path | None
    steps: bool

    def problems(self, shape: str, device: torch.device) -> Iterator[Problem]:
        """Yield every size of a shape in the default layout, and the other layouts at one size."""
        middle = [n for n in self.lengths if 1 < n <= _LAYOUTS_MAX_LENGTH][-1:]
        sizes = [(batch, length, VIEWS) for batch in self.batches for length in self.lengths]
        sizes += [
            (self.batches[0], length, layout) for length in middle for layout in (PACKED, BHSD)
        ]
        for batch, length, layout in sizes:
            yield Problem(
                shape=SHAPES[shape],
                batch=batch,
                length=length,
                layout=layout,
                dtype=self.torch_dtype,
                device=device,
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype of queries and keys."""
        return getattr(torch, self.dtype)


def choose_settings(
    request: KernelBenchRequest, device_type: str, contenders: list[Implementation]
) -> BenchSettings:
    """Return a request with everything chosen.

    Args:
        request: The request.
        device_type: "cuda" or "cpu".
        contenders: All implementations.

    Raises:
        ValueError: The request cannot be met.
    """
    _validate(request, contenders)
    names = request.contenders
    if names is None:
        names = tuple(c.name for c in contenders if c.name not in _LEFT_OUT[device_type])
    return BenchSettings(
        shapes=tuple(dict.fromkeys(request.shapes)),
        lengths=tuple(sorted(set(request.lengths or _LENGTHS[device_type]))),
        batches=tuple(sorted(set(request.batches or _BATCHES))),
        dtype=_DTYPES[device_type] if request.dtype == "auto" else request.dtype,
        repeats=request.repeats or _REPEATS[device_type],
        contenders=tuple(c.name for c in contenders if c.name in names),
        rivals=request.rivals,
        steps=request.steps,
    )


def case_of(problem: Problem) -> dict[str, Any]:
    """Return the entries of a case's results that say which problem it is."""
    return {
        "shape": problem.shape.name,
        "batch": problem.batch,
        "length": problem.length,
        "layout": problem.layout,
        "bytes": problem.bytes,
    }


def left_out(request: KernelBenchRequest) -> list[str]:
    """Return what the defaults leave out on a GPU, as the options that add it."""
    options = []
    if request.lengths is None:
        options.append(f"--lengths {','.join(map(str, ALL_LENGTHS))}")
    if request.batches is None:
        options.append(f"--batch {','.join(map(str, _ALL_BATCHES))}")
    if request.contenders is None:
        options.append(f"--contenders {','.join(_LEFT_OUT['cuda'])}")
    return options


def _validate(request: KernelBenchRequest, contenders: list[Implementation]) -> None:
    """Raise ValueError if the request cannot be met."""
    choices = {
        "shapes": (request.shapes, list(SHAPES)),
        "contenders": (request.contenders or (), [c.name for c in contenders]),
        "dtype": ((request.dtype,), ["auto", *(str(d).removeprefix("torch.") for d in TOLERANCES)]),
    }
    for name, (values, names) in choices.items():
        if unknown := [x for x in values if x not in names]:
            raise ValueError(f"{name} must be of {', '.join(names)}; got {', '.join(unknown)}")
    for name, numbers in (("lengths", request.lengths), ("batches", request.batches)):
        if numbers is not None and (not numbers or min(numbers) < 1):
            raise ValueError(f"{name} must be whole numbers of at least 1, got {numbers}")
    if request.repeats is not None and request.repeats < 1:
        raise ValueError(f"repeats must be a whole number of at least 1, got {request.repeats}")
    if request.rivals is not None and not request.rivals.is_dir():
        raise ValueError(f"rivals must be a folder, got {request.rivals}")
