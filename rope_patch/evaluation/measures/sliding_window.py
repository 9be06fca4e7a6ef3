"""Perplexity by sliding windows: the same tokens after more and more context.

The protocol of Press et al. (arXiv:2108.12409) as YaRN uses it (arXiv:2309.00071), with a stride of
256 tokens, of which only some windows, spread evenly, are run.
"""

from __future__ import annotations

from typing import Any

from rope_patch.evaluation.measures import perplexity
from rope_patch.utils.progress import progress_bar

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
        head: As in `perplexity.part`.

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
        window = perplexity.excerpt(ids, end - length, end, head)
        scored = perplexity.token_losses(model, window, stride, label=f"{label} to {end:,}")
        means.append(scored.double().mean().item())
    return means
