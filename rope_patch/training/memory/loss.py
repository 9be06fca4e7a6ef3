"""Memory of the loss: logits, their gradients, and what a chunked loss keeps."""

from __future__ import annotations

import math

from rope_patch.training.memory.model_shape import ModelShape
from rope_patch.training.memory.setup import TrainingSetup
from rope_patch.training.objective.chunk_sums import COPIES, chunk_length


def loss_bytes(
    shape: ModelShape, setup: TrainingSetup, *, tokens: int, trains_head: bool, autocast: bool
) -> tuple[int, int]:
    """Return what the loss holds in its forward and backward pass, beside the hidden states.

    Args:
        shape: The model's sizes.
        setup: The training setup.
        tokens: Tokens of this device.
        trains_head: Whether the head has a gradient.
        autocast: Whether autocast casts the head for its product.
    """
    weight_size = setup.dtype.itemsize
    c = (setup.compute_dtype or setup.dtype).itemsize
    weight = shape.embedding_weights * c * autocast  # cast for the product and saved
    if setup.loss_terms:
        held_forward, held_backward = _bytes_with_terms(shape, setup, tokens, trains_head)
        return weight + held_forward, weight + held_backward
    if setup.loss == "full":
        # In float32: a copy, log-probabilities, and two gradients while one becomes the other.
        forward = tokens * shape.vocab * (8 if c == 4 else 8 + c)
        return forward + weight, tokens * shape.vocab * 12 + weight
    chunk = 1 << (math.ceil(tokens / math.ceil(shape.vocab / shape.hidden)) - 1).bit_length()
    of_weight, of_hidden = (shape.embedding_weights if trains_head else 0), tokens * shape.hidden
    if setup.loss == "liger":
        logits = min(chunk, tokens) * shape.vocab * (4 + c)
        held_bytes = weight + of_hidden * c + of_weight * (4 + c) + logits
        return held_bytes, held_bytes
    chunk = min(max(1, chunk // 2), tokens)  # as LinearCrossEntropyOptions() halves it
    if c == 4:  # the forward pass computes the gradients; autograd adds zeros backward
        held_bytes = of_weight * 4 + of_hidden * 4
        return held_bytes + chunk * shape.vocab * 4, 2 * held_bytes
    # In 16 bits chunked_loss.py sums per-token losses, so gradients are computed backward.
    logits = chunk * shape.vocab * (4 + c)
    held_bytes = weight + of_hidden * c + of_weight * c
    return weight + logits, held_bytes + max(logits, of_weight * weight_size * autocast)


def _bytes_with_terms(
    shape: ModelShape, setup: TrainingSetup, tokens: int, trains_head: bool
) -> tuple[int, int]:
    """Return the same for a loss with terms, whose gradients are computed in the forward pass."""
    weight_size, whole = setup.dtype.itemsize, setup.loss == "full"
    c = (setup.compute_dtype or setup.dtype).itemsize
    of_weight = shape.embedding_weights * 4 if trains_head and not whole else 0
    width = shape.vocab if whole else shape.hidden
    chunk = chunk_length(tokens, width, shape.vocab)
    held_bytes = tokens * width * c + of_weight
    is_view = whole and c == 4  # a chunk of the logits themselves
    temporaries = chunk * shape.vocab * 4 * (COPIES - is_view)
    if whole:
        held_bytes += tokens * shape.vocab * c  # the logits
        return held_bytes + temporaries, held_bytes
    product = of_weight // 4 * c if c != 4 else 0  # added to the gradient in float32
    cast = of_weight // 4 * weight_size if weight_size != 4 else 0
    return held_bytes + max(temporaries, product), held_bytes + cast
