"""Rotary module with one table of cos and sin for each profile, stacked, in place of vLLM's own.

A token's row is its position plus the first row of its request's profile; a token of several
positions (M-RoPE) has as many rows. The rows are read inside the module, so all else in the model
sees true positions. Their buffer has a fixed address and is written in place before each forward,
which CUDA graphs and compiled graphs require.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from rope_patch.serving.vllm.profiles import ProfileLengths, make_profiles, stack_tables
from rope_patch.serving.vllm.rope_type import RopeRequest, describe
from rope_patch.utils.errors import Refused


class StackedRotary(nn.Module):
    """vLLM's rotary module with the tables of several profiles.

    Attributes:
        request: The rotation asked for.
        profiles: The rotations, by ascending length.
        lengths: Lengths of the profiles.
        first_rows: For each token of the next forward, the first row of its profile's table.
    """

    first_rows: torch.Tensor

    def __init__(
        self,
        request: RopeRequest,
        *,
        head_size: int,
        rotary_dim: int,
        is_neox_style: bool,
        dtype: torch.dtype,
        max_length: int,
        max_tokens: int,
        rows_per_token: int = 1,
    ) -> None:
        """Compute the tables.

        Args:
            request: The rotation asked for.
            head_size: Size of a head.
            rotary_dim: Dimensions of it that rotate.
            is_neox_style: Whether pairs are half a head apart.
            dtype: The model's dtype.
            max_length: The engine's max_model_len.
            max_tokens: Tokens of the largest forward.
            rows_per_token: Rows for each token of a profile's longest request; videos have larger
                positions in M-RoPE than they have tokens.
        """
        super().__init__()
        self.request = request
        self.profiles = make_profiles(request, head_size, rotary_dim, max_length)
        self.lengths = ProfileLengths(tuple(profile.longest for profile in self.profiles))
        self.rows_per_token = rows_per_token
        self.rotary = _rotary_module(request, head_size, rotary_dim, is_neox_style, dtype)
        rows = max_length * rows_per_token
        plain = RotaryEmbedding(
            head_size, rotary_dim, rows, request.theta, is_neox_style, torch.float32
        )
        geometry = request.geometry(head_size, rotary_dim)
        table = stack_tables(
            request.method, geometry, self.profiles, plain.cos_sin_cache, rows_per_token
        ).to(dtype)
        self.rotary.register_buffer("cos_sin_cache", table, False)
        self.register_buffer("first_rows", torch.zeros(max_tokens, dtype=torch.int64), False)
        self._start_rows = self.lengths.start_rows()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate queries and keys, each token by its own request's profile."""
        return self.rotary(positions + self.first_rows[: positions.shape[-1]], query, key)

    def first_row(self, length: int) -> int:
        """Return the first row of the table that serves a request of `length` tokens."""
        return self._start_rows[self.lengths.index(length)] * self.rows_per_token

    @property
    def cos_sin_cache(self) -> NoReturn:
        """Refuse to hand out the table to code that would index it by bare positions."""
        raise Refused(
            f"this model's code reads the table of cos and sin itself, past the rotary module, "
            f"and would rotate every request by the first profile of {describe(self.request)}: "
            "serve it with a static method that `rope-patch export MODEL --engine vllm` writes in "
            "vLLM's own form"
        )

    def extra_repr(self) -> str:
        return f"{describe(self.request)}, {len(self.profiles)} profiles"

    def describe_profiles(self) -> list[str]:
        """Return one line for each profile: which requests it rotates, and how."""
        lines = []
        shortest = 1
        for index, profile in enumerate(self.profiles):
            frequencies = profile.frequencies
            stretch = (
                self.request.geometry(self.head_size, self.rotary_dim).inv_freq()
                / frequencies.inv_freq
            )
            how = (
                "unscaled"
                if profile.is_unscaled
                else f"pairs stretched by {float(stretch.min()):.3g} to {float(stretch.max()):.3g}"
            )
            lines.append(
                f"profile {index}: requests of {shortest:,} to {profile.longest:,} tokens, {how}, "
                f"attention factor {frequencies.attention_factor:.4g}"
            )
            shortest = profile.longest + 1
        return lines

    def table_bytes(self) -> int:
        """Return the memory of the stacked tables, in bytes."""
        table: Any = self.rotary._buffers["cos_sin_cache"]
        return table.nbytes


def _rotary_module(
    request: RopeRequest, head_size: int, rotary_dim: int, is_neox_style: bool, dtype: torch.dtype
) -> nn.Module:
    """Return vLLM's module for one position a token or several, whose table is still to come."""
    if not request.sections:
        return RotaryEmbedding(
            head_size, rotary_dim, 1, request.theta, is_neox_style, dtype, init_cache=False
        )
    return MRotaryEmbedding(
        head_size,
        rotary_dim,
        1,
        request.theta,
        is_neox_style,
        dtype,
        mrope_section=list(request.sections),
        mrope_interleaved=request.interleaved,
        positions_factor=1,
    )
