"""Refuse caches whose keys were read at the rows of another table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import ForwardCall
from rope_patch.utils.errors import Refused

TABLE_MARK = "position_table"  # the attribute of a cache that names its table


class CacheGuard:
    """Hooks around a decoder that mark its caches, and refuse those of other tables.

    A cached key cannot be moved to another row, because the row was added before all layers.

    Attributes:
        table: Says which rows the decoder reads.
    """

    def __init__(self, table: str) -> None:
        self.table = table

    def check(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Mark an empty cache, and refuse one that was filled under another table (pre-hook).

        Raises:
            ValueError: The cache holds tokens of another table. It stays unchanged.
        """
        cache = ForwardCall(decoder, args, kwargs).cache
        if cache is None or torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length"):
            return
        if getattr(cache, TABLE_MARK, None) == self.table:
            return  # without asking for its length, which a static cache counts on its device
        tokens = int(cache.get_seq_length())
        if tokens > 0:
            raise Refused(
                f"the cache holds {tokens} tokens that were read with another table of positions, "
                "and cached keys cannot be moved to its rows: expected an empty cache, or one that "
                "this patch filled; read the text again into a new cache"
            )
        setattr(cache, TABLE_MARK, self.table)

    def mark(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Mark a cache that the decoder made (hook)."""
        cache = ForwardCall(decoder, args, kwargs).cache
        cache = cache_in_output(output) if cache is None else cache
        if cache is not None:
            setattr(cache, TABLE_MARK, self.table)
