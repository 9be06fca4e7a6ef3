"""The sets of frequencies that rows are rotated by, made once for each length that needs another.

A set holds all layer types that change, one after another, so that a row's rotation is one row of
numbers: F of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method


class FrequencyTable:
    """A method's frequencies and attention factors at every length, as tensors on every device.

    Attributes:
        slices: Where each layer type's numbers are in a set: its frequencies, and then its
            attention factor.
        row_width: F.
    """

    def __init__(
        self,
        method: Method,
        geometries: dict[str | None, Geometry],
        before: dict[str | None, Frequencies],
        kinds: Iterable[str | None],
    ) -> None:
        """Makes none yet.

        Args:
            method: The method.
            geometries: The layer types that change.
            before: What the unpatched model rotates by.
            kinds: The order of the layer types.
        """
        self.method = method
        self.geometries = geometries
        self.before = before
        self.trained_length = next(iter(geometries.values())).trained_length
        kinds = list(kinds)
        ends = list(itertools.accumulate(len(before[kind].inv_freq) + 1 for kind in kinds))
        self.slices = {k: (s, e) for k, s, e in zip(kinds, [0, *ends], ends, strict=False)}
        self.row_width = ends[-1]
        self._rows: dict[float, torch.Tensor] = {}
        self._rows_on_device: dict[Any, torch.Tensor] = {}
        self._last_split: dict[str | None, Any] = {}

    def valid_until(self, length: float) -> float:
        """See `Method.valid_until`."""
        return self.method.valid_until(length, self.trained_length)

    def frequencies(self, length: float) -> dict[str | None, Frequencies]:
        """What a sequence of `length` tokens is rotated by, for each layer type that changes."""
        row = self.row(self.valid_until(length))
        return {
            kind: Frequencies(row[start : end - 1], row[end - 1].item())
            for kind, (start, end) in self.slices.items()
        }

    def row(self, reach: float) -> torch.Tensor:
        """Frequencies and attention factors of all layer types, `[F]`, float64, on the CPU."""
        made = self._rows.get(reach)
        if made is None:
            if len(self._rows) > 256:  # growth="exact" asks for a new one with every token
                self._rows.clear()
            made = self._rows[reach] = torch.cat(
                [self._layer_type_row(kind, reach) for kind in self.slices]
            )
        return made

    def _layer_type_row(self, kind: str | None, reach: float) -> torch.Tensor:
        frequencies = self.method.frequencies_at(self.geometries[kind], reach)
        if frequencies.close_to(self.before[kind]):  # the very bits of the unpatched model
            frequencies = self.before[kind]
        factor = torch.tensor([frequencies.attention_factor], dtype=torch.float64, device="cpu")
        return torch.cat([frequencies.inv_freq.double(), factor])

    def rows_on(self, reaches: list[float], device: torch.device) -> torch.Tensor:
        """The rows' sets in float32, `[B, F]`, or `[1, F]` where all rows turn alike."""
        alike = len(reaches) == 1 or len(set(reaches)) == 1
        key = (tuple(reaches[:1] if alike else reaches), device)
        made = self._rows_on_device.get(key)
        if made is None:
            if len(self._rows_on_device) > 64:
                self._rows_on_device.clear()
            rows = torch.stack([self.row(reach) for reach in key[0]])
            made = self._rows_on_device[key] = rows.to(device, torch.float32)
        return made

    def per_layer_type(
        self, rows: torch.Tensor, kind: str | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer type's frequencies and attention factor.

        `[R / 2]` and a number where rows turn alike, `[B, 1, R / 2]` and `[B, 1, 1]` where not.
        """
        last, *split = self._last_split.get(kind, (None,))
        if last is rows and split[0].device == device and not torch.compiler.is_compiling():
            return split[0], split[1]  # as in most decoding steps
        start, end = self.slices[kind]
        part = rows[:, start:end].to(device)
        if rows.shape[0] == 1:
            inv_freq, scale = part[0, :-1], part[0, -1]
        else:
            inv_freq, scale = part[:, None, :-1], part[:, None, -1:]
        if not torch.compiler.is_compiling():
            self._last_split[kind] = (rows, inv_freq, scale)
        return inv_freq, scale
