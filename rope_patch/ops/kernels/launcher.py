"""Launcher of a Triton kernel that skips Triton's own argument binding on repeated calls.

Triton inspects every argument of every call in Python, which takes longer than the kernel runs for
one token. What it inspects follows from shapes, strides, dtypes and the device, so `Launcher` looks
the compiled kernel up by those. Only pointers that are not aligned to 16 bytes go through Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret

# From this many tokens on, one program a token fills the GPU.
_ONE_PROGRAM_TOKENS = 4096

# Below this many tokens, a program takes half a tile, because one with a whole one runs for longer.
_HALF_TILE_TOKENS = 1024

# Up to this many tokens, a program takes one head, and a thread one pair, so that a thread executes
# few instructions. All threads together execute more, which would cost time with more tokens. With
# norms, each of a program's warps takes a head, so that no warp waits for another one's sum.
_ONE_HEAD_TOKENS = 0 if INTERPRETED else 16  # the interpreter runs programs one after another
_NORMED_HEADS = 4

# Elements of x that a warp has in flight: 16 bytes for each load in 16-bit types, 4 loads.
_ELEMENTS_PER_WARP = 1024

# Warps of a program without norms that takes all heads of a token.
_WIDE_WARPS = 4

# Launches that are remembered: about as many lengths of prompts.
_MAX_LAUNCHES = 1024


@dataclass(frozen=True)
class LaunchSpec:
    """What a kernel is launched with besides its tensors.

    Attributes:
        grid: Programs along each dimension.
        scalars: Arguments that are numbers.
        constexprs: What the kernel is compiled for, in the order of its parameters.
        warps: Warps of a program.
        stages: Stages of a program's loop.
    """

    grid: tuple[int, int, int]
    scalars: tuple[float, ...]
    constexprs: dict[str, Any]
    warps: int = 1
    stages: int = 1


class Launcher:
    """Launches one kernel and remembers the launch for each set of shapes, strides and dtypes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launches: dict[Any, Callable[..., None]] = {}

    def __call__(
        self,
        key: Any,
        tensors: tuple[torch.Tensor, ...],
        address_bits: int,
        make_spec: Callable[..., LaunchSpec],
        *spec_args: Any,
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        Args:
            key: Everything that the spec and Triton's specialisation depend on.
            tensors: The kernel's first arguments.
            address_bits: Bitwise or of the addresses whose alignment matters.
            make_spec: Makes the launch's spec if the key is new.
            *spec_args: Arguments of `make_spec`.
        """
        launch = self._launches.get(key)
        index = tensors[0].device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._launch(launch, key, tensors, address_bits, make_spec, spec_args)
        elif launch is None or address_bits & 15:
            self._launch(launch, key, tensors, address_bits, make_spec, spec_args)
        else:  # the usual case, with as little Python as possible
            launch(index, tensors)

    def forget(self) -> None:
        """Make all launches again, because what they were made by has changed."""
        self._launches.clear()

    def _launch(
        self,
        launch: Any,
        key: Any,
        tensors: tuple[torch.Tensor, ...],
        address_bits: int,
        make_spec: Callable[..., LaunchSpec],
        spec_args: tuple[Any, ...],
    ) -> None:
        if launch is not None and not address_bits & 15:
            launch(tensors[0].device.index, tensors)
            return
        spec = make_spec(*spec_args)
        compiled = self.kernel[spec.grid](
            *tensors,
            *spec.scalars,
            **spec.constexprs,
            num_warps=spec.warps,
            num_stages=spec.stages,
        )
        if not INTERPRETED and not address_bits & 15:
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            args = (*spec.scalars, *spec.constexprs.values())
            self._launches[key] = _bind(compiled, spec.grid, args)


def _bind(
    compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...]
) -> Callable[[int | None, tuple[torch.Tensor, ...]], None]:
    """Return a function that launches a compiled kernel on a device's current stream."""
    # Triton's `compiled[grid](*tensors, *args)` does the same, but describes each launch to hooks.
    # That takes as long as all the rest, though hardly anyone installs a hook.
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    get_stream, hooks = triton.runtime.driver.active.get_current_stream, triton.knobs.runtime

    def launch(index: int | None, tensors: tuple[torch.Tensor, ...]) -> None:
        if _has_calls(hooks.launch_enter_hook) or _has_calls(hooks.launch_exit_hook):
            compiled[grid](*tensors, *args)
            return
        run(*grid, get_stream(index), function, metadata, None, None, None, *tensors, *args)

    return launch


def _has_calls(hook: Any) -> bool:
    """Return whether a hook of Triton's does anything: a chain of functions, a function or None."""
    return bool(getattr(hook, "calls", hook))


def tile_sizes(head_dim: int, rotary_dim: int, heads: int) -> dict[str, int]:
    """Return the size constants of a tile of heads, for kernels that loop over heads."""
    pairs = triton.next_power_of_2(max(rotary_dim // 2, 1))
    unrotated = triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0
    rows = max(_ELEMENTS_PER_WARP // (2 * pairs), 1)
    # Many unrotated dimensions take registers, but 16-byte loads need 8 elements of pairs a thread.
    while (
        rows > 1
        and rows * (2 * pairs + unrotated) > 2.5 * _ELEMENTS_PER_WARP
        and rows * pairs > _ELEMENTS_PER_WARP // 4
    ):
        rows //= 2
    rows = min(rows, triton.next_power_of_2(heads))
    return {"D": head_dim, "R": rotary_dim, "PAIRS": pairs, "UNROTATED": unrotated, "HEADS": rows}


def head_splits(
    tokens: int,
    heads: tuple[int, ...],
    sizes: dict[str, Any],
    *,
    has_norms: bool = False,
    may_widen: bool = False,
) -> tuple[int, int]:
    """Return how many programs share a token, and the warps of each.

    Args:
        tokens: Number of tokens.
        heads: Numbers of heads, where no tile holds heads of two of them.
        sizes: The constants of a tile, which becomes smaller if tokens are few.
        has_norms: Whether heads are normed.
        may_widen: Whether the tile may become larger if tokens are many.
    """
    if tokens >= _ONE_PROGRAM_TOKENS:
        return 1, _widen_tile(sum(heads), sizes) if may_widen else 1
    warps = 1
    if not sizes.get("NORM_ALL_HEADS"):
        # A smaller tile would be narrower than 16 bytes a thread.
        can_halve = sizes["HEADS"] > 1 and sizes["HEADS"] * sizes["PAIRS"] > _ELEMENTS_PER_WARP // 4
        if tokens <= _ONE_HEAD_TOKENS and has_norms:
            sizes["HEADS"] = warps = _NORMED_HEADS
        elif tokens <= _ONE_HEAD_TOKENS:
            sizes["HEADS"], warps = 1, min(max(sizes["PAIRS"] // 32, 1), 4)
        elif tokens < _HALF_TILE_TOKENS and can_halve:
            sizes["HEADS"] //= 2
    return sum(triton.cdiv(count, sizes["HEADS"]) for count in heads), warps


def rows_kind(batch: int, tokens: int) -> str:
    """Return what `tile.row_and_token` is compiled for, by the numbers of rows and their tokens."""
    return "one" if batch == 1 else "of one token" if tokens == 1 else "any"


def _widen_tile(heads: int, sizes: dict[str, Any]) -> int:
    """Double a tile of a program that takes all heads of a token; return the program's warps."""
    if sizes["HEADS"] >= heads:  # one tile of all heads stays
        return 1
    # Each thread of a doubled tile reads 16 bytes of either half of the pairs. Without norms, which
    # sum over a head, that is faster than one warp with a tile of half the size.
    sizes["HEADS"] *= 2
    return min(max(sizes["HEADS"] * sizes["PAIRS"] // (_ELEMENTS_PER_WARP // 4), 1), _WIDE_WARPS)


def strides(x: torch.Tensor, heads_dim: int) -> tuple[int, int, int, int]:
    """Return the strides of batch, token, head and dimension."""
    b, first, second, d = x.stride()
    return (b, first, second, d) if heads_dim == 2 else (b, second, first, d)


def position_strides(positions: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of axis, batch and token, for `[S]`, `[B or 1, S]`, `[A, B or 1, S]`."""
    steps = [0 if size == 1 else s for size, s in zip(positions.shape, positions.stride())]  # noqa: B905
    axis, batch, token = (0, 0, 0, *steps)[-3:]
    return axis, batch, token


def row_stride(packed_freqs: torch.Tensor) -> int:
    """Return the stride of rows of packed frequencies; 0 if all rows share one."""
    is_per_row = packed_freqs.ndim == 2 and packed_freqs.shape[0] > 1
    return packed_freqs.stride(0) if is_per_row else 0
