"""Lengths of sequences, from their tokens' positions, over all processes that share them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from rope_patch.utils.errors import Refused


def token_positions(
    arguments: dict[str, Any], tokens: torch.Tensor, past: Any, *, shared: bool
) -> torch.Tensor:
    """Return the positions of a forward call's tokens.

    Args:
        arguments: The decoder's arguments, by name.
        tokens: Ids or embeddings, `[B, S, ...]`.
        past: Tokens in the cache before them.
        shared: Whether other processes hold other parts of the sequences.

    Returns:
        `[B, S]`, -1 for padding.

    Raises:
        ValueError: Sequences are shared or packed, and `position_ids` are missing.
    """
    batch, steps = tokens.shape[:2]
    positions = arguments.get("position_ids")
    if positions is None:
        if shared:
            raise Refused(
                "under context parallelism each process sees a part of the sequence: expected "
                "position_ids, which say where the tokens stand in the whole of it"
            )
        require_document_positions(arguments)
        if steps == 1 and isinstance(past, int):  # a shortcut for decode steps
            positions = torch.full((batch, 1), past, device=tokens.device)
        else:
            positions = (torch.arange(steps, device=tokens.device) + past)[None]
    if positions.shape[0] != batch:
        positions = positions.expand(batch, -1)
    mask = arguments.get("attention_mask")
    # Masks of other shapes, and the position_ids beside them, were made from a 2-D one.
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= steps:
        new = mask_columns(mask, past, steps).to(positions.device)
        positions = torch.where(new.bool(), positions, -1)
    return positions


def prompt_positions(
    model_kwargs: dict[str, Any], cached: torch.Tensor | None, tokens: int, device: torch.device
) -> tuple[torch.Tensor, list[float]]:
    """Return the positions of the sequences that a generate continues.

    Args:
        model_kwargs: The generate's arguments for the model.
        cached: Positions of the tokens in its cache, `[B, S]`, where known.
        tokens: Tokens of the prompt, for a generate without positions and mask.
        device: The prompt's device.

    Returns:
        Positions of all tokens, -1 for none, `[B, S]`, or `[1, S]` for equal rows; and the
        position of each row's last token.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:  # M-RoPE counts an image's tokens as fewer
        positions = None
    if positions is None and mask is not None:
        positions = mask.long().cumsum(-1) - 1
    elif positions is None:
        positions = torch.arange(tokens, device=device)[None]
    last = positions[:, -1].tolist()
    if mask is not None:
        positions = torch.where(mask[:, -positions.shape[1] :].bool(), positions, -1)
    if cached is not None:
        rows = max(len(cached), len(positions))
        both = (cached.to(positions.device).expand(rows, -1), positions.expand(rows, -1))
        positions, last = torch.cat(both, dim=1), last * (rows // len(last))
    return positions, last


def require_document_positions(arguments: dict[str, Any]) -> None:
    """Raise if packed rows come without the positions that tell where a document begins.

    Args:
        arguments: The decoder's arguments, by name, without `position_ids`.

    Raises:
        ValueError: Flash attention's `cu_seq_lens_q` packs the rows.
    """
    if arguments.get("cu_seq_lens_q") is not None:
        raise Refused(
            "cu_seq_lens_q says that rows are packed, and a token's place in its document decides "
            "how it is rotated: expected position_ids beside it, which start anew with each "
            "document"
        )


def mask_columns(mask: torch.Tensor, past: Any, steps: int) -> torch.Tensor:
    """Return the columns of a 2-D mask, or of numbers of its shape, for the new tokens, `[B, S]`.

    A mask for a static cache may continue behind them.
    """
    width = mask.shape[1]
    if width == steps:
        return mask
    if isinstance(past, int):
        end = min(past + steps, width)
        return mask[:, end - steps : end]
    return mask.index_select(
        1, (torch.arange(steps, device=mask.device) + past).clamp(max=width - 1)
    )


def first_and_last_positions(positions: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return first and last position of each row; waits for the device of `positions`.

    Args:
        positions: `[B, S]`, -1 where there is no token.
        group: The processes that hold other parts of the same rows, if any.

    Returns:
        `[B, 2]`, float64, on the CPU; a row without tokens has its last position before its first.
    """
    positions = positions.long()  # narrower types cannot hold the marker for no position
    real = positions >= 0
    last = torch.where(real, positions, -1).amax(1)
    first = torch.where(real, positions, torch.iinfo(torch.int64).max).amin(1)
    if group is not None:
        ends = torch.cat([last, -first])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        last, first = ends[: len(last)], -ends[len(last) :]
    return torch.stack([torch.minimum(first, last + 1), last], dim=1).to("cpu", torch.float64)


def extend_spans(row_spans: torch.Tensor, next_positions: list[float]) -> bool:
    """Extend each row's span by one position and return True, if all frequencies serve them.

    Args:
        row_spans: See `RotationRecord`; updated in place.
        next_positions: Each row's new position; negative where a mask hides it.
    """
    # Python and NumPy numbers are fastest for the few rows of a batch.
    spans = []
    for (first, last, valid_until), position in zip(
        row_spans.tolist(), next_positions, strict=True
    ):
        if position >= 0:  # not hidden by a mask
            first, last = min(first, position), max(last, position)
        if not last + 1 - first <= valid_until:  # also False if the span is unknown (NaN)
            return False
        spans.append((first, last))
    row_spans.numpy()[:, :2] = spans
    return True


def context_parallel_group() -> Any:
    """Return the processes that share sequences in accelerate's context parallelism, or None."""
    shared = AcceleratorState._shared_state
    parallelism = shared.get("parallelism_config") if shared else None
    if parallelism is None or not parallelism.cp_enabled:
        return None
    return AcceleratorState().device_mesh["cp"].get_group()
