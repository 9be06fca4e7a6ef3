"""Positions of rows that are shorter than the target length but are to have its distances.

PoSE moves the second part of a row. Leaky ReRoPE's inverse lets far distances grow faster while the
model is trained, and the finished model reads without it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from rope_patch.utils.errors import Refused, did_you_mean

if TYPE_CHECKING:
    from rope_patch.extension import Extension
    from rope_patch.patching import Patch
    from rope_patch.training.data.arguments import DataArguments
    from rope_patch.training.settings import ExtensionArguments

POSITIONS = ("consecutive", "skip", "leaky")
WITHOUT_MASKS = "packing single, concatenate or best_fit_unmasked, and short_share 0"


def check_positions(arguments: DataArguments) -> None:
    """Check the recipe's `positions` against its packing.

    Raises:
        ValueError: The name is unknown, or rows hold documents that keep to themselves.
    """
    positions = arguments.positions
    if positions not in POSITIONS:
        raise ValueError(
            f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}"
            f"{did_you_mean(positions, POSITIONS, 0.5)}"
        )
    if positions != "consecutive" and arguments.needs_masks:
        raise ValueError(
            f"positions: {positions} takes a row as one text, in which nothing keeps to itself: "
            f"expected {WITHOUT_MASKS}, got packing {arguments.packing} and short_share "
            f"{arguments.short_share:g}"
        )


def check_leaky(positions: str, extension: ExtensionArguments, options: dict[str, Any]) -> None:
    """Check the keys that `positions: leaky` restricts.

    Args:
        positions: The recipe's positions; nothing is checked for others than leaky.
        extension: The recipe's keys for the model.
        options: The method's options.

    Raises:
        ValueError: The method changes the rotation, or needles are to be measured.
    """
    if positions != "leaky":
        return
    if extension.method != "none" or options:
        got = f"{extension.method} with {options}" if options else extension.method
        raise ValueError(
            "positions: leaky trains a model for the rotation that it has: expected method: none "
            f"without options, got {got}"
        )
    if (extension.factor is None) == (extension.length is None):
        raise ValueError(
            "positions: leaky trains for a longer target: expected exactly one of factor and "
            f"length, got {'neither' if extension.factor is None else 'both'}"
        )
    if extension.retrieval_steps:
        raise ValueError(
            "positions: leaky changes attention while the model is trained, so that needles would "
            "say nothing of the finished model: leave retrieval_steps out, and measure that model "
            "with rope-patch eval"
        )


def require_short_rows(positions: str, row_length: int, trained: int, target: int) -> None:
    """Raise unless rows have a length that their positions are made for; lengths in tokens.

    Raises:
        ValueError: Rows are too long.
    """
    if positions == "skip" and row_length >= target:
        raise Refused(
            f"positions: skip gives short rows the distances of {target:,} tokens: expected a "
            f"train_length below that, such as {trained:,}, got {row_length:,}"
        )
    if positions == "leaky" and (row_length > trained or trained >= target):
        raise Refused(
            "positions: leaky gives rows of the trained length the distances of longer texts: "
            f"expected a train_length of at most {trained:,} and a target above that, got rows of "
            f"{row_length:,} and a target of {target:,}"
        )


def skipped_positions(row_length: int, target_length: int, random: Random) -> torch.Tensor:
    """Return positions that jump once, so that short rows have the distances of long ones.

    The positions of a row's second part are moved by a uniform number of tokens. The first part is
    at most half of the row. The text stays in one piece; PoSE's code also leaves out text there.

    Args:
        row_length: Tokens of the row.
        target_length: The positions stay below this, at least `row_length`.
        random: Source of both numbers.

    Returns:
        Rising positions, `[row_length]` int64.

    Source: PoSE, arXiv:2309.10400, with two parts, distributed as in its published code.
    """
    first_part = random.randint(1, (row_length + 1) // 2)
    positions = torch.arange(row_length)
    positions[first_part:] += random.randint(0, target_length - row_length)
    return positions


def patch_leaky(model: Any, request: Extension, row_length: int, target_length: int) -> Patch:
    """Patch a model so that short rows have the distances of about one and a half targets.

    Args:
        model: The unpatched model.
        request: The recipe's request; its trained length, layer types and kernels are used.
        row_length: Tokens of a row.
        target_length: The length in tokens that the model is trained for.

    Source: J. Su, kexue.fm/archives/9728: a window of a quarter of the row, and k = 1 / (2 factor).
    """
    from rope_patch.entry_points import patch_rotation

    window, k = max(1, row_length // 4), row_length / (2 * target_length)
    return patch_rotation(
        model,
        replace(
            request,
            method="leaky-rerope",
            factor=None,
            length=None,
            options={"window": window, "k": k, "temperature": "none"},
        ),
    )
