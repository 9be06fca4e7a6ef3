"""Sum of the weights' gradients over the programs of a backward kernel, in one launch.

The rows are always added in the same order, so equal inputs have equal gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rope_patch.ops.kernels.launcher import INTERPRETED, Launcher, LaunchSpec

_ELEMENTS = 4096  # that a program reads at once: 16 KB
_WARPS = 8

# Columns of a program: few where all are few, so that many programs read.
_NARROW, _FEW_COLUMNS, _MANY_COLUMNS = 2048, 4, 16
if INTERPRETED:  # the interpreter runs programs one after another
    _FEW_COLUMNS = _MANY_COLUMNS = 64


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    weight_grads, q_sum, k_sum, programs, q_size, k_size, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the programs' rows (grid: groups of columns)."""
    size = q_size + k_size
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        valid = (row < programs)[:, None] & (column < size)[None, :]
        at = weight_grads + row[:, None].to(tl.int64) * size + column[None, :]
        total += tl.load(at, mask=valid, other=0.0)
    sums = tl.sum(total, axis=0)
    is_q = column < q_size
    tl.store(q_sum + column, sums.to(q_sum.dtype.element_ty), mask=is_q)
    is_k = (column >= q_size) & (column < size)
    tl.store(k_sum + column - q_size, sums.to(k_sum.dtype.element_ty), mask=is_k)


_launcher = Launcher(sum_kernel)


def sum_programs(
    partial_sums: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of both weights, in their shapes and dtypes.

    Args:
        partial_sums: A row for each program, float32 `[programs, weights of q and then of k]`.
        q_weight: The weight of queries.
        k_weight: The weight of keys.
    """
    if not len(partial_sums):
        return torch.zeros_like(q_weight), torch.zeros_like(k_weight)
    sums = torch.empty_like(q_weight), torch.empty_like(k_weight)
    sizes = (len(partial_sums), q_weight.numel(), k_weight.numel())
    key = (*sizes, q_weight.dtype, k_weight.dtype, partial_sums.device)
    _launcher(key, (partial_sums, *sums), 0, _make_spec, sizes)
    return sums


def _make_spec(sizes: tuple[int, int, int]) -> LaunchSpec:
    width = sizes[1] + sizes[2]
    columns = _FEW_COLUMNS if width <= _NARROW else _MANY_COLUMNS
    tile = {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}
    return LaunchSpec((triton.cdiv(width, columns), 1, 1), sizes, tile, _WARPS)
