"""Which keys the queries of an attention see, as its attention function has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.transformers_api.attention_functions import AttentionCall
from rope_patch.utils.errors import Refused

_BLOCK = 256  # queries, whose part of a mask is compared at once


class Visibility:
    """The mask of one call of an attention function, its causality and its documents.

    Attributes:
        call: What the function does.
    """

    def __init__(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor) -> None:
        self.call = call
        self.rows, self.heads, self.steps = query.shape[:3]
        self.kv_heads, self.slots = key.shape[1:3]
        self.device = query.device
        self._mask = self._checked_mask()

    def of(self, span: slice) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return where some queries see keys, and what is added to their logits; None for nothing.

        Args:
            span: The queries.

        Returns:
            Two tensors that broadcast to `[B, K, G, q, S]`, or None.
        """
        seen = bias = None
        call, mask = self.call, self._mask
        if call.first_ahead is not None:
            last = torch.arange(self.steps, device=self.device)[span, None] + call.first_ahead
            seen = (torch.arange(self.slots, device=self.device) < last)[None, None, None]
        if call.documents is not None:
            number = call.documents.to(self.device)
            seen = _both(seen, (number[:, span, None] == number[:, None])[:, None, None])
        if mask is None:
            return seen, bias
        if isinstance(mask, torch.Tensor) and call.hides_keys:
            return _both(seen, mask[:, None, None, None]), bias
        part = self._part(mask, span)
        if part.shape[1] == 1:
            part = part[:, :, None]
        else:
            part = part.unflatten(1, (self.kv_heads, self.heads // self.kv_heads))
        if part.dtype == torch.bool and not self._adds:
            seen = _both(seen, part)
        else:
            bias = part
        return seen, bias

    def is_causal(self) -> bool:
        """Return whether query n of Q sees the first S - Q + n + 1 keys, all of them and no others.

        A mask of booleans is compared with this; one that is added counts as another.
        """
        call, ahead = self.call, self.slots - self.steps + 1
        if call.documents is not None:
            return False
        if self._mask is None:
            return call.first_ahead == ahead or (call.first_ahead is None and self.steps == 1)
        if call.hides_keys:
            return call.first_ahead == ahead and bool(self._mask.all())
        if self._adds or self._mask.shape[1] > 1:
            return False
        for first in range(0, self.steps, _BLOCK):
            span = slice(first, min(first + _BLOCK, self.steps))
            last = torch.arange(self.steps, device=self.device)[span, None] + ahead
            expected = torch.arange(self.slots, device=self.device) < last
            seen, bias = self.of(span)
            if seen is None or bias is not None or not bool((seen == expected).all()):
                return False
        return True

    @property
    def _adds(self) -> bool:
        return self.call.adds_mask and isinstance(self._mask, torch.Tensor)

    def _part(self, mask: Any, span: slice) -> torch.Tensor:
        """Return a mask's part for some queries, `[B, H, q, S]`, each size or 1."""
        if isinstance(mask, torch.Tensor):
            return mask[:, :, span if mask.shape[2] > 1 else slice(None)]
        from torch.nn.attention.flex_attention import create_mask

        def shifted(row: Any, head: Any, step: Any, slot: Any) -> Any:
            return mask.mask_mod(row, head, step + span.start, slot)

        rows, heads = mask.shape[:2]
        steps = span.stop - span.start
        return create_mask(shifted, rows, heads, steps, self.slots, str(self.device))

    def _checked_mask(self) -> Any:
        """Return the mask: `[B, S]` for flash attention, flex attention's blocks, else 4-D.

        Raises:
            ValueError: It has another form.
        """
        mask = self.call.mask
        if mask is None or (hasattr(mask, "mask_mod") and self.call.adds_mask):
            return mask
        if isinstance(mask, torch.Tensor) and self.call.hides_keys:
            if mask.ndim == 2 and len(mask) == self.rows:
                # That of a static cache may end ahead of the keys, or behind them.
                is_token = mask[:, -self.slots :].bool().to(self.device)
                return nn.functional.pad(is_token, (0, self.slots - is_token.shape[1]))
        elif isinstance(mask, torch.Tensor) and mask.ndim <= 4:
            mask = mask[(None,) * (4 - mask.ndim)].to(self.device)[..., : self.slots]
            wanted = (self.rows, self.heads, self.steps, self.slots)
            is_number = mask.dtype == torch.bool or mask.is_floating_point()
            fits = all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
            if fits and (is_number or self.call.adds_mask):
                return mask
        got = f"{type(mask).__name__} of shape {list(getattr(mask, 'shape', ()))}"
        raise Refused(
            f"expected a mask of {self.rows} rows, {self.steps} queries and {self.slots} keys, "
            f"for at most {self.heads} heads, got a {got}: a position map does not know which keys "
            "it shows"
        )


def _both(seen: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if seen is None else seen & other
