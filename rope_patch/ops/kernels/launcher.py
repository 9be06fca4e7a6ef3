"""How a kernel is started: its tile, its grid, and its launch found again without Triton's binder.

Triton looks at every argument of every call anew, in Python, which at one token takes longer than
the kernel runs. What it looks at follows from shapes, strides, types and device, so here the
compiled kernel is looked up by those, and only calls with pointers that are not aligned to 16 bytes
go the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret

# Tokens from which on there are enough of them to give each a single program.
_MANY = 1024

# Elements of x that a warp has in flight: 16 bytes for each load in 16-bit types, 4 of them.
_PER_WARP = 1024


@dataclass(frozen=True)
class Plan:
    """What a kernel is launched with beside its tensors.

    Attributes:
        grid: Programs along each dimension.
        numbers: Arguments that are no tensors.
        constants: What the kernel is compiled for, in the order of its parameters.
        warps: Warps of a program.
    """

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    warps: int = 1


class Launcher:
    """Starts one kernel; remembers how for each set of shapes, strides and types."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def __call__(
        self,
        key: Any,
        tensors: tuple[torch.Tensor, ...],
        bits: int,
        plan: Callable[..., Plan],
        *about: Any,
    ) -> None:
        """Launches on the current stream of the first tensor's device.

        Args:
            key: All that the plan and Triton's specialisation follow from.
            tensors: The kernel's first arguments.
            bits: The addresses of those whose alignment matters, or-ed together.
            plan: Makes the plan, where the key is new.
            *about: What it makes the plan of.
        """
        known = self._known.get(key)
        index = tensors[0].device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._launch(known, key, tensors, bits, plan, about)
        elif known is None or bits & 15:
            self._launch(known, key, tensors, bits, plan, about)
        else:  # the usual way, with as little Python as can be
            known[0](*tensors, *known[1])

    def _launch(
        self,
        known: Any,
        key: Any,
        tensors: tuple[torch.Tensor, ...],
        bits: int,
        plan: Callable[..., Plan],
        about: tuple[Any, ...],
    ) -> None:
        if known is not None and not bits & 15:
            known[0](*tensors, *known[1])
            return
        p = plan(*about)
        started = self.kernel[p.grid](
            *tensors, *p.numbers, **p.constants, num_warps=p.warps, num_stages=1
        )
        if not INTERPRETED and not bits & 15:
            if len(self._known) >= 1024:  # as many lengths of prompts were seen
                self._known.clear()
            self._known[key] = (started[p.grid], (*p.numbers, *p.constants.values()))


def tile(head_dim: int, rotary_dim: int, heads: int) -> dict[str, int]:
    """The constants of a tile of heads, for kernels that loop over them."""
    pairs = triton.next_power_of_2(max(rotary_dim // 2, 1))
    tail = triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0
    rows = max(_PER_WARP // (2 * pairs), 1)
    # A long tail takes registers, but the pairs need 8 elements a thread for 16-byte loads.
    while rows * (2 * pairs + tail) > 2.5 * _PER_WARP and rows * pairs > _PER_WARP // 4:
        rows //= 2
    rows = min(rows, triton.next_power_of_2(heads))
    return {"D": head_dim, "R": rotary_dim, "PAIRS": pairs, "TAIL": tail, "HEADS": rows}


def shares(tokens: int, heads: int, tile_heads: int) -> int:
    """How many programs a token's heads are spread over: all they can be where tokens are few."""
    return 1 if tokens >= _MANY else triton.cdiv(heads, tile_heads)


def strides(x: torch.Tensor, heads_dim: int) -> tuple[int, int, int, int]:
    """Of batch, token, head and dimension."""
    b, first, second, d = x.stride()
    return (b, first, second, d) if heads_dim == 2 else (b, second, first, d)


def position_strides(positions: torch.Tensor) -> tuple[int, int, int]:
    """Of axis, batch and token, for `[S]`, `[B or 1, S]` and `[A, B or 1, S]`."""
    given = [0 if size == 1 else s for size, s in zip(positions.shape, positions.stride())]  # noqa: B905
    axis, batch, token = (0, 0, 0, *given)[-3:]
    return axis, batch, token


def row_stride(turns: torch.Tensor) -> int:
    """Of the rows of turns; 0 where they are one for all."""
    return turns.stride(0) if turns.ndim == 2 and turns.shape[0] > 1 else 0
