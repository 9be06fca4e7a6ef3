"""LongPPL: perplexity of the tokens that need the far past (arXiv:2410.23771).

Most tokens of a text follow from their sentence, so the mean over all tokens hides whether a model
uses a long context. An evaluator finds the few key tokens: it expects them given a long context,
and not given a short one. The paper's evaluator is a large model. Here it is the model to extend,
without the patch and within its trained length. So key tokens need at most a trained length of
context. They show whether a patched model, far into a text, still uses the context that it could
use before. They cannot show whether it uses more.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rope_patch.evaluation.measures import perplexity
from rope_patch.utils.progress import progress_bar

MIN_LOSS_DROP = 2.0  # nats by which the long context must lower the loss: the paper's alpha
MAX_LONG_LOSS = 2.0  # nats of loss given the long context, at most: the paper's beta


def default_short_context(trained_length: int) -> int:
    """Return an eighth of the trained length, as the paper's 4,096 of 32k; 32 for tiny models."""
    return max(trained_length // 8, min(32, trained_length // 4))


def find_key_tokens(
    evaluator: Any, ids: list[int], trained_length: int, short_context: int, head: int = 0
) -> list[int]:
    """Return the positions of tokens that the evaluator expects only with a long context.

    The long context is all of the past, and beyond the trained length its last half to whole; the
    short one is `short_context` tokens to twice as many. A document costs a pass over the trained
    length for each half of it, and as many passes over two short contexts as there are short
    contexts in it.

    Args:
        evaluator: A transformers model with the tokenizer of the models to measure, unpatched.
        ids: The document's tokens.
        trained_length: The evaluator's, in tokens.
        short_context: Tokens, at most a quarter of the trained length.
        head: As in `perplexity.part`.

    Returns:
        Positions in the document, ascending; none where nothing needs the far past.

    Raises:
        ValueError: The short context is not the shorter one everywhere.
    """
    if not 1 <= short_context <= trained_length // 4:
        raise ValueError(
            f"the short context must be 1 to {trained_length // 4} tokens, a quarter of the "
            f"trained length, got {short_context}"
        )
    long = _losses_given(evaluator, ids, trained_length // 2, head, "long")
    short = _losses_given(evaluator, ids, short_context, head, "short")
    keys = (short - long > MIN_LOSS_DROP) & (long < MAX_LONG_LOSS)
    return [1 + i for i in keys.nonzero().flatten().tolist()]


def losses_at(losses: torch.Tensor, positions: list[int]) -> list[float]:
    """Return the losses of tokens at `positions`, from those of `perplexity.document_losses`."""
    return [losses[position - 1].item() for position in positions]


def longppl(losses: list[float]) -> float:
    """Return the perplexity of the key tokens of all documents; NaN without any."""
    return perplexity.perplexity(sum(losses) / len(losses)) if losses else math.nan


def _losses_given(model: Any, ids: list[int], context: int, head: int, label: str) -> torch.Tensor:
    """Return losses of all tokens but the first, `[S - 1]`, each after `context` tokens or more.

    Windows of `2 * context` tokens overlap by half; all but the first score their second half.
    """
    losses = []
    starts = range(0, max(len(ids) - context, 1), context)
    for start in progress_bar(starts, desc=f"key tokens, {label} context", unit="pass"):
        window = perplexity.excerpt(ids, start, min(start + 2 * context, len(ids)), head)
        scored = len(window) - (context if start else 1)
        losses.append(perplexity.token_losses(model, window, scored, label=f"from {start:,}"))
    return torch.cat(losses)
