"""Find a document by what comes after one of its halves, with all-MiniLM-L6-v2.

A document is 512 tokens of one novel and then 512 of another: twice what the encoder's table has
rows for. A query is what follows one half in its novel. Its score is the share of the other
documents that are less similar to it, by the cosine, than its own one; chance is a half. Queries of
the second half show what an extension is for, those of the first its price.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import table_checkpoints as checkpoints
import torch
from tqdm import tqdm

import rope_patch
from rope_patch.statistics.bootstrap import bootstrap_mean
from rope_patch.tasks.texts import names, split_words

NAME = "all-minilm-l6-v2"
TITLE = "all-MiniLM-L6-v2 (512 positions), 1,024 tokens"
HALF, QUERY = 512, 128  # tokens
TRUNCATED, CONTROL = "first 512 tokens only", "mean of two windows"
VARIANTS = (TRUNCATED, CONTROL, "linear", "cubic", "tile")


@dataclass(frozen=True)
class Document:
    """Two passages and what follows each, as tokens; and the novels that they are from."""

    halves: tuple[list[int], list[int]]
    queries: tuple[list[int], list[int]]
    novels: tuple[str, str]


def documents(tokenizer: Any, count: int) -> list[Document]:
    """Return documents; the two halves of one are never from one novel."""
    need = HALF + QUERY
    per_novel = max(1, count // len(names()))
    passages: dict[str, list[tuple[list[int], list[int]]]] = {}
    for novel in names():
        text = " ".join(split_words(novel))
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        starts = [len(ids) * k // (2 * per_novel) + need for k in range(2 * per_novel)]
        passages[novel] = [(ids[s : s + HALF], ids[s + HALF : s + need]) for s in starts]
    found = []
    for turn in range(per_novel):
        for number, first in enumerate(names()):
            step = 1 + turn % (len(names()) - 1)
            second = names()[(number + step) % len(names())]
            (half, query), (other, later) = (
                passages[first][turn],
                passages[second][per_novel + turn],
            )
            found.append(Document((half, other), (query, later), (first, second)))
    return found


def embed(model: Any, cls: int, sep: int, tokens: list[int]) -> torch.Tensor:
    """Return the sentence embedding, `[D]` of length 1: the mean of all tokens' states."""
    states = model(torch.tensor([[cls, *tokens, sep]])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


def shares_below(cosines: torch.Tensor) -> torch.Tensor:
    """Return each query's share of other documents that are less similar than its own, `[N]`.

    Args:
        cosines: `[N, N]`, query by document; each query's own document is on the diagonal.
    """
    below = (cosines < cosines.diagonal()[:, None]).sum(1)
    return below.double() / (len(cosines) - 1)


@torch.inference_mode()
def measure(count: int, weights: Path) -> dict[str, Any]:
    """Return the scores of queries of either half, for each variant."""
    model, tokenizer = checkpoints.load_minilm(checkpoints.MINILM.folder(weights))
    cls, sep = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]"])
    vector: Callable[[list[int]], torch.Tensor] = partial(embed, model, cls, sep)
    found = documents(tokenizer, count)
    queries = [torch.stack([vector(d.queries[half]) for d in found]) for half in (0, 1)]
    results = {}
    for variant in tqdm(VARIANTS, desc=NAME, unit="variant"):
        with contextlib.ExitStack() as stack:
            if variant == TRUNCATED:
                vectors = [vector(d.halves[0][: HALF - 2]) for d in found]
            elif variant == CONTROL:
                windows = [[vector(half[: HALF - 2]) for half in d.halves] for d in found]
                vectors = [
                    torch.nn.functional.normalize(first + second, dim=0)
                    for first, second in windows
                ]
            else:
                stack.enter_context(rope_patch.patch(model, variant, factor=2))
                vectors = [vector([*d.halves[0], *d.halves[1]][: 2 * HALF - 2]) for d in found]
        matrix = torch.stack(vectors)
        results[variant] = {}
        for half, name in enumerate(("first half", "second half")):
            scores = shares_below(queries[half] @ matrix.T).tolist()
            groups = [
                [score for score, d in zip(scores, found, strict=True) if d.novels[half] == novel]
                for novel in names()
            ]
            interval = bootstrap_mean(groups)
            results[variant][name] = {
                "share": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "first": sum(score == 1 for score in scores) / len(scores),
            }
    return {"documents": len(found), "novels": len(names()), "variants": results}
