"""Tables of positions: learned ones are stretched, sinusoidal ones computed anew."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.sites.site import CacheGuard, DetectedTable, Site, SiteFacts, Stretch
from rope_patch.encodings.tables import LAWS, STRETCHES, ntk_base, sinusoidal_table, stretch_table
from rope_patch.patching.architecture.rotary_modules import RotaryModule
from rope_patch.patching.positions import install_position_rule
from rope_patch.patching.stamp import innermost_decoders
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

_RESIZE = "resize_position_embeddings"
_BASE = 10000.0
_TOLERANCE = 2e-3  # half precision rounds a table to 5e-4, float32 angles add to it


@dataclass(frozen=True, eq=False)
class TableSite(Site):
    """A module that looks positions up in a matrix of its own.

    Attributes:
        detected: What the probe found of the matrix.
    """

    detected: DetectedTable

    @property
    def table(self) -> torch.Tensor:
        """Return the whole matrix, rows before position 0 included, `[rows, D]`."""
        return getattr(self.module, self.detected.attribute)

    def trained_length(self, config: Any) -> int:
        """Return the rows that positions use."""
        usable = len(self.table) - self.detected.first_row
        return min([usable, *(getattr(config, name) for name in self.detected.fields)])

    def longest_text(self, config: Any) -> int | None:
        """Return the rows of positions; None if the module adds more by itself."""
        rows = len(self.table) - self.detected.first_row
        return None if hasattr(self.module, "make_weights") else rows

    def facts(self, model: nn.Module, stretch: Stretch | None = None) -> SiteFacts:
        """Return the site's facts with its table."""
        facts = super().facts(model, stretch)
        return replace(facts, table=self.detected.attribute, fields=self.detected.fields)

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return the fields that say how many rows there are."""
        assert stretch.length is not None
        more = stretch.length - self.trained_length(config)
        return {name: getattr(config, name) + more for name in self.detected.fields}

    def describe(self, stretch: Stretch) -> str:
        """Return the table's name, kind and rows."""
        return (
            f"{self.name}: {self.kind} table of {stretch.trained_length:,} positions, now "
            f"{stretch.length:,}"
        )

    @abstractmethod
    def rows(self, stretch: Stretch) -> torch.Tensor:
        """Return the stretched rows of positions alone, `[length, D]`."""

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Put the longer table in the place of the trained one, and lengthen what goes with it."""
        first, old = self.detected.first_row, self.table
        with torch.no_grad():
            longer = torch.cat([old[:first], self.rows(stretch).to(old)])
        if isinstance(old, nn.Parameter):
            longer = nn.Parameter(longer, requires_grad=old.requires_grad)
        undo_log.set(self.module, self.detected.attribute, longer)
        if isinstance(self.module, nn.Embedding):
            undo_log.set(self.module, "num_embeddings", len(longer))
        # An encoder's positions are in no cache of self-attention.
        around = [RotaryModule(self.module, {})] if self.part == "decoder" else []
        if around and self.detected.first_row == 0:
            # Positions are rows, whoever counts them: GPT-2 counts slots, which padding fills, too.
            install_position_rule(model, around, undo_log, counts_tokens=True)
        for decoder in innermost_decoders(model, around):
            guard = CacheGuard(f"{self.name} {stretch}")
            undo_log.hook(decoder, before=guard.check, after=guard.mark)
        for module in model.modules():  # Pegasus and DistilBERT make a table of another size
            if callable(getattr(module, _RESIZE, None)):
                refusal = FunctionRefusal(
                    f"{self.name} is stretched by a patch, and a resized table would not be: "
                    "expected undo() first, or rope_patch.patch with another length instead of "
                    "resizing"
                )
                undo_log.set(module, _RESIZE, refusal)
        more = len(longer) - len(old)
        for name, module in model.named_modules():
            for attribute, buffer in list(module._buffers.items()):
                key = ".".join("*" if part.isdigit() else part for part in name.split("."))
                if buffer is None or f"{key}.{attribute}" not in self.detected.companions:
                    continue
                if buffer.shape == old.shape:  # I-BERT's table in whole numbers, made anew
                    longer_buffer = buffer.new_zeros(longer.shape)
                else:
                    longer_buffer = _lengthen(buffer, more, f"{name}.{attribute}")
                undo_log.set(module, attribute, longer_buffer)


@dataclass(frozen=True, eq=False)
class LearnedTableSite(TableSite):
    """A learned table (GPT-2, OPT, BERT, ...)."""

    kind: ClassVar[str] = "learned"
    methods: ClassVar[tuple[str, ...]] = STRETCHES

    def rows(self, stretch: Stretch) -> torch.Tensor:
        """Return the trained rows, interpolated or repeated."""
        assert stretch.length is not None
        first = self.detected.first_row
        trained = self.table[first : first + stretch.trained_length]
        return stretch_table(trained.detach(), stretch.length, stretch.method)


@dataclass(frozen=True, eq=False)
class SinusoidalTableSite(TableSite):
    """A table of sines and cosines (Marian, XGLM, Whisper's encoder, ...).

    Attributes:
        layout: See `sinusoidal_table`; "cosines first" has the halves the other way round.
        law: See `sinusoidal_table`.
    """

    layout: str
    law: str

    kind: ClassVar[str] = "sinusoidal"
    methods: ClassVar[tuple[str, ...]] = ("linear", "ntk")

    @classmethod
    def of(
        cls, name: str, module: nn.Module, detected: DetectedTable
    ) -> SinusoidalTableSite | None:
        """Return the site if its table is a sinusoidal one; else None."""
        table = getattr(module, detected.attribute).detach()
        table = detected.initial if table.is_meta else table
        if table.shape[1] < 4:
            return None
        first = detected.first_row
        for layout in ("halves", "interleaved", "cosines first"):
            for law in LAWS:
                site = cls(name, module, detected, layout, law)
                # fairseq's tables begin at angle 2, in row 2
                expected = site.compute(torch.arange(first, len(table)))
                if torch.allclose(table[first:].double().cpu(), expected, rtol=0, atol=_TOLERANCE):
                    return site
        return None

    def compute(self, positions: torch.Tensor, base: float = _BASE) -> torch.Tensor:
        """Return the encodings of positions, `[N, D]` float64."""
        width = self.table.shape[1]
        layout = "interleaved" if self.layout == "interleaved" else "halves"
        table = sinusoidal_table(positions, width, base=base, layout=layout, law=self.law)
        if self.layout == "cosines first":
            half = width // 2
            table = torch.cat([table[:, half : 2 * half], table[:, :half], table[:, 2 * half :]], 1)
        return table

    def rows(self, stretch: Stretch) -> torch.Tensor:
        """Return sines and cosines of squeezed positions, or of a larger base.

        With `ntk` the slowest wavelength grows by the factor and the fastest stays.
        """
        assert stretch.length is not None
        tokens = torch.arange(stretch.length, dtype=torch.float64)
        if stretch.method == "linear":
            return self.compute(self.detected.first_row + tokens / stretch.factor)
        base = ntk_base(_BASE, stretch.factor, self.table.shape[1], self.law)
        return self.compute(self.detected.first_row + tokens, base)

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Put the computed table in; a module that grows by itself grows no further."""
        super().apply(model, stretch, undo_log)
        if hasattr(self.module, "make_weights"):
            refusal = FunctionRefusal(
                f"the text is longer than the {stretch.length:,} positions that {self.name} was "
                "stretched to, and rows that it adds by itself would not be stretched: expected a "
                "shorter text, or a patch with a larger factor"
            )
            undo_log.set(self.module, "make_weights", refusal)


# Whose trained length is a number of rows. Folders of their patches hold the rows from before.
TABLE_KINDS = frozenset({LearnedTableSite.kind, SinusoidalTableSite.kind})


@dataclass(frozen=True)
class FunctionRefusal:
    """Replacement of a module's own function, which would put unstretched rows in.

    Attributes:
        message: Says why it does not run, and how to go on.
    """

    message: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            ValueError: Always.
        """
        raise Refused(self.message)


def _lengthen(buffer: torch.Tensor, more: int, name: str) -> torch.Tensor:
    """Return a buffer for more positions, continued by the rule that its values follow."""
    # Rules: counts from any number on, one value throughout, or a mask by distance, [..., L, L].
    if buffer.is_meta:
        shape = [*buffer.shape[:-1], buffer.shape[-1] + more]
        if buffer.ndim >= 2 and buffer.shape[-2] == buffer.shape[-1]:
            shape[-2] += more
        return buffer.new_empty(shape)
    length = buffer.shape[-1]
    if buffer.ndim >= 2 and buffer.shape[-2] == length > 1:
        square = buffer.reshape(-1, length, length)[0]
        if torch.equal(square[1:, 1:], square[:-1, :-1]):
            # Values by query - key; those beyond what the mask knows are as the farthest.
            query = torch.arange(length + more, device=buffer.device)
            distance = (query[:, None] - query).clamp(-length + 1, length - 1)
            back, ahead = square[:, 0], square[0]
            longer = torch.where(
                distance >= 0, back[distance.clamp(min=0)], ahead[(-distance).clamp(min=0)]
            )
            return longer.expand(*buffer.shape[:-2], -1, -1).clone()
    row = buffer.reshape(-1, length)[0]
    counts = torch.arange(length + more, device=buffer.device, dtype=buffer.dtype) + row[0]
    if torch.equal(row, counts[:length]):
        return counts.expand(*buffer.shape[:-1], -1)
    if bool((row == row[0]).all()):
        return row[:1].expand(length + more).expand(*buffer.shape[:-1], -1).clone()
    raise Refused(f"{name} has a value for each position, and how they continue is unknown")
