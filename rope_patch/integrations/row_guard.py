"""Check that the rows of a training fit the length that a model is patched for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.handle import Patch
from rope_patch.patching.length_warning import outgrown_length
from rope_patch.patching.stamp import innermost_decoders
from rope_patch.utils.errors import Refused

_BATCH = 1000  # rows of a dataset whose lengths are read at once


class RowGuard:
    """Pre-hook of decoders that refuses rows beyond the patched length in training.

    Packed rows count by their documents, if their positions start anew with each.

    Attributes:
        length: The patched length in tokens.
        rotation: The patch, for the message.
    """

    def __init__(self, length: int, rotation: str) -> None:
        self.length = length
        self.rotation = rotation

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (decoder.training and torch.is_grad_enabled()):
            return
        longest = outgrown_length(decoder, args, kwargs, self.length)
        if longest is not None:
            raise _refusal(longest, self.length, self.rotation)


def install_row_guard(model: nn.Module, handle: Patch) -> None:
    """Have a model's decoders refuse training rows that are too long, until the patch ends."""
    if handle.longest_text is None:
        return
    guard = RowGuard(handle.longest_text, str(handle))
    for decoder in innermost_decoders(model, find_rotaries(model)):
        handle.undo_log.hook(decoder, before=guard)


def require_short_dataset(dataset: Any, handle: Patch) -> None:
    """Raise if a dataset of tokenized rows holds a row beyond the patched length.

    Reads lengths alone, and only of a `datasets.Dataset`. Streams, untokenized rows, and rows with
    positions of their own are left to the guard at each step.

    Raises:
        ValueError: It does.
    """
    columns = set(getattr(dataset, "column_names", None) or ())
    if handle.longest_text is None or "position_ids" in columns or "input_ids" not in columns:
        return
    if not (hasattr(dataset, "with_format") and hasattr(dataset, "select_columns")):
        return
    # TRL lists the documents of each packed row.
    column = "seq_lengths" if "seq_lengths" in columns else "input_ids"
    longest = 0
    if hasattr(dataset, "__len__"):
        rows = dataset.select_columns([column]).with_format("arrow")
        for table in rows.iter(batch_size=_BATCH):
            longest = max(longest, _longest(table[column], lists=column == "seq_lengths"))
    if longest > handle.longest_text:
        raise _refusal(longest, handle.longest_text, str(handle))


def _longest(column: Any, *, lists: bool) -> int:
    """Return the longest row of a column of tokens, or the largest number of a column of lists."""
    import pyarrow.compute as compute

    numbers = compute.list_flatten(column) if lists else compute.list_value_length(column)
    return compute.max(numbers).as_py() or 0


def _refusal(longest: int, length: int, rotation: str) -> Refused:
    return Refused(
        f"a row of {longest:,} tokens is longer than the {length:,} that the model is patched for "
        f"({rotation}): cut rows to {length:,} tokens (max_length={length} in TRL), or patch with "
        f"length={longest} or more"
    )
