"""Profiles: the rotations of requests of different lengths, their tables, and the choice of one."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.serving.vllm.rope_type import RopeRequest
from rope_patch.utils.errors import Refused

# More than four doublings of the growth grid make; each one divides the prefix cache.
_MOST_PROFILES = 64


@dataclass(frozen=True)
class ProfileLengths:
    """The lengths up to which requests share a rotation.

    Attributes:
        longest: Tokens of the longest request of each profile, ascending; the last one is the
            engine's max_model_len.
    """

    longest: tuple[int, ...]

    @classmethod
    def of_method(cls, method: Method, trained_length: int, max_length: int) -> ProfileLengths:
        """Return the lengths at which a method's rotation changes, up to the engine's longest.

        Raises:
            ValueError: The method changes its rotation with every token.
        """
        longest: list[int] = []
        while not longest or longest[-1] < max_length:
            start = longest[-1] + 1 if longest else 1
            end = method.valid_until(start, trained_length)
            longest.append(max_length if math.isinf(end) else min(math.floor(end), max_length))
            if len(longest) > _MOST_PROFILES:
                raise Refused(
                    f"{method} has more than {_MOST_PROFILES} rotations up to {max_length:,} "
                    "tokens, and each needs a table of its own: leave growth out, which steps by "
                    "2^(1/4), or lower max_model_len"
                )
        return cls(tuple(longest))

    @classmethod
    def merge(cls, several: Iterable[ProfileLengths]) -> ProfileLengths:
        """Return the lengths at which any layer type's rotation changes."""
        return cls(tuple(sorted({end for lengths in several for end in lengths.longest})))

    def index(self, length: int) -> int:
        """Return the profile of a request of `length` tokens: the smallest one that serves it.

        Args:
            length: The most tokens that the model may read.

        Raises:
            ValueError: The request is longer than the engine serves.
        """
        index = bisect.bisect_left(self.longest, length)
        if index == len(self.longest):
            raise Refused(
                f"a request of {length:,} tokens is longer than the {self.longest[-1]:,} that the "
                "rotation was computed for: lower max_tokens, or raise max_model_len"
            )
        return index

    def start_rows(self) -> tuple[int, ...]:
        """Return the first row of each profile's table when all are stacked."""
        ends = [0]
        for longest in self.longest:
            ends.append(ends[-1] + longest)
        return tuple(ends[:-1])

    def __len__(self) -> int:
        return len(self.longest)


@dataclass(frozen=True)
class Profile:
    """One rotation of a layer type.

    Attributes:
        longest: Tokens of the longest request that it serves.
        frequencies: Radians per token of each pair, and the attention factor.
        is_unscaled: Whether it is the rotation before the extension: theta's, or that of the
            checkpoint's own scaling.
    """

    longest: int
    frequencies: Frequencies
    is_unscaled: bool


def make_profiles(
    request: RopeRequest, head_dim: int, rotary_dim: int, max_length: int
) -> list[Profile]:
    """Return the profiles of one layer type, by ascending length.

    Args:
        request: The rotation asked for.
        head_dim: Size of a head.
        rotary_dim: Dimensions of it that rotate.
        max_length: The engine's max_model_len.
    """
    geometry = request.geometry(head_dim, rotary_dim)
    unscaled = Frequencies(geometry.inv_freq())
    lengths = ProfileLengths.of_method(request.method, request.trained_length, max_length)
    profiles = []
    for longest in lengths.longest:
        frequencies = request.method.frequencies_at(geometry, longest)
        profiles.append(Profile(longest, frequencies, frequencies.same_as(unscaled)))
    return profiles


def stack_tables(
    method: Method,
    geometry: Geometry,
    profiles: list[Profile],
    plain_table: torch.Tensor,
    rows_per_token: int,
) -> torch.Tensor:
    """Return cos and sin of all profiles, one after another, `[rows, R]` in float32.

    Args:
        method: The method.
        geometry: The rotation before the extension.
        profiles: The method's rotations, by ascending length.
        plain_table: vLLM's own table for theta alone, whose bits a plain server has.
        rows_per_token: Rows for each token of a profile's longest request.
    """
    before = plain_table
    if geometry.base:  # start tokens and short requests rotate as the checkpoint's own scaling
        before = _table(Frequencies(geometry.inv_freq()), len(plain_table), plain_table.device)
    start, tables = method.start_token_count, []
    for profile in profiles:
        rows = profile.longest * rows_per_token
        table = (
            before[:rows]
            if profile.is_unscaled
            else _table(profile.frequencies, rows, plain_table.device)
        )
        tables.append(torch.cat([before[:start], table[start:]])[:rows])
    return torch.cat(tables)


def _table(frequencies: Frequencies, rows: int, device: torch.device) -> torch.Tensor:
    """Return cos and sin in float32, as vLLM computes its own."""
    inv_freq = frequencies.inv_freq.to(device=device, dtype=torch.float32)
    positions = torch.arange(rows, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * frequencies.attention_factor
