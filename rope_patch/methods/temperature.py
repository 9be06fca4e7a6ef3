"""Temperatures: the factor by which attention logits are multiplied, by the query's position.

A query at position p sees n = p + 1 tokens. With the trained length L:

- a number: the same factor at every position; "none" is 1;
- "log-n": ln(n) / ln(L) beyond L (kexue.fm/archives/8823, by Jianlin Su);
- "llama4": 1 + beta ln(1 + floor(p / L)), beta 0.1 unless given, as "llama4:0.2" (Llama 4; the
  `llama_4_scaling_beta` of Ministral 3 in transformers);
- "drope:0.412": 1 + 0.412 ln(n / L) beyond L, with any coefficient (DroPE, arXiv:2512.12167, which
  has one n for a whole text).

All but the number are 1 up to the trained length. Keys are left alone, so caches stay valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.utils.errors import Refused, did_you_mean

if TYPE_CHECKING:
    import torch

# Each kind that is named, and its coefficient unless given; None where it must be given.
_KINDS: dict[str, float | None] = {"log-n": 1.0, "llama4": 0.1, "drope": None}
_WITHOUT_COEFFICIENT = ("log-n",)


@dataclass(frozen=True)
class Temperature:
    """A temperature of queries.

    Attributes:
        kind: "constant", "log-n", "llama4" or "drope".
        coefficient: The constant itself, beta of "llama4", or the coefficient of "drope".
    """

    kind: str
    coefficient: float

    @classmethod
    def parse(cls, value: float | str) -> Temperature:
        """Return the temperature that an option says.

        Args:
            value: A finite number, or a kind with its coefficient, such as "llama4:0.1".

        Raises:
            ValueError: An unknown kind, or a coefficient that is missing or out of range.
        """
        if not isinstance(value, str):
            if value < 1:
                raise Refused(
                    "temperature must be at least 1, because a number multiplies all attention "
                    f"logits, got {value!r}; for DroPE's 1 + {value!r} ln(n / trained length) "
                    f"write temperature='drope:{value}'"
                )
            return cls("constant", float(value))
        if value == "none":
            return cls("constant", 1.0)
        kind, separator, text = value.partition(":")
        if kind not in _KINDS:
            raise Refused(
                f"temperature must be a number or one of {', '.join(_KINDS)}, got "
                f"{value!r}{did_you_mean(kind, _KINDS)}"
            )
        default = _KINDS[kind]
        if not separator and default is not None:
            return cls(kind, default)
        if kind in _WITHOUT_COEFFICIENT:
            raise Refused(f"temperature {kind!r} has no coefficient, got {value!r}")
        try:
            coefficient = float(text)
        except ValueError:
            coefficient = math.nan
        if not 0 < coefficient < math.inf:
            raise Refused(
                f"temperature {kind!r} needs a coefficient above 0, such as '{kind}:0.1', got "
                f"{value!r}"
            )
        return cls(kind, coefficient)

    @property
    def changes_logits(self) -> bool:
        """Return whether some query has another factor than 1."""
        return self.kind != "constant" or self.coefficient != 1

    def first_position(self, trained_length: int) -> int:
        """Return the first position whose query has another factor than 1, if any has."""
        return 0 if self.kind == "constant" else trained_length

    def require_trained_length(self, trained_length: int) -> None:
        """Raise if the factor cannot be computed for a trained length."""
        if self.kind == "log-n" and trained_length < 2:
            raise Refused(
                "temperature 'log-n' divides by ln(trained_length), so the trained length must be "
                f"at least 2 tokens, got {trained_length}"
            )

    def factors(
        self, positions: torch.Tensor, trained_length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the factor of each query.

        Args:
            positions: Whole numbers, of any shape.
            trained_length: L, in tokens.
            dtype: Of the result, with at least 32 bits.
        """
        import torch

        positions = positions.clamp(min=0)  # padding has any position
        if self.kind == "constant":
            return torch.full_like(positions, self.coefficient, dtype=dtype)
        if self.kind == "llama4":
            periods = torch.div(positions, trained_length, rounding_mode="floor")
            return 1 + self.coefficient * torch.log1p(periods.to(dtype))
        tokens = (positions + 1).to(dtype)
        growth = torch.log(tokens / trained_length).clamp(min=0)  # 0 up to the trained length
        self.require_trained_length(trained_length)
        scale = 1 / math.log(trained_length) if self.kind == "log-n" else self.coefficient
        return 1 + scale * growth

    def describe(self, trained_length: int) -> str:
        """Return the factor as a formula."""
        length = f"{trained_length:,}"
        return {
            "constant": f"{self.coefficient:g}",
            "log-n": f"ln(n) / ln({length}) beyond {length} tokens",
            "llama4": f"1 + {self.coefficient:g} ln(1 + floor(position / {length}))",
            "drope": f"1 + {self.coefficient:g} ln(n / {length}) beyond {length} tokens",
        }[self.kind]
