"""Original length for engines that compute LongRoPE's attention factor from two lengths.

The factor is sqrt(1 + ln(length / original) / ln(original)) (arXiv:2402.13753), which equals
sqrt(ln(length) / ln(original)). So an original length exists for any factor of at least 1.
"""

from __future__ import annotations

from rope_patch.exporting.target import STATIC_ALTERNATIVE, Target


def original_length_for_factor(
    target: Target, engine: str, length: int, attention_factor: float
) -> float:
    """Return the original length that yields an attention factor, usually no whole number.

    Args:
        target: The model, for the error.
        engine: The engine, for the error.
        length: `max_position_embeddings`, in tokens.
        attention_factor: Multiplier of cos and sin to reach.

    Raises:
        ValueError: It is below 1, which no length yields.
    """
    if attention_factor < 1:
        raise target.refuse(
            engine,
            f"an attention factor below 1 ({attention_factor:g}) cannot be said pair by pair "
            "there; leave it out, or " + STATIC_ALTERNATIVE,
        )
    return length if attention_factor == 1 else length ** (1 / attention_factor**2)
