"""Memory of context parallelism: what attention holds beside its own part of a row, by kind.

With `allgather` (accelerate's default) every device gathers the keys and values of the whole row.
With `ring` the devices pass them around, so that each holds its own part and the one in flight.
With `ulysses` (DeepSpeed) the devices exchange heads: each attends over the whole row, for its
share of the heads. Two processes on a CPU measured all three; tests/distributed compares.
"""

from __future__ import annotations

from rope_patch.training.memory.model_shape import ModelShape
from rope_patch.utils.errors import Refused

KINDS = ("allgather", "ring", "ulysses")


def require_kind(kind: str, shape: ModelShape, parts: int) -> None:
    """Raise if a model's attention cannot be shared in this way.

    Args:
        kind: allgather, ring or ulysses.
        shape: The model's sizes.
        parts: Devices that share a row.

    Raises:
        ValueError: The kind is unknown; or Ulysses has heads that cannot be divided.
    """
    if kind not in KINDS:
        raise ValueError(f"context_kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind != "ulysses":
        return
    key_heads = shape.key // shape.head_dim
    if shape.heads % parts or (key_heads % parts and parts % key_heads):
        fitting = [
            number
            for number in range(1, shape.heads + 1)
            if shape.heads % number == 0 and (key_heads % number == 0 or number % key_heads == 0)
        ]
        raise Refused(
            f"Ulysses gives every device whole heads: expected a number of devices that divides "
            f"{shape.heads} heads and divides, or is a multiple of, {key_heads} key heads "
            f"({', '.join(map(str, fitting))}), got {parts}: change parallelism_config_sp_size, or "
            "use a ring (fsdp2_cp8.yaml)"
        )


def exchange_bytes(
    kind: str, shape: ModelShape, *, tokens: int, row_tokens: int, parts: int, number_size: int
) -> int:
    """Return the bytes that the backward pass of one attention holds for the exchange.

    Args:
        kind: allgather, ring or ulysses.
        shape: The model's sizes.
        tokens: Tokens of this device.
        row_tokens: Tokens of whole rows.
        parts: Devices that share a row.
        number_size: Bytes of a number in the precision of the computation.
    """
    if parts == 1:
        return 0
    if kind == "ulysses":
        # Queries, keys and values after the exchange, and their gradients. Devices beyond the
        # number of key heads hold copies of them.
        copies = max(1, parts * shape.head_dim // shape.key)
        return tokens * 2 * (shape.query + 2 * shape.key * copies) * number_size
    # Gradients are summed in float32: queries' with a copy while a part is added; of keys and
    # values the sums, a copy, what is sent and half of what is received on average.
    sums = tokens * (2 * 4 * shape.query + 7 * 4 * shape.key)
    own = tokens * 2 * shape.key * number_size  # twice: in use, and in flight or to be gathered
    whole = row_tokens * 2 * shape.key * number_size if kind == "allgather" else 0
    return sums + 2 * own + whole
