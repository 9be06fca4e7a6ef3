"""Which keys each query sees, read from the mask that an attention is handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class KeyMask:
    """A mask of four dimensions as truth values, and what it says about positions.

    A query counts the tokens that it sees, itself included. So positions follow left and right
    padding, and every cache, without asking it.

    Attributes:
        visible: True where a query sees a key, `[B, heads or 1, Q, K]`.
    """

    visible: torch.Tensor

    @classmethod
    def of(cls, mask: Any) -> KeyMask | None:
        """Return the key mask of an attention mask; None if it is of another form.

        Args:
            mask: `[B, heads or 1, Q, K]`: floats with the lowest one where a key is hidden, a bias
                elsewhere; or truth values, which are True where a key is hidden (MPT).
        """
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            return None
        if mask.dtype == torch.bool:
            return cls(~mask)
        return cls(mask > torch.finfo(mask.dtype).min) if mask.is_floating_point() else None

    @property
    def keys(self) -> int:
        """Return K."""
        return self.visible.shape[-1]

    @property
    def tokens(self) -> torch.Tensor:
        """Return how many tokens the longest row has so far, a tensor of one number."""
        return self.visible[:, 0, -1].sum(-1).max()

    def exact_bias(self, slopes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ALiBi's -slope * (i - j), `[B, heads, Q, K]`; 0 where a key is hidden.

        Args:
            slopes: `[heads]` float32.
            dtype: The bias's; each number is computed in float32 and rounded once.
        """
        visible = self.visible[:, :1]
        queries = visible.sum(-1, keepdim=True, dtype=torch.int32)
        keys = visible[:, :, -1:].cumsum(-1, dtype=torch.int32)
        distance = (keys - queries).float().mul_(visible)
        shape = (len(visible), len(slopes), *distance.shape[2:])
        bias = torch.empty(shape, dtype=dtype, device=distance.device)
        return torch.mul(distance, slopes[None, :, None, None], out=bias)
