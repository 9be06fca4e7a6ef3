"""The one rule of positions: what they are, given or not, and how long sequences are by them.

Positions that a forward is given are taken as they are. Without them, padding is read from a 2-D
mask: a token's position is the number of tokens before it in its row, cached ones included.
`PositionRule` then gives the decoder these positions, so that all that depends on them (start
tokens, position maps, temperatures, encodings) reads the same ones, in a recomputation for a
backward pass, too. Rotation alone depends on distances, which padding on the left does not change:
there transformers' own positions stay, which count slots, and logits keep their bits. Where the
length counts, a module around the decoder that has the mask counts them all the same, because the
mask that it makes for the decoder may show no padding.

Without a mask, or with one of another shape, positions count slots as transformers does. A row
holds several documents only where transformers packs it: it then attends within each of them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn

from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import (
    MASK,
    POSITIONS,
    TOKENS,
    ForwardCall,
    parameter_names,
    with_position_ids,
)
from rope_patch.utils.errors import Refused

_PARTS = (
    "under context parallelism each process sees a part of the sequence: expected position_ids, "
    "which say where the tokens stand in the whole of it"
)


class PositionRule:
    """Pre-hooks of decoders, and of modules around them, for forwards without `position_ids`.

    Attributes:
        group: The processes that hold other parts of the sequences, if accelerate does not know
            them. There a model would count from 0 in every process.
        indexer: The class of the model's modules that take a token's position for its slot, if any.
    """

    def __init__(self, indexer: str | None = None) -> None:
        self.group: Any = None
        self.indexer = indexer
        self._thread = threading.local()

    def require_whole(
        self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise for a part of a sequence without positions.

        Raises:
            ValueError: Other processes hold the other parts.
        """
        self._require_whole(ForwardCall(reader, args, kwargs))

    def count(
        self, reader: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give a forward without positions those that its mask tells.

        Raises:
            ValueError: The rows are packed, and nothing tells the positions in their documents.
        """
        call = ForwardCall(reader, args, kwargs)
        self._require_whole(call)
        if call.position_ids is not None:
            return None
        require_document_positions(call)
        positions = counted_positions(call)
        if positions is None:
            return None
        if self.indexer is not None:
            _require_no_padding_ahead(call.attention_mask, self.indexer)
        if not torch.compiler.is_compiling():
            self._thread.counted = weakref.ref(positions)
        return with_position_ids(reader, args, kwargs, positions)

    def has_counted(self, position_ids: torch.Tensor | None) -> bool:
        """Return whether positions are those that this rule counted last, in this thread."""
        counted = getattr(self._thread, "counted", None)
        return position_ids is not None and counted is not None and counted() is position_ids

    def _require_whole(self, call: ForwardCall) -> None:
        if call.position_ids is not None:
            return
        if (self.group or context_parallel_group()) is not None:
            raise Refused(_PARTS)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._thread = threading.local()


def install_position_rule(
    model: nn.Module,
    rotaries: list[RotaryModule],
    undo_log: UndoLog,
    *,
    counts_tokens: bool,
    counts_lengths: bool = False,
) -> PositionRule:
    """Install the rule ahead of all other hooks that read positions.

    It goes on the decoder, and on the modules between it and the outermost one: multimodal models
    count positions there, or make masks there that show no padding. The outermost one passes its
    arguments on, unless it is a bare model; a hook around it would make torch.compile split the
    graph.

    Args:
        model: The model.
        rotaries: Its rotary modules.
        undo_log: Log of the changes.
        counts_tokens: Whether positions themselves count.
        counts_lengths: Whether the lengths of rows count.
    """
    rotary_ids = {id(rotary.module) for rotary in rotaries}
    readers = [
        module
        for module in model.modules()
        if TOKENS in parameter_names(module)
        and any(id(inner) in rotary_ids for inner in module.modules())
    ]
    if len(readers) > 1 and getattr(readers[0], "base_model", None) is not readers[0]:
        readers = readers[1:]
    rule = PositionRule(_slot_indexer(model))
    for index, reader in enumerate(readers):
        is_around = any(inner in readers[index + 1 :] for inner in reader.modules())
        counts = counts_tokens or (counts_lengths and is_around)
        counts = counts and POSITIONS in parameter_names(reader)
        undo_log.hook(reader, before=rule.count if counts else rule.require_whole)
    return rule


def _slot_indexer(model: nn.Module) -> str | None:
    """Return the class of indexers that take positions for slots (MiniMax M3's); None without."""
    # Such indexers get positions and no mask, and hide the keys in slots above a query's position.
    for module in model.modules():
        name, parameters = type(module).__name__, parameter_names(module)
        if name.endswith("Indexer") and POSITIONS in parameters and MASK not in parameters:
            return name
    return None


def _require_no_padding_ahead(mask: torch.Tensor, indexer: str) -> None:
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise Refused(
            f"{indexer} takes a token's position for its slot, and attention_mask has padding "
            "ahead of tokens: expected padding on the right, or rows one by one"
        )


def counted_positions(call: ForwardCall) -> torch.Tensor | None:
    """Return positions that a call's 2-D mask tells, `[B, S]`; None without such a mask.

    Padding on the left has position 0, and padding between or behind tokens that of the last token
    before it.
    """
    mask, tokens = call.attention_mask, call.tokens
    if tokens is None or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    steps = tokens.shape[1]
    if mask.shape[1] < steps:
        return None
    past = call.cached_tokens()
    row_positions = (mask != 0).long().cumsum(1) - 1
    # A mask of the new tokens alone does not cover the cached ones.
    row_positions = (
        row_positions + past if mask.shape[1] == steps else mask_columns(row_positions, past, steps)
    )
    return row_positions.clamp(min=0).to(tokens.device)


def token_positions(
    call: ForwardCall,
    tokens: torch.Tensor,
    past: Any,
    *,
    shared: bool,
    axes: int | None = None,
) -> torch.Tensor:
    """Return the positions of a forward call's tokens.

    Args:
        call: The decoder's call.
        tokens: Ids or embeddings, `[B, S, ...]`.
        past: Tokens in the cache before them.
        shared: Whether other processes hold other parts of the sequences.
        axes: A, if a token has a position on each of several axes (M-RoPE).

    Returns:
        `[B, S]`, or `[B, S, A]` with axes; -1 for padding.

    Raises:
        ValueError: Sequences are shared or packed, and `position_ids` are missing; or there are
            more or fewer of them than tokens.
    """
    batch, steps = tokens.shape[:2]
    positions = call.position_ids
    if positions is None:
        if shared:
            raise Refused(_PARTS)
        require_document_positions(call)
        if steps == 1 and isinstance(past, int):  # a shortcut for decode steps
            positions = torch.full((batch, 1), past, device=tokens.device)
        else:
            positions = (torch.arange(steps, device=tokens.device) + past)[None]
    if axes is not None:
        positions = axis_positions(positions, axes)
        if positions.shape[1] != steps:
            raise Refused(
                f"expected position_ids of {steps} tokens, got {positions.shape[1]}: the model "
                "counted them from an attention_mask that includes cached tokens; pass "
                "position_ids of the new tokens beside it, or use generate"
            )
    if positions.shape[0] != batch:
        positions = positions.expand(batch, *positions.shape[1:])
    mask = call.attention_mask
    # Masks of other shapes, and the position_ids beside them, were made from a 2-D one.
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= steps:
        new = mask_columns(mask, past, steps).to(positions.device).bool()
        positions = torch.where(new if axes is None else new[..., None], positions, -1)
    return positions


def prompt_positions(
    model_kwargs: dict[str, Any],
    cached: torch.Tensor | None,
    tokens: int,
    device: torch.device,
    axes: int | None = None,
) -> tuple[torch.Tensor, list[float]]:
    """Return the positions of the sequences that a generate continues.

    Args:
        model_kwargs: The generate's arguments for the model.
        cached: Positions of the tokens in its cache, `[B, S]` or `[B, S, A]`, where known.
        tokens: Tokens of the prompt, for a generate without positions and mask.
        device: The prompt's device.
        axes: A, if a token has a position on each of several axes (M-RoPE).

    Returns:
        Positions of all tokens, -1 for none, `[B, S]`, or `[1, S]` for equal rows, and `[B, S, A]`
        with axes; and the position of each row's last token, the highest one of its axes.
    """
    mask, positions = model_kwargs.get(MASK), model_kwargs.get(POSITIONS)
    if axes is None and positions is not None and positions.ndim != 2:
        positions = None  # such positions belong to other axes than this decoder's
    if positions is None and mask is not None:
        positions = mask.long().cumsum(-1) - 1
    elif positions is None:
        positions = torch.arange(tokens, device=device)[None]
    if axes is not None:
        positions = axis_positions(positions, axes)
    last = positions[:, -1:].flatten(1).amax(1).tolist()
    if mask is not None:
        is_token = mask[:, -positions.shape[1] :].bool()
        positions = torch.where(is_token if axes is None else is_token[..., None], positions, -1)
    if cached is not None:
        rows = max(len(cached), len(positions))
        both = (part.to(positions.device) for part in (cached, positions))
        positions = torch.cat([part.expand(rows, *part.shape[1:]) for part in both], dim=1)
        last = last * (rows // len(last))
    return positions, last


def axis_positions(position_ids: torch.Tensor, axes: int) -> torch.Tensor:
    """Return the position of each token on every axis, from what an M-RoPE decoder accepts.

    Args:
        position_ids: `[A, B, S]`; `[A + 1, B, S]` where the first are for the mask of packed rows
            alone; `[B, S]` or `[1, B, S]` for text, whose positions are the same on all axes.
        axes: A.

    Returns:
        `[B, S, A]`: rows first, because caches reorder, repeat and select rows.
    """
    positions = position_ids if position_ids.ndim == 3 else position_ids[None]
    if positions.shape[0] == axes + 1:
        positions = positions[1:]
    return positions.expand(axes, -1, -1).movedim(0, -1)


def require_document_positions(call: ForwardCall) -> None:
    """Raise if packed rows come without the positions that tell where a document begins.

    Args:
        call: A decoder's call without `position_ids`.

    Raises:
        ValueError: Flash attention's `cu_seq_lens_q` packs the rows.
    """
    if call.is_packed:
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
    """Return the lowest and the highest position of each row; waits for their device.

    Args:
        positions: `[B, S]`, or `[B, S, A]` on several axes; -1 where there is no token.
        group: The processes that hold other parts of the same rows, if any.

    Returns:
        `[B, 2]`, float64, on the CPU; a row without tokens has its last position before its first.
    """
    positions = positions.flatten(1).long()  # narrower types cannot hold the marker for no position
    real = positions >= 0
    last = torch.where(real, positions, -1).amax(1)
    first = torch.where(real, positions, torch.iinfo(torch.int64).max).amin(1)
    if group is not None:
        ends = torch.cat([last, -first])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        last, first = ends[: len(last)], -ends[len(last) :]
    return torch.stack([torch.minimum(first, last + 1), last], dim=1).to("cpu", torch.float64)


def token_extents(positions: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the lowest and the highest position of a single token, over its axes.

    Args:
        positions: `[B, 1]` or `[B, 1, A]`; read from their device at once.

    Returns:
        Two lists of B numbers.
    """
    rows = positions.flatten(1).tolist()
    return [min(row) for row in rows], [max(row) for row in rows]


def extend_spans(row_spans: torch.Tensor, lowest: list[float], highest: list[float]) -> bool:
    """Extend each row's span by one token and return True, if all frequencies serve them.

    Args:
        row_spans: See `RotationRecord`; updated in place.
        lowest: The token's lowest position in each row, negative where a mask hides it.
        highest: Its highest position.
    """
    # Python and NumPy numbers are fastest for the few rows of a batch.
    spans = []
    for (first, last, valid_until), low, high in zip(
        row_spans.tolist(), lowest, highest, strict=True
    ):
        if low >= 0:
            first, last = min(first, low), max(last, high)
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
