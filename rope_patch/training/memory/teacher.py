"""Memory of distillation: the original model, and the loss of distilled rows."""

from __future__ import annotations

from rope_patch.training.memory.model_shape import ModelShape
from rope_patch.training.memory.setup import TrainingSetup
from rope_patch.training.objective.chunk_sums import chunk_length
from rope_patch.training.objective.distillation import COPIES


def teacher_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes of the original model's own weights on each device."""
    if not setup.distils or setup.teacher_dtype is None:
        return 0
    return shape.weights * setup.teacher_dtype.itemsize // setup.shards


def distillation_bytes(
    shape: ModelShape, setup: TrainingSetup, *, tokens: int, trains_head: bool, autocast: bool
) -> tuple[int, int]:
    """Return what the loss of distilled rows holds in its forward and backward pass.

    The original model's own pass holds less than a layer's backward pass: it keeps no activations,
    and is over before the trained model has any.

    Args:
        shape: The model's sizes.
        setup: The training setup.
        tokens: Tokens of this device, all in distilled rows.
        trains_head: Whether the head has a gradient.
        autocast: Whether autocast casts the head for its product.
    """
    table, hidden = shape.embedding_weights, tokens * shape.hidden
    c = (setup.compute_dtype or setup.dtype).itemsize
    teacher_size = (setup.teacher_dtype or setup.dtype).itemsize
    held = table * c * autocast
    held += table * c * (teacher_size != c)  # the original's head, cast
    if setup.shards > 1:
        held += table * teacher_size  # and gathered
    held += 2 * hidden * c  # the original's hidden states, and the gradient of the trained one's
    of_weight = table * 4 if trains_head else 0
    chunk = chunk_length(tokens, shape.hidden, shape.vocab, COPIES)
    product = table * c if trains_head and c != 4 else 0  # added to the gradient in float32
    logits = max(chunk * shape.vocab * 4 * COPIES, product)
    backward = held - hidden * c + of_weight
    return held + of_weight + logits, backward + of_weight * (setup.dtype.itemsize != 4) // 2
