"""Encodings that add a vector to each embedding: none, counted, sinusoidal and learned ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.replacement.encoding import (
    AbsoluteEncoding,
    DecoderShape,
    Encoding,
    register_encoding,
    require_count,
    require_positive,
)
from rope_patch.encodings.sites.probe import DetectedTable
from rope_patch.encodings.sites.site import Site, Stretch
from rope_patch.encodings.sites.table import LearnedTableSite
from rope_patch.encodings.tables import (
    LAYOUTS,
    STRETCHES,
    digit_count,
    digit_table,
    integer_table,
    normalised_table,
    ntk_base,
    sinusoidal_table,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

_LONGEST = 2**16  # positions that digits tell apart, unless their number is given


@register_encoding("none")
class NoPositions(Encoding):
    """No positions at all: a decoder learns the order from its causal mask (arXiv:2203.16634)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()

    def describe(self) -> str:
        return "no positions: order comes from the causal mask alone"


class FixedTable(AbsoluteEncoding):
    """A formula's vector for each position, times a scale.

    Embeddings begin with a spread of about 0.02. Values around 1 drown them, and values around
    0.02 are hardly read, so the scale is trained.

    Attributes:
        scale: The factor, one number.
        stretch: How far `rope_patch.patch` extends the table, or None.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    stretch: Stretch | None = None

    def __init__(
        self, shape: DecoderShape, *, scale: float | None = None, train_scale: bool = True
    ) -> None:
        super().__init__()
        scale = shape.spread if scale is None else scale
        require_positive("scale", scale)
        self.width, self.length = shape.width, shape.length
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=bool(train_scale))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rows = self.rows(positions.flatten()).view(*positions.shape, self.width)
        wide = torch.promote_types(self.scale.dtype, torch.float32)
        return rows.to(wide) * self.scale.to(wide)

    @abstractmethod
    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the unscaled vectors of positions `[N]`, `[N, D]`."""

    def read_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where the formula is read: at positions divided by the factor of `linear`."""
        if self.stretch is None or self.stretch.method != "linear":
            return positions
        return positions.double() / self.stretch.factor

    def sites(self, name: str) -> Sequence[Site]:
        return [_SITES[self.methods](name, self, self.length)] if self.methods else []

    def _scale_text(self) -> str:
        trained = "trained" if self.scale.requires_grad else "fixed"
        value = "without weights" if self.scale.is_meta else f"{self.scale.item():.4g}"
        return f"scale {value}, {trained}"


@register_encoding("integer")
class IntegerTable(FixedTable):
    """The position itself in every component."""

    methods = ("linear",)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        return integer_table(self.read_positions(positions), self.width)

    def describe(self) -> str:
        return f"every component of an embedding gets its position ({self._scale_text()})"


@register_encoding("normalised")
class NormalisedTable(FixedTable):
    """The position divided by a length that stays, in every component.

    Attributes:
        divisor: The option `length`; the config's longest text unless given.
    """

    methods = ("linear",)

    def __init__(
        self,
        shape: DecoderShape,
        *,
        length: int | None = None,
        scale: float | None = None,
        train_scale: bool = True,
    ) -> None:
        super().__init__(shape, scale=scale, train_scale=train_scale)
        self.divisor = shape.length if length is None else length
        require_count("length", self.divisor)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        return normalised_table(self.read_positions(positions), self.width, self.divisor)

    def describe(self) -> str:
        return (
            f"every component of an embedding gets its position / {self.divisor:,} "
            f"({self._scale_text()})"
        )


@register_encoding("binary")
class DigitTable(FixedTable):
    """The digits of the position, one a component, repeated to fill the width.

    Attributes:
        base: Of the number system; 2 gives bits.
        digits: How many there are; positions repeat after base ** digits.
    """

    def __init__(
        self,
        shape: DecoderShape,
        *,
        base: int = 2,
        digits: int | None = None,
        signed: bool = True,
        largest_first: bool = False,
        repeat: bool = True,
        scale: float | None = None,
        train_scale: bool = True,
    ) -> None:
        super().__init__(shape, scale=scale, train_scale=train_scale)
        require_count("base", base, least=2)
        digits = min(digit_count(_LONGEST, base), shape.width) if digits is None else digits
        require_count("digits", digits)
        if digits > shape.width:
            raise Refused(f"{digits} digits need as many components, got a width of {shape.width}")
        self.base, self.digits = base, digits
        self._form = {"signed": signed, "largest_first": largest_first, "repeat": repeat}

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        form: Any = self._form
        return digit_table(positions, self.width, count=self.digits, base=self.base, **form)

    def describe(self) -> str:
        return (
            f"components of an embedding get the {self.digits} digits of its position in base "
            f"{self.base} ({self._scale_text()})"
        )


@register_encoding("sinusoidal")
class SinusoidalTable(FixedTable):
    """Sines and cosines of the position (arXiv:1706.03762), for any length.

    Attributes:
        layout: See `rope_patch.encodings.tables.sinusoidal_table`.
        base: Theta.
    """

    methods = ("linear", "ntk")

    def __init__(
        self,
        shape: DecoderShape,
        *,
        layout: str = "interleaved",
        base: float = 10000.0,
        scale: float | None = None,
        train_scale: bool = True,
    ) -> None:
        super().__init__(shape, scale=scale, train_scale=train_scale)
        if layout not in LAYOUTS:
            raise Refused(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        require_positive("base", base)
        self.layout, self.base = layout, float(base)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        base = self.base
        if self.stretch is not None and self.stretch.method == "ntk":
            base = ntk_base(base, self.stretch.factor, self.width)
        return sinusoidal_table(
            self.read_positions(positions), self.width, base=base, layout=self.layout
        )

    def describe(self) -> str:
        return (
            f"embeddings get sines and cosines of their position, base {self.base:g}, "
            f"{self.layout} ({self._scale_text()})"
        )


@register_encoding("learned")
class LearnedTable(AbsoluteEncoding):
    """A trained vector for each position, up to a length.

    Attributes:
        table: The vectors.
    """

    def __init__(self, shape: DecoderShape, *, length: int | None = None) -> None:
        super().__init__()
        length = shape.length if length is None else length
        require_count("length", length)
        self.table = nn.Embedding(length, shape.width)
        nn.init.normal_(self.table.weight, std=shape.spread)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table(positions)

    def require_known(self, positions: torch.Tensor, slots: int | None) -> None:
        """Raise if positions lie beyond the table.

        Elsewhere than on a CPU, positions are not read where the cache's slots are within the
        table, as counted positions then are, too; torch stops at others by itself, without advice.

        Raises:
            ValueError: They do; says how many rows there are, and what has more.
        """
        rows = self.table.num_embeddings
        if slots is not None and slots <= rows and positions.device.type != "cpu":
            return
        last = int(positions.max())
        if last >= rows:
            raise Refused(
                f"position {last:,} lies beyond the {rows:,} rows of the learned table: expected a "
                f"shorter text, or a stretched table (rope_patch.patch(model, 'linear', "
                f"length={last + 1}); also {', '.join(STRETCHES[1:])})"
            )

    def sites(self, name: str) -> Sequence[Site]:
        table = f"{name}.table"
        detected = DetectedTable(table, "weight", 0, (), (), self.table.weight)
        return [LearnedTableSite(table, self.table, detected)]

    def describe(self) -> str:
        return f"embeddings get a trained row for each of {self.table.num_embeddings:,} positions"


@dataclass(frozen=True, eq=False)
class FixedTableSite(Site):
    """A formula's table, read at squeezed positions.

    Attributes:
        length: Tokens of the longest text that the config stated when the model was encoded.
    """

    length: int

    kind: ClassVar[str] = "counted"
    methods: ClassVar[tuple[str, ...]] = ("linear",)

    def trained_length(self, config: Any) -> int:
        """Return the length that the config stated."""
        return self.length

    def describe(self, stretch: Stretch) -> str:
        """Return how positions are read."""
        if stretch.method == "ntk":
            return f"{self.name}: the slowest wavelength grows by {stretch.factor:g}"
        return f"{self.name}: positions are divided by {stretch.factor:g}"

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Have the encoding read its formula at other positions, or with another base."""
        undo_log.set(self.module, "stretch", stretch)


@dataclass(frozen=True, eq=False)
class ComputedSinusoidsSite(FixedTableSite):
    """Sines and cosines that are computed for each forward."""

    kind: ClassVar[str] = "sinusoidal"
    methods: ClassVar[tuple[str, ...]] = ("linear", "ntk")


_SITES = {site.methods: site for site in (FixedTableSite, ComputedSinusoidsSite)}
