"""An attention factor for readers that make it from two lengths alone.

LongRoPE's is sqrt(1 + ln(length / original) / ln(original)) (arXiv:2402.13753), which is
sqrt(ln(length) / ln(original)). So any factor from 1 on is an original length.
"""

from __future__ import annotations

from rope_patch.exporting.target import STATIC_ALTERNATIVE, Target


def original_length_for_factor(
    target: Target, engine: str, length: int, attention_factor: float
) -> float:
    """The original length that gives an attention factor, not a whole number as a rule.

    Args:
        target: The model, for the error.
        engine: The engine, for the error.
        length: `max_position_embeddings`, in tokens.
        attention_factor: The multiplier of cos and sin that is wanted.

    Raises:
        ValueError: It is below 1, which no length gives.
    """
    if attention_factor < 1:
        raise target.refuse(
            engine,
            f"an attention factor below 1 ({attention_factor:g}) cannot be said pair by pair "
            "there; leave it out, or " + STATIC_ALTERNATIVE,
        )
    return length if attention_factor == 1 else length ** (1 / attention_factor**2)
