"""Compute losses of a long document's tokens, and perplexity: by position, key token and window.

In come a live model and a document's tokens; out come losses of the tokens or of blocks of them.
Perplexities and their intervals are computed from these when a report is written.

LongPPL is the perplexity of the tokens that need the far past (arXiv:2410.23771). Most tokens of a
text follow from their sentence, so the mean over all tokens hides whether a model uses a long
context. An evaluator finds the few key tokens: it expects them given a long context, and not given
a short one. The paper's evaluator is a large model. Here it is the model to extend, without the
patch and within its trained length. So key tokens need at most a trained length of context. They
show whether a patched model, far into a text, still uses the context that it could use before. They
cannot show whether it uses more.

Perplexity by sliding windows scores the same tokens after more and more context. It follows the
protocol of Press et al. (arXiv:2108.12409) as YaRN uses it (arXiv:2309.00071), with a stride of 256
tokens, of which only some windows, spread evenly, are run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rope_patch.patching import current
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.transformers_api.models import decoder_layer_class, decoder_output
from rope_patch.utils.terminal import progress_bar

BLOCK = 64  # positions whose mean loss is kept
HEAD_CHUNK = 512  # positions whose logits exist at once
PREFILL_CHUNK = 2048  # tokens that models with windows read at once


def default_window(length: int) -> int:
    """Return the power of two nearest below a twelfth of the length: some sixteen points."""
    return max(16, 2 ** int(math.log2(max(length // 12, 1))))


def block_size(window: int) -> int:
    """Return the tokens of a block, for points of `window` tokens made of whole blocks.

    Raises:
        ValueError: The window is not made of whole blocks.
    """
    block = min(BLOCK, window)
    if window < 2 or window % block:
        raise ValueError(
            f"the window must be a multiple of {BLOCK} tokens, or 2 to {BLOCK - 1}, got {window}: "
            f"try {max(1, round(window / BLOCK)) * BLOCK}"
        )
    return block


def document_losses(model: Any, ids: list[int], label: str) -> torch.Tensor:
    """Return the losses of a document's tokens, each given all tokens before it.

    Args:
        model: A transformers model, patched or not.
        ids: The document's tokens.
        label: The label on the progress bar.

    Returns:
        Negative log-likelihoods in nats, `[S - 1]`, float32: the i-th is of the token at position
        i + 1, since the first token has nothing before it.
    """
    return token_losses(model, ids, scored=len(ids) - 1, label=label)


def block_losses(losses: torch.Tensor, block: int) -> list[float]:
    """Return means over blocks of positions, which are kept instead of single tokens' losses.

    Args:
        losses: What `document_losses` returns, `[S - 1]`.
        block: Positions in a block.

    Returns:
        The mean loss of positions `k * block` to `(k + 1) * block - 1`, for every whole block. The
        first block has one loss fewer than positions.
    """
    ends = range(block, len(losses) + 2, block)
    return [losses[max(e - block - 1, 0) : e - 1].double().mean().item() for e in ends]


def curve_points(
    documents: Sequence[Sequence[float]], block: int, window: int
) -> list[dict[str, int | float]]:
    """Return a curve of perplexity against position, pooled over documents.

    Every token counts the same, whichever document it is from; a document that ends early counts in
    the windows that it fills.

    Args:
        documents: What `block_losses` returned for each document.
        block: Positions in a block.
        window: Positions that make a point, a multiple of the block.

    Returns:
        Points with end (position, tokens), tokens (scored in the window), nll (mean, nats) and
        perplexity.
    """
    size = window // block
    points: list[dict[str, int | float]] = []
    for stop in range(size, max(map(len, documents), default=0) + 1, size):
        means = [
            (block if k else block - 1, document[k])
            for document in documents
            if len(document) >= stop
            for k in range(stop - size, stop)
        ]
        tokens = sum(count for count, _ in means)
        nll = sum(count * mean for count, mean in means) / tokens
        points.append(
            {"end": stop * block, "tokens": tokens, "nll": nll, "perplexity": perplexity(nll)}
        )
    return points


def perplexity(nll: float) -> float:
    """Return `exp(nll)`, infinite where a float cannot hold it."""
    return math.inf if nll >= 700 else math.exp(nll)


def control_positions(length: int, window: int, context: int) -> list[int]:
    """Return where the control is measured: every second window beyond the first context."""
    return [e for e in range(2 * window, length + 1, 2 * window) if e > context]


def control_loss(
    model: Any, ids: list[int], end: int, window: int, context: int, head: int = 0
) -> float:
    """Return the mean loss of the window that ends at `end`, given the last `context` tokens.

    One pass over `context` tokens scores the last `window` of them. It gives the loss of the same
    text within the trained length, without the far past.

    Args:
        model: A transformers model, as it was trained.
        ids: The document's tokens.
        end: Position after the window.
        window: Tokens scored.
        context: Tokens of the pass, more than the window.
        head: As in `excerpt`.

    Returns:
        The mean negative log-likelihood, nats.
    """
    ids = excerpt(ids, end - context, end, head)
    return token_losses(model, ids, window, label=f"control {end:,}").double().mean().item()


def excerpt(ids: list[int], start: int, stop: int, head: int) -> list[int]:
    """Return `stop - start` tokens of a document, as a text of their own.

    Args:
        ids: The document's tokens.
        start: First position.
        stop: Position after the last.
        head: Tokens at the document's start that every text of this model starts with, such as a
            beginning-of-sequence token. They take the place of the part's first tokens: some
            models, Gemma above all, are lost without.
    """
    return ids[:head] + ids[start + head : stop]


@singledispatch
def token_losses(
    model: Any, ids: list[int], scored: int, label: str, read_last: bool = True
) -> torch.Tensor:
    """Return losses of the last `scored` tokens, in nats, from one pass, `[scored]`, float32.

    The decoder runs over everything once; the head, and whatever the model does to its logits, runs
    over a few hundred positions at a time, so memory does not grow with length x vocabulary.

    Args:
        model: A transformers causal language model, or another kind of model that is registered.
        ids: Tokens, at least two.
        scored: The number of tokens to score, from the end.
        label: The label on the progress bar.
        read_last: Whether the model reads the last token. It predicts nothing, but a rotation that
            follows the length counts it.
    """
    device = model.get_input_embeddings().weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: hooks move it
    tokens = torch.tensor([ids], device=device)
    hidden = _hidden_states(model, tokens if read_last else tokens[:, :-1], label)
    losses = []
    first = len(ids) - scored - 1
    for start in range(first, len(ids) - 1, HEAD_CHUNK):
        stop = min(start + HEAD_CHUNK, len(ids) - 1)
        logits = _lm_head_logits(model, tokens[:, start:stop], hidden[:, start:stop])[0].float()
        targets = tokens[0, start + 1 : stop + 1].to(logits.device)
        losses.append(nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(losses)


def _hidden_states(model: Any, tokens: torch.Tensor, label: str) -> torch.Tensor:
    """Return the decoder's output `[1, S, hidden]`; show a progress bar that counts layers."""
    length = tokens.shape[1]
    config = model.config.get_text_config(decoder=True)
    # Where layers have a window, tokens are read in parts, so that such a layer only ever looks at
    # what its window holds: most of the time that a long text takes in one part is masked away.
    sliding = any(DynamicCache(config=config).is_sliding)
    cache = DynamicCache(config=config) if sliding and length > PREFILL_CHUNK else None
    starts = range(0, length, length if cache is None else PREFILL_CHUNK)
    layer_class = decoder_layer_class()
    layers = [m for m in model.base_model.modules() if isinstance(m, layer_class)]
    handle, total = current(model), len(layers) * len(starts)
    # leave=None: the bar goes when it runs within a bar that counts passes.
    with progress_bar(total=total, desc=f"perplexity, {label}", unit="layer", leave=None) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update() and None) for layer in layers]
        try:
            if handle is not None:
                handle.fix_length(length)  # all parts are rotated as the whole is
            parts = []
            for start in starts:
                part = tokens[:, start : start + starts.step]
                with torch.no_grad():
                    given = {**cache_arguments(model, cache), "use_cache": cache is not None}
                    parts.append(model.base_model(part, **given).last_hidden_state)
            return torch.cat(parts, dim=1)
        finally:
            if handle is not None:
                handle.fix_length(None)
            for hook in hooks:
                hook.remove()


def _lm_head_logits(model: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits for hidden states, `[1, n, vocabulary]`."""
    # The model's forward runs whole, with a decoder that hands out what it computed before: so soft
    # caps and scales of logits are the model's own, in every architecture.
    swaps = UndoLog()
    output = decoder_output(hidden)
    swaps.set(model.base_model, "forward", lambda *_, **__: output)
    try:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits
    finally:
        swaps.undo()


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
        head: As in `excerpt`.

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
    """Return the losses of tokens at `positions`, from those of `document_losses`."""
    return [losses[position - 1].item() for position in positions]


def longppl(losses: list[float]) -> float:
    """Return the perplexity of the key tokens of all documents; NaN without any."""
    return perplexity(sum(losses) / len(losses)) if losses else math.nan


def _losses_given(model: Any, ids: list[int], context: int, head: int, label: str) -> torch.Tensor:
    """Return losses of all tokens but the first, `[S - 1]`, each after `context` tokens or more."""
    # Windows of `2 * context` tokens overlap by half; all but the first score their second half.
    losses = []
    starts = range(0, max(len(ids) - context, 1), context)
    for start in progress_bar(starts, desc=f"key tokens, {label} context", unit="pass"):
        window = excerpt(ids, start, min(start + 2 * context, len(ids)), head)
        scored = len(window) - (context if start else 1)
        losses.append(token_losses(model, window, scored, label=f"from {start:,}"))
    return torch.cat(losses)


STRIDE = 256


def window_ends(total: int, longest: int, stride: int, windows: int) -> list[int]:
    """Return the windows' ends, the same for every length, so that lengths compare.

    Args:
        total: Tokens of the document.
        longest: The longest length to measure; no window ends before it.
        stride: Tokens scored in each window; no token is scored twice.
        windows: The number of windows, spread evenly; fewer if the document is short. All fit into
            `longest + (windows - 1) * stride` tokens.

    Returns:
        Positions after each window, ascending; the last is the document's end.

    Raises:
        ValueError: The document is shorter than the longest length.
    """
    if total < longest:
        raise ValueError(
            f"the document must have at least the longest length of {longest:,} tokens, got "
            f"{total:,}: give a longer document or shorter lengths"
        )
    gaps = min(windows - 1, (total - longest) // stride)
    return [total - (total - longest) * i // max(gaps, 1) for i in range(gaps, -1, -1)]


def window_losses(
    model: Any,
    ids: list[int],
    length: int,
    stride: int,
    ends: list[int],
    label: str,
    head: int = 0,
) -> list[float]:
    """Return the mean loss of the last `stride` tokens of each window, given the rest of it.

    The first token scored has `length - stride` tokens before it, the last `length - 1`. Every
    window has `stride` tokens, so the plain mean of windows is the mean of tokens.

    Args:
        model: A transformers model, patched or not.
        ids: The document's tokens.
        length: Tokens of a window.
        stride: Tokens scored in each window.
        ends: Position after each window, at least `length`.
        label: The label on the progress bar.
        head: As in `excerpt`.

    Returns:
        Mean negative log-likelihoods in nats, one for each of the ends.

    Raises:
        ValueError: A window has no token to give the scored ones.
    """
    if length <= stride:
        raise ValueError(
            f"the length of windows must be more than the {stride} tokens scored, got {length}: "
            "give a longer length or a shorter stride"
        )
    means = []
    for end in progress_bar(ends, desc=f"sliding at {length:,}, {label}", unit="window"):
        window = excerpt(ids, end - length, end, head)
        scored = token_losses(model, window, stride, label=f"{label} to {end:,}")
        means.append(scored.double().mean().item())
    return means
