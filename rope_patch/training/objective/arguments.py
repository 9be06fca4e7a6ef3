"""Recipe keys for what training minimises besides the loss of the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rope_patch.utils.errors import Refused


@dataclass
class ObjectiveArguments:
    """Recipe keys for the terms of the objective."""

    distillation_weight: float = field(
        default=0.0,
        metadata={
            "help": "Train short rows to predict as the original model does: the weight of that "
            "divergence, which takes the place of their loss; 0 trains them on their text."
        },
    )
    distillation_temperature: float = field(
        default=1.0, metadata={"help": "Divide the logits of both models by it for that."}
    )


def check_objective(arguments: ObjectiveArguments, settings: Any) -> None:
    """Check the keys of the objective against the rest of a recipe.

    Args:
        arguments: The keys.
        settings: The recipe.

    Raises:
        ValueError: A value does not fit; says what does.
    """
    z_loss, training = settings.extension.z_loss, settings.training
    if not (z_loss >= 0 and math.isfinite(z_loss)):
        raise ValueError(f"z_loss must be 0 or above, got {z_loss}")
    if z_loss and training.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor makes the Trainer compute the loss, which has no z_loss then: "
            "expected one of the two"
        )
    weight, temperature = arguments.distillation_weight, arguments.distillation_temperature
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(
            f"distillation_weight must be a number of at least 0, such as 1, got {weight}"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"distillation_temperature must be a number above 0, such as 1, got {temperature}"
        )
    if weight == 0:
        return
    share = settings.data.short_share
    if not share > 0:
        raise Refused(
            "distillation_weight trains short rows to predict as the original model does: expected "
            f"short rows, such as short_share: 0.25, got short_share {share:g}"
        )
    for key, off in (("label_smoothing_factor", 0.0), ("torch_compile", False)):
        if (value := getattr(training, key)) != off:
            raise Refused(f"{key}: {value} does not go with distillation_weight: leave one out")


def require_known_length(arguments: ObjectiveArguments, short_length: int, trained: int) -> None:
    """Raise if the original model would teach texts longer than it was trained on.

    Args:
        arguments: The keys of the objective.
        short_length: Tokens of the longest document in a short row.
        trained: The original model's trained length in tokens.

    Raises:
        Refused: The documents are too long.
    """
    if arguments.distillation_weight > 0 and short_length > trained:
        raise Refused(
            f"distillation_weight: the original model was trained on {trained:,} tokens, and "
            f"knows nothing of longer texts: expected short_length of at most that, got "
            f"{short_length:,}"
        )
