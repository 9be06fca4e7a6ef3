"""Compute the frequencies of each row once for each length, in eager mode and in compiled graphs.

A row holds all layer types that change, one after another: F numbers.

Whether a step changes frequencies depends on lengths. Reading them in a compiled graph would break
the graph or compile them in, so a custom op reads them when the graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.patching.architecture.mla_scale import SoftmaxScaled
from rope_patch.utils.errors import Refused


class FrequencyTable:
    """A method's frequencies and attention factors at every length, as tensors on every device.

    Attributes:
        slices: Where each layer type's numbers are in a row: its frequencies, then its attention
            factor.
        row_width: F.
        softmax_columns: Where the factor of each layer type's queries is in a row, for latent
            attention (`SoftmaxScaled`); empty for others.
    """

    def __init__(
        self,
        method: Method,
        geometries: dict[str | None, Geometry],
        before: dict[str | None, Frequencies],
        layer_types: Iterable[str | None],
    ) -> None:
        """Start with an empty table.

        Args:
            method: The method.
            geometries: The layer types that change.
            before: Frequencies of the unpatched model.
            layer_types: The layer types that change, in order.
        """
        self.method = method
        self.geometries = geometries
        self.before = before
        self.trained_length = next(iter(geometries.values())).trained_length
        layer_types = list(layer_types)
        ends = list(
            itertools.accumulate(len(before[layer_type].inv_freq) + 1 for layer_type in layer_types)
        )
        self.slices = {k: (s, e) for k, s, e in zip(layer_types, [0, *ends], ends, strict=False)}
        # Where the factors of the queries are: after all others.
        self.softmax_columns = (
            {layer_type: ends[-1] + i for i, layer_type in enumerate(layer_types)}
            if isinstance(method, SoftmaxScaled)
            else {}
        )
        self.row_width = ends[-1] + len(self.softmax_columns)
        self._rows: dict[float, torch.Tensor] = {}
        self._is_plain: dict[float, bool] = {}
        self._rows_on_device: dict[Any, torch.Tensor] = {}
        self._last_split: dict[str | None, Any] = {}

    def valid_until(self, length: float) -> float:
        """Return the longest length that the frequencies of `length` serve."""
        return self.method.valid_until(length, self.trained_length)

    def frequencies(self, length: float) -> dict[str | None, Frequencies]:
        """Return the frequencies of a sequence of `length` tokens, by layer type that changes."""
        row = self.row(self.valid_until(length))
        return {
            layer_type: Frequencies(row[start : end - 1], row[end - 1].item())
            for layer_type, (start, end) in self.slices.items()
        }

    def row(self, reach: float) -> torch.Tensor:
        """Return frequencies and factors of all layer types, `[F]`, float64, on the CPU."""
        row = self._rows.get(reach)
        if row is None:
            if len(self._rows) > 256:  # growth="exact" needs a new row for every token
                self._rows.clear()
                self._is_plain.clear()
            row = self._rows[reach] = torch.cat(
                [self._layer_type_row(layer_type, reach) for layer_type in self.slices]
                + [self._softmax_factor(layer_type, reach) for layer_type in self.softmax_columns]
            )
        return row

    def is_plain(self, reach: float) -> bool:
        """Return whether sequences up to `reach` rotate by the unpatched model's frequencies."""
        if reach not in self._is_plain:
            row = self.row(reach)
            own = [self.before[layer_type] for layer_type in self.slices]
            plain = torch.cat([self._as_row(each) for each in own])
            self._is_plain[reach] = row[: len(plain)].equal(plain)
        return self._is_plain[reach]

    def _layer_type_row(self, layer_type: str | None, reach: float) -> torch.Tensor:
        frequencies = self.method.frequencies_at(self.geometries[layer_type], reach)
        if frequencies.close_to(self.before[layer_type]):  # the same bits as the unpatched model
            frequencies = self.before[layer_type]
        return self._as_row(frequencies)

    @staticmethod
    def _as_row(frequencies: Frequencies) -> torch.Tensor:
        factor = torch.tensor([frequencies.attention_factor], dtype=torch.float64, device="cpu")
        return torch.cat([frequencies.inv_freq.double(), factor])

    def _softmax_factor(self, layer_type: str | None, reach: float) -> torch.Tensor:
        """Return what multiplies the softmax scale of the shortest sequences, `[1]`."""
        assert isinstance(self.method, SoftmaxScaled)
        geometry = self.geometries[layer_type]
        shortest = self.method.softmax_mscale_at(geometry, 1)
        factor = (self.method.softmax_mscale_at(geometry, reach) / shortest) ** 2
        return torch.tensor([factor], dtype=torch.float64, device="cpu")

    def rows_on(self, reaches: list[float], device: torch.device) -> torch.Tensor:
        """Return the rows in float32 on a device, `[B, F]`, or `[1, F]` if all are equal."""
        alike = len(reaches) == 1 or len(set(reaches)) == 1
        key = (tuple(reaches[:1] if alike else reaches), device)
        rows_on_device = self._rows_on_device.get(key)
        if rows_on_device is None:
            if len(self._rows_on_device) > 64:
                self._rows_on_device.clear()
            rows = torch.stack([self.row(reach) for reach in key[0]])
            rows_on_device = self._rows_on_device[key] = rows.to(device, torch.float32)
        return rows_on_device

    def per_layer_type(
        self, rows: torch.Tensor, layer_type: str | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer type's frequencies and attention factor.

        `[R / 2]` and a number if all rows are equal, else `[B, 1, R / 2]` and `[B, 1, 1]`.
        """
        last_rows, *split = self._last_split.get(layer_type, (None,))
        if last_rows is rows and split[0].device == device and not torch.compiler.is_compiling():
            return split[0], split[1]  # the usual case in a decode step
        start, end = self.slices[layer_type]
        part = rows[:, start:end].to(device)
        if rows.shape[0] == 1:
            inv_freq, scale = part[0, :-1], part[0, -1]
        else:
            inv_freq, scale = part[:, None, :-1], part[:, None, -1:]
        if not torch.compiler.is_compiling():
            self._last_split[layer_type] = (rows, inv_freq, scale)
        return inv_freq, scale

    def softmax_factor(
        self, rows: torch.Tensor, layer_type: str | None, device: torch.device
    ) -> torch.Tensor:
        """Return the factor of a layer type's queries, a number or `[B, 1, 1]`."""
        factors = rows[:, self.softmax_columns[layer_type]].to(device)
        return factors[0] if rows.shape[0] == 1 else factors[:, None, None]


_instances: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register_hooks(hooks: Any) -> int:
    """Return a handle by which the op finds `LengthHooks`; holds no reference to them."""
    handle = next(_handles)
    _instances[handle] = hooks
    return handle


# CUDA graphs would replay the outcome of the recorded run.
_tags: Any = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]
UNCAPTURED: dict[str, Any] = {"tags": _tags} if _tags else {}


@torch.library.custom_op(
    "rope_patch::update_rows",
    mutates_args=("keys", "row_spans", "frequencies"),
    # torch 2.6 cannot infer a schema from list[torch.Tensor].
    schema="(Tensor(a!)[] keys, Tensor[] slots, SymInt[] layer_types, Tensor positions, "
    "Tensor new_positions, Tensor(b!) row_spans, Tensor(c!) frequencies, SymInt op_handle) "
    "-> Tensor",
    **UNCAPTURED,
)
def update_rows_op(
    keys: list[torch.Tensor],
    slots: list[torch.Tensor],
    layer_types: list[int],
    positions: torch.Tensor,
    new_positions: torch.Tensor,
    row_spans: torch.Tensor,
    frequencies: torch.Tensor,
    op_handle: int,
) -> torch.Tensor:
    """Run `LengthHooks.update_rows` of the registered hooks and return every row, `[B, F]`.

    Args:
        keys: Keys of each layer that may need re-rotation, `[B, K, S, D]`.
        slots: Their positions, `[B, S]` each.
        layer_types: Their layer types, as indices.
        positions: See `LengthHooks.update_rows`.
        new_positions: See `LengthHooks.update_rows`.
        row_spans: See `LengthHooks.update_rows`.
        frequencies: See `LengthHooks.update_rows`.
        op_handle: The number from `register_hooks`.
    """
    hooks = _instances[op_handle]
    names = list(hooks.slices)
    cached = [(k, s, names[i]) for k, s, i in zip(keys, slots, layer_types, strict=True)]
    next_positions = hooks.generation_loop.take(None)
    rows = hooks.update_rows(
        row_spans,
        frequencies,
        positions,
        new_positions,
        lambda: cached,
        next_positions=next_positions,
    )
    return rows.expand(positions.shape[0], -1).clone()


@update_rows_op.register_fake
def _(keys, slots, layer_types, positions, new_positions, row_spans, frequencies, op_handle):
    return positions.new_empty(frequencies.shape, dtype=torch.float32)


class TraceRefusal:
    """Pre-hook on a decoder that refuses torch.jit.trace of length-dependent frequencies."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            raise Refused(
                f"torch.jit.trace would keep the frequencies of {self.method} for the length that "
                "it sees, and use them for every other: use torch.export or torch.compile, or "
                "patch with a method whose frequencies stay, such as yarn"
            )
