"""Choose tiles, warps and stages by a table of what was measured on a class of devices.

The table, `launch_choices.json`, has a list of rows for each class, such as "sm_90". A launch that
no row fits keeps the rules of `launcher.head_splits`. `python -m rope_patch.benchmarks tiles`
measures rows; `Row` says what they hold.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

TABLE = Path(__file__).with_name("launch_choices.json")


@dataclass(frozen=True)
class LaunchChoice:
    """How a kernel is launched.

    Attributes:
        tile: Heads of a tile; a power of two.
        splits: Whether each tile has a program of its own, or one program takes all of a token.
        warps: Warps of a program.
        stages: Stages of a program's loop.
    """

    tile: int
    splits: bool
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        kernel: "rope" or "qk_norm_rope".
        heads: Heads of queries, and of keys.
        head_dim: Dimensions of a head, all of which rotate.
        dtype: torch's name of the dtype.
        above: Tokens above which the choice holds.
        up_to: Tokens up to which it holds; the number that was measured.
        choice: The choice.
    """

    kernel: str
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    above: int
    up_to: int
    choice: LaunchChoice


_forced: LaunchChoice | None = None


@contextlib.contextmanager
def force_choice(choice: LaunchChoice | None, launchers: tuple[Any, ...]) -> Iterator[None]:
    """Launch by one choice in this context; None changes nothing. For measurements.

    Args:
        choice: The choice.
        launchers: Launchers whose remembered launches must be made again, before and after.
    """
    global _forced
    for launcher in launchers:
        launcher.forget()
    _forced = choice
    try:
        yield
    finally:
        _forced = None
        for launcher in launchers:
            launcher.forget()


def device_class(device: torch.device) -> str:
    """Return the class of a device: "sm_90"; "cpu" in Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def apply_choice(
    kernel: str,
    q: torch.Tensor,
    tokens: int,
    heads: tuple[int, int],
    groups: tuple[int, ...],
    sizes: dict[str, Any],
    default: tuple[int, int],
) -> tuple[int, int, int]:
    """Return programs of a token, warps and stages: the table's, or the default.

    Args:
        kernel: "rope" or "qk_norm_rope".
        q: Queries.
        tokens: Number of tokens of all rows.
        heads: Heads of queries and of keys.
        groups: Numbers of heads where no tile holds heads of two of them.
        sizes: The constants of the tile, whose number of heads is changed.
        default: What `launcher.head_splits` returned.
    """
    choice = _find(kernel, q, tokens, heads, sizes) if _forced is None else _forced
    if choice is None or sizes.get("NORM_ALL_HEADS"):
        return (*default, 1)
    sizes["HEADS"] = choice.tile
    programs = sum(triton.cdiv(n, choice.tile) for n in groups) if choice.splits else 1
    return programs, choice.warps, choice.stages


def _find(
    kernel: str, q: torch.Tensor, tokens: int, heads: tuple[int, int], sizes: dict[str, Any]
) -> LaunchChoice | None:
    """Return the choice of the row that fits a launch."""
    rows = read_table(TABLE).get(device_class(q.device), ())
    if not rows or sizes["R"] != sizes["D"]:
        return None
    dtype = str(q.dtype).removeprefix("torch.")
    launch = (kernel, heads, sizes["D"], dtype)
    for row in rows:
        is_measured = (row.kernel, row.heads, row.head_dim, row.dtype) == launch
        if is_measured and row.above < tokens <= row.up_to:
            return row.choice
    return None


@cache
def read_table(path: Path) -> dict[str, tuple[Row, ...]]:
    """Return the rows of a table by class of device.

    Raises:
        ValueError: A row is not as `Row` says.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    try:
        return {name: tuple(map(_read_row, rows)) for name, rows in table.items()}
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: expected rows of `launch_choices.Row`, got {error}") from error


def _read_row(row: dict[str, Any]) -> Row:
    """Return a row from JSON, without the measured times."""
    entries = {name: value for name, value in row.items() if name != "microseconds"}
    choice = LaunchChoice(**entries.pop("choice"))
    return Row(heads=tuple(entries.pop("heads")), choice=choice, **entries)
