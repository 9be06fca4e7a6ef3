"""Growth of a rotation with the sequence: in steps, with every token, or fixed at admission.

Fixing the factor when a request is admitted, from its prompt and the tokens it may generate, is
the idea of github.com/vllm-project/vllm/pull/53964.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rope_patch.methods.base import Method, option
from rope_patch.utils.errors import Refused

_ADMISSION = "admission"
_GROWTH_CHOICES = ("stepped", "exact", _ADMISSION)
_STEPS_PER_DOUBLING = 4  # the factor is on the grid 2^(k / 4)


@dataclass(frozen=True, kw_only=True)
class LengthGrowth(Method):
    """Base of methods whose rotation changes with the length beyond the trained one."""

    is_dynamic: ClassVar[bool] = True

    growth: str = option(
        "stepped: the factor rises on the grid 2^(k/4), so cached keys are seldom rotated again; "
        "exact: with every token; admission: the step that serves the prompt and all new tokens "
        "that are read, from the first token on, so no cached key is ever rotated again",
        default="stepped",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth not in _GROWTH_CHOICES:
            raise Refused(
                f"growth must be one of {', '.join(_GROWTH_CHOICES)}, got {self.growth!r}"
            )

    @property
    def fixed_at_admission(self) -> bool:
        return self.growth == _ADMISSION

    def valid_until(self, length: float, trained_length: int) -> float:
        if length <= trained_length:
            return float(trained_length)
        if self.growth == "exact":
            return float(length)
        step = math.ceil(_STEPS_PER_DOUBLING * math.log2(length / trained_length))
        # Rounding of the logarithm can be off by one step at the steps themselves.
        while _step_length(step - 1, trained_length) >= length:
            step -= 1
        while _step_length(step, trained_length) < length:
            step += 1
        return _step_length(step, trained_length)


def _step_length(step: int, trained_length: int) -> float:
    return trained_length * 2 ** (step / _STEPS_PER_DOUBLING)
