"""What every method is: frozen options, and a pure function from geometry to frequencies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from rope_patch.geometry import Geometry
from rope_patch.utils.errors import one_line

if TYPE_CHECKING:
    import torch

# The stretch that stands for a pair that no longer rotates: JSON has no infinity, and this one is
# finite in float32. It turns a pair by 1e-9 radians in a billion tokens.
NO_ROTATION = 1e18


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The rotation that a method asks for.

    Attributes:
        inv_freq: Radians per token of each pair, float64, `[R / 2]`.
        attention_factor: Multiplier of cos and sin; attention logits get its square.
    """

    inv_freq: torch.Tensor
    attention_factor: float = 1.0

    def same_as(self, other: Frequencies) -> bool:
        """Whether both rotate alike in float32, the precision in which models rotate."""
        import torch

        return self.attention_factor == other.attention_factor and torch.equal(
            self.inv_freq.float(), other.inv_freq.float()
        )

    def close_to(self, other: Frequencies) -> bool:
        """Whether they differ no more than by float32 rounding in how they were computed."""
        import torch

        return (
            self.inv_freq.shape == other.inv_freq.shape
            and abs(self.attention_factor - other.attention_factor) < 1e-6
            and torch.allclose(
                self.inv_freq.double(), other.inv_freq.double(), rtol=2e-6, atol=2 / NO_ROTATION
            )
        )


def option(help: str, **kwargs: Any) -> Any:
    """A dataclass field whose help text the command line shows."""
    return field(metadata={"help": help}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How frequencies stretch. Knows no model: geometry in, frequencies out.

    Subclasses add their options as fields and say where they come from.

    Attributes:
        factor: Target length / trained length.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    training: ClassVar[str]
    is_dynamic: ClassVar[bool] = False  # the factor follows the sequence: users need not give one
    factor_is_option: ClassVar[bool] = False  # what they give is no target, but an option

    factor: float = option("target length / trained length", default=1.0)

    def __post_init__(self) -> None:
        require_number("factor", self.factor)
        if self.factor < 1:
            raise ValueError(
                f"factor must be at least 1 (target length / trained length), got {self.factor}: "
                "a method extends a context, it does not shorten one"
            )

    @property
    def has_config_form(self) -> bool:
        """Whether a config of transformers can say it."""
        return True

    @property
    def start_token_count(self) -> int:
        """Positions below this keep the unextended rotation, whatever `frequencies` says."""
        return 0

    @abstractmethod
    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        """Computes the rotation for one kind of layer.

        Args:
            geometry: The unextended rotation.
            seq_len: Tokens in the sequence, for methods that depend on it; None means the whole
                target length, `factor * trained_length`.

        Returns:
            Frequencies in float64.
        """

    def valid_until(self, length: float, trained_length: int) -> float:
        """How far the rotation that a sequence gets will serve it while it grows.

        Args:
            length: Tokens in the sequence.
            trained_length: Tokens of pretraining.

        Returns:
            The largest length in tokens that is rotated as `length` is; infinite where the
            rotation does not change any more, as in every method that knows no sequence.
        """
        return math.inf

    def frequencies_at(self, geometry: Geometry, length: float) -> Frequencies:
        """The rotation that a sequence of `length` tokens gets, which serves it up to its reach."""
        reach = self.valid_until(length, geometry.trained_length)
        return self.frequencies(geometry, None if math.isinf(reach) else reach)

    def is_length_dependent(self, trained_length: int) -> bool:
        """Whether short sequences are rotated otherwise than long ones."""
        return math.isfinite(self.valid_until(1, trained_length))

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Spells the method as a transformers `rope_parameters` dict that rotates the same.

        Methods without a spelling of their own are written as `longrope` with explicit factors.
        """
        frequencies = self.frequencies(geometry)
        stretch = (
            (geometry.unscaled_inv_freq() / frequencies.inv_freq).clamp(max=NO_ROTATION).tolist()
        )
        return {
            "rope_type": "longrope",
            "factor": float(self.factor),
            "long_factor": stretch,
            "short_factor": stretch,
            "attention_factor": float(frequencies.attention_factor),
            **original_rope_parameters(geometry),
        }

    def options(self) -> dict[str, Any]:
        """The options as plain data, `factor` included."""
        return {f.name: _to_plain_data(getattr(self, f.name)) for f in fields(self)}

    def __str__(self) -> str:
        return f"{self.name} ×{self.factor:g}"


def original_rope_parameters(geometry: Geometry) -> dict[str, Any]:
    """The entries of `rope_parameters` that tell where an extension starts from."""
    return {
        "rope_theta": geometry.theta,
        "original_max_position_embeddings": geometry.trained_length,
    }


def require_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        finite = False
    if not finite:
        raise ValueError(f"{name} must be finite, got {one_line(repr(value), 60)}")


def require_tokens(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a whole number of at least 1."""
    require_number(name, value)
    if value < 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number of tokens, at least 1, got {value!r}")


def _to_plain_data(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
