"""Perplexity against position, from one forward pass over a long document."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from rope_patch.patching.swap import Swaps

HEAD_CHUNK = 512  # positions whose logits exist at once


def default_window(length: int) -> int:
    """The power of two nearest below a twelfth of the length: some sixteen points on a curve."""
    return max(16, 2 ** int(math.log2(max(length // 12, 1))))


def curve(
    model: Any, ids: list[int], window: int, label: str, alone: int = 0
) -> list[dict[str, Any]]:
    """Perplexity of each window of positions, every token given all tokens before it.

    Args:
        model: A transformers model, patched or not.
        ids: The document's tokens.
        window: Tokens averaged into a point.
        label: Says on the progress bar what runs.
        alone: How many tokens from the start get a pass of their own. Where the rotation follows
            the length, that is how a text that ends there is read.

    Returns:
        Points with end (position, tokens), tokens (scored in the window), nll (mean, nats) and
        perplexity.
    """
    losses = token_losses(model, ids, scored=len(ids) - 1, label=label)
    if 1 < alone < len(ids):
        start = token_losses(model, ids[:alone], scored=alone - 1, label=f"{label} to {alone:,}")
        losses[: alone - 1] = start
    points = []
    for end in range(window, len(ids) + 1, window):
        # losses[i] is of the token at position i + 1; the first has nothing before it.
        points.append(_point(end, losses[max(end - window - 1, 0) : end - 1]))
    return points


def control_ends(length: int, window: int, context: int) -> list[int]:
    """Where the control is measured: every second window beyond the first context."""
    return [e for e in range(2 * window, length + 1, 2 * window) if e > context]


def control_point(
    model: Any, ids: list[int], end: int, window: int, context: int
) -> dict[str, Any]:
    """The window that ends at `end`, its tokens given only the document's last `context` tokens.

    One pass over `context` tokens, of which the last `window` are scored: what a model within its
    trained length would say of the same text without the far past.
    """
    part = ids[end - context : end]
    return _point(end, token_losses(model, part, scored=window, label=f"control {end:,}"))


def token_losses(model: Any, ids: list[int], scored: int, label: str) -> torch.Tensor:
    """Negative log-likelihoods of the last `scored` tokens, from one pass, `[scored]`, float32.

    The decoder runs once over everything; the head, and whatever the model does to its logits, runs
    over a few hundred positions at a time, so memory does not grow with length x vocabulary.

    Args:
        model: A transformers causal language model.
        ids: Tokens, at least two.
        scored: How many of them, from the end, to score.
        label: Says on the progress bar what runs.
    """
    device = model.get_input_embeddings().weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: hooks move it
    tokens = torch.tensor([ids], device=device)
    hidden = _hidden_states(model, tokens, label)
    losses = []
    first = len(ids) - scored - 1
    for start in range(first, len(ids) - 1, HEAD_CHUNK):
        stop = min(start + HEAD_CHUNK, len(ids) - 1)
        logits = _head(model, tokens[:, start:stop], hidden[:, start:stop])[0].float()
        targets = tokens[0, start + 1 : stop + 1].to(logits.device)
        losses.append(nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(losses)


def _hidden_states(model: Any, tokens: torch.Tensor, label: str) -> torch.Tensor:
    """The decoder's output `[1, S, hidden]`, with a progress bar that counts layers."""
    layers = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    with tqdm(total=len(layers), desc=f"perplexity, {label}", unit="layer") as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update() and None) for layer in layers]
        try:
            with torch.no_grad():
                return model.base_model(tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()


def _head(model: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The model's own logits for hidden states, `[1, n, vocabulary]`.

    The model's forward runs whole, with a decoder that hands out what it computed before: so soft
    caps and scales of logits are the model's own, in every architecture.
    """
    swaps = Swaps()
    output = BaseModelOutputWithPast(last_hidden_state=hidden)
    swaps.set(model.base_model, "forward", lambda *_, **__: output)
    try:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits
    finally:
        swaps.undo()


def _point(end: int, losses: torch.Tensor) -> dict[str, Any]:
    nll = losses.double().mean().item()
    perplexity = math.exp(nll) if nll < 700 else math.inf
    return {"end": end, "tokens": len(losses), "nll": nll, "perplexity": perplexity}
