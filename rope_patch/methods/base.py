"""Base class of methods: frozen options, and a pure function from geometry to frequencies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from rope_patch.geometry import Geometry
from rope_patch.methods.temperature import Temperature
from rope_patch.utils.errors import Refused, one_line

if TYPE_CHECKING:
    import torch

# Stretch of a pair that no longer rotates. JSON has no infinity, and this is finite in float32: it
# rotates a pair by 1e-9 radians in a billion tokens.
NO_ROTATION = 1e18


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The rotation that a method computes.

    Attributes:
        inv_freq: Radians per token of each pair, float64, `[R / 2]`.
        attention_factor: Multiplier of cos and sin; attention logits get its square.
    """

    inv_freq: torch.Tensor
    attention_factor: float = 1.0

    @property
    def key(self) -> str:
        """Return a key that is equal for equal numbers in float32, in which models rotate."""
        import torch

        numbers = [*self.inv_freq.tolist(), self.attention_factor]
        return torch.tensor(numbers, dtype=torch.float32, device="cpu").numpy().tobytes().hex()

    def same_as(self, other: Frequencies) -> bool:
        """Return whether both are equal in float32."""
        return self.key == other.key

    def close_to(self, other: Frequencies) -> bool:
        """Return whether both are equal up to float32 rounding in their computation.

        This is no key: of three rotations the first may be close to the second, and the second to
        the third, and the first not to the third.
        """
        import torch

        return (
            self.inv_freq.shape == other.inv_freq.shape
            and abs(self.attention_factor - other.attention_factor) < 1e-6
            and torch.allclose(
                self.inv_freq.double(), other.inv_freq.double(), rtol=2e-6, atol=2 / NO_ROTATION
            )
        )


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a model's layers for sequences of one length.

    Attributes:
        frequencies: By layer type.
        softmax_mscale: mscale in the softmax scale (squared) of MLA models; 1 for all others.
    """

    frequencies: dict[str | None, Frequencies]
    softmax_mscale: float = 1.0

    def close_to(self, other: Rotation) -> bool:
        """Return whether both rotate alike, up to float32 rounding in their computation."""
        return (
            self.frequencies.keys() == other.frequencies.keys()
            and abs(self.softmax_mscale - other.softmax_mscale) < 1e-6
            and all(
                each.close_to(other.frequencies[layer_type])
                for layer_type, each in self.frequencies.items()
            )
        )


def option(help: str, **kwargs: Any) -> Any:
    """Return a dataclass field with a help text for the command line."""
    return field(metadata={"help": help}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A rule that stretches frequencies: geometry in, frequencies out, without a model.

    Subclasses add their options as fields and cite their source.

    Attributes:
        factor: Target length / trained length.
        temperature: Factor on the attention logits of each query; see `Temperature`. None for 1.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    training: ClassVar[str]
    is_dynamic: ClassVar[bool] = False  # the factor follows the sequence length
    factor_is_option: ClassVar[bool] = False  # `factor` is not target / trained length

    factor: float = option("target length / trained length", default=1.0)
    temperature: float | str | None = option(
        "factor on the attention logits, by the query's position: a number, log-n, llama4 (with "
        "another beta than 0.1: llama4:BETA), or drope:COEFFICIENT; none unless given",
        default=None,
    )

    def __post_init__(self) -> None:
        require_number("factor", self.factor)
        if self.factor < 1:
            raise Refused(
                f"factor must be at least 1 (target length / trained length), got {self.factor}: "
                "a method extends a context, it does not shorten one"
            )
        if self.temperature is not None:
            if not isinstance(self.temperature, str):
                require_number("temperature", self.temperature)
            Temperature.parse(self.temperature)

    @property
    def query_temperature(self) -> Temperature | None:
        """Return the temperature that multiplies queries; None if no logit changes."""
        if self.temperature is None:
            return None
        temperature = Temperature.parse(self.temperature)
        return temperature if temperature.changes_logits else None

    @property
    def is_native(self) -> bool:
        """Return whether one pass in plain transformers equals the method's at every length.

        A config then expresses the method with its temperature.
        """
        return self.has_config_form and self.query_temperature is None

    @property
    def has_config_form(self) -> bool:
        """Return whether a transformers config can express the rotation."""
        return True

    @property
    def start_token_count(self) -> int:
        """Return how many first positions keep the unextended rotation, not `frequencies`."""
        return 0

    @property
    def fixed_at_admission(self) -> bool:
        """Return whether a sequence keeps the frequencies that its cache begins with."""
        return False

    @abstractmethod
    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        """Compute the rotation of one layer type.

        Args:
            geometry: The unextended rotation.
            seq_len: Tokens in the sequence, for methods that depend on it; None for the target
                length, `factor * trained_length`.

        Returns:
            Frequencies in float64.
        """

    def valid_until(self, length: float, trained_length: int) -> float:
        """Return the largest length with the same frequencies as `length`.

        Args:
            length: Tokens in the sequence.
            trained_length: Context length in pretraining, in tokens.

        Returns:
            Tokens; infinite if the frequencies stay the same for all longer sequences.
        """
        return math.inf

    def frequencies_at(self, geometry: Geometry, length: float) -> Frequencies:
        """Compute the rotation of a sequence of `length` tokens; it holds up to `valid_until`."""
        valid_until = self.valid_until(length, geometry.trained_length)
        return self.frequencies(geometry, None if math.isinf(valid_until) else valid_until)

    def is_length_dependent(self, trained_length: int) -> bool:
        """Return whether frequencies depend on the sequence length."""
        return math.isfinite(self.valid_until(1, trained_length))

    def attention_changes(self, length: float, trained_length: int) -> dict[str, Any]:
        """Return what changes attention besides frequencies; equal for methods that do the same.

        Args:
            length: Tokens in the sequence.
            trained_length: Context length in pretraining, in tokens.

        Returns:
            Plain data by kind of change; empty if frequencies alone change.
        """
        temperature = self.query_temperature
        if temperature is None or length <= temperature.first_position(trained_length):
            return {}
        return {"temperature": [temperature.kind, temperature.coefficient, trained_length]}

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return transformers `rope_parameters` with the same rotation.

        Methods without a rope_type of their own are written as `longrope` with explicit factors.
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
        """Return the options as plain data, including `factor`; `temperature` only if given."""
        values = {f.name: _to_plain_data(getattr(self, f.name)) for f in fields(self)}
        if self.temperature is None:
            del values["temperature"]
        return values

    def __str__(self) -> str:
        return f"{self.name} ×{self.factor:g}"


def original_rope_parameters(geometry: Geometry) -> dict[str, Any]:
    """Return the `rope_parameters` entries for the rotation that an extension starts from."""
    return {
        "rope_theta": geometry.theta,
        "original_max_position_embeddings": geometry.trained_length,
    }


def require_number(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        finite = False
    if not finite:
        raise Refused(f"{name} must be finite, got {one_line(repr(value), 60)}")


def require_tokens(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a whole number of at least 1."""
    require_number(name, value)
    if value < 1 or value != int(value):
        raise Refused(f"{name} must be a whole number of tokens, at least 1, got {value!r}")


def _to_plain_data(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
