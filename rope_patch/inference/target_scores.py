"""Log-likelihoods of targets after prompts: one, several after one prompt, or in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from rope_patch.inference.prefix_reader import PrefixReader, input_device
from rope_patch.patching import current
from rope_patch.transformers_api.forwards import cache_arguments


@torch.no_grad()
def score_target(
    cache: Any, last_token: int, target: list[int], reader: PrefixReader
) -> dict[str, Any]:
    """Score a target after a prompt; leave the cache as it was.

    Args:
        cache: The reader's, of all but the prompt's last token.
        last_token: The prompt's last token.
        target: The tokens to score.
        reader: The reader that read the prompt.

    Returns:
        The log-likelihood in nats, and whether greedy decoding would write the target.
    """
    fed = torch.tensor([[last_token, *target[:-1]]], device=input_device(reader.model))
    scratch = reader.borrow(cache, fed.shape[1])
    logits = (
        reader.model(fed, **cache_arguments(reader.model, scratch), use_cache=True)
        .logits[0]
        .float()
    )
    reader.give_back(cache, scratch, fed.shape[1])
    return _likelihood(logits, target)


@torch.no_grad()
def score_together(
    cache: Any, last_token: int, targets: list[list[int]], reader: PrefixReader
) -> list[dict[str, Any]]:
    """Score several targets after one prompt in one pass; leave the cache as it was.

    All are packed into one row, and the mask keeps them apart. A padded batch would need the
    prompt's cache once for each row: on a CPU, copying it takes longer than the passes one by one.

    Args:
        cache: See `score_target`.
        last_token: See `score_target`.
        targets: The tokens to score.
        reader: See `score_target`; its model's attention takes any mask.
    """
    at, read = input_device(reader.model), cache.get_seq_length()
    rows = [[last_token, *target[:-1]] for target in targets]
    ids = torch.tensor([[token for row in rows for token in row]], device=at)
    positions = torch.tensor([[read + i for row in rows for i in range(len(row))]], device=at)
    owner = torch.tensor([number for number, row in enumerate(rows) for _ in row], device=at)
    own = (owner[:, None] == owner[None]).tril()
    seen = torch.cat([own.new_ones(len(owner), read), own], dim=1)[None, None]
    # Additive, because eager attention adds it.
    dtype = reader.model.dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=at)
    mask.masked_fill_(~seen, torch.finfo(dtype).min)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    logits = reader.model(ids, **cache_arguments(reader.model, cache), **arguments).logits[0]
    reader.give_back(cache, cache, ids.shape[1])
    parts = logits.split([len(row) for row in rows])
    return [_likelihood(part.float(), t) for part, t in zip(parts, targets, strict=True)]


@torch.no_grad()
def score_batch(
    model: Any, prompts: Sequence[list[int]], targets: Sequence[list[int]]
) -> list[dict[str, Any]]:
    """Score a target after each of some short prompts; read a prompt that all share once.

    Rows are padded on the right, where a causal model does not look, and masked all the same:
    where the rotation follows a row's length, padding must not count.

    Args:
        model: A transformers causal language model.
        prompts: Ordered; at least one.
        targets: One after each.
    """
    at, cache, read = input_device(model), None, 0
    first, last = prompts[0], prompts[-1]
    alike = len(prompts) > 1 and first == last and len(first) > 1
    handle = current(model)
    if alike and not (handle and handle.method.is_length_dependent(handle.trained_length)):
        # All but the last token, which goes before every target.
        read = len(first) - 1
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        prompt = torch.tensor([first[:-1]], device=at)
        model(prompt, **cache_arguments(model, cache), use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(prompts))
    rows = [[*ids[read:], *target[:-1]] for ids, target in zip(prompts, targets, strict=True)]
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=at)
    seen = [[1] * (read + len(row)) + [0] * (longest - len(row)) for row in rows]
    mask = torch.tensor(seen, device=at)
    given = {**cache_arguments(model, cache), "use_cache": cache is not None}
    logits = model(padded, attention_mask=mask, **given).logits
    return [
        _likelihood(scores[len(row) - len(target) : len(row)].float(), target)
        for target, row, scores in zip(targets, rows, logits, strict=True)
    ]


def _likelihood(logits: torch.Tensor, target: list[int]) -> dict[str, Any]:
    """Return a target's log-likelihood from the logits before each token, `[T, V]`."""
    target_ids = torch.tensor(target, device=logits.device)
    log_likelihood = logits.log_softmax(-1).gather(-1, target_ids[:, None]).sum().item()
    return {
        "log_likelihood": log_likelihood,
        "greedy": bool((logits.argmax(-1) == target_ids).all()),
    }
