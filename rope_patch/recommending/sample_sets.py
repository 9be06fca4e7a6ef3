"""The samples that a recommendation is measured on: at the length, within the trained one, prose.

All of a kind come in blocks, so that a budget decides how many are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.inference.samples import (
    Sample,
    digest,
    document_samples,
    needle_samples,
    recall_samples,
    swapped,
)
from rope_patch.recommending.bench import BLOCK

LONG, SHORT, PROSE, SEARCH = "long", "short", "prose", "search"
CONTROL = {LONG: "long, control", SHORT: "short, control"}
_SEARCHED = 4  # blocks that a search may score a candidate on
_BLOCKS = 1000  # of one kind, which so share no seed with another


@dataclass(frozen=True)
class Material:
    """Samples by kind.

    Attributes:
        sets: By kind a function that makes the samples of a block, and how many blocks there are.
        identity: What tells them from others.
        missing: What cannot be measured for want of samples, a sentence each.
    """

    sets: dict[str, tuple[Callable[[int], Sequence[Sample]], int]]
    identity: dict[str, Any]
    missing: tuple[str, ...] = ()


def needles(
    tokenizer: Any, length: int, short: int, most: int, seed: int, texts: Sequence[str] | None
) -> Material:
    """Four needles in prose, and prose itself, made for a tokenizer.

    Args:
        tokenizer: The model's.
        length: Target length in tokens.
        short: A length within the trained one.
        most: Samples of each kind at most.
        seed: Another one makes others.
        texts: Names or files; those that come with the package unless given.
    """

    def made(tokens: int, seed: int, planted: bool) -> Sequence[Sample]:
        return needle_samples(tokenizer, tokens, BLOCK, seed, texts, planted=planted)

    prose = _prose(tokenizer, short, most, seed, texts)
    return Material(_blocks(made, length, short, most, seed) | prose, {"texts": _hashed(texts)})


def recall(tokenizer: Any, length: int, short: int, most: int, seed: int) -> Material:
    """Return pairs of words in noise, and prose: for models of a short context.

    Args:
        tokenizer: The model's.
        length: Target length in tokens.
        short: A length within the trained one.
        most: Samples of each kind at most.
        seed: Another one makes others.
    """

    def made(tokens: int, seed: int, planted: bool) -> Sequence[Sample]:
        return recall_samples(tokenizer, tokens, BLOCK, seed, planted=planted)

    prose = _prose(tokenizer, short, most, seed, None)
    return Material(
        _blocks(made, length, short, most, seed) | prose,
        {"texts": None, "samples": "recall"},
        (
            f"needles in prose: they do not fit into {short:,} tokens, so all were asked for pairs "
            "of words in noise",
        ),
    )


def _blocks(
    made: Callable[[int, int, bool], Sequence[Sample]],
    length: int,
    short: int,
    most: int,
    seed: int,
) -> dict[str, tuple[Callable[[int], Sequence[Sample]], int]]:
    """Return the sets of questions; `made` takes tokens, a seed, and whether answers are there."""
    blocks = max(1, most // BLOCK)

    def block_of(tokens: int, kind: int, planted: bool = True) -> Callable[[int], Sequence[Sample]]:
        first = (10 * seed + kind) * _BLOCKS
        return lambda block: made(tokens, first + block, planted)

    return {
        LONG: (block_of(length, 0), blocks),
        CONTROL[LONG]: (block_of(length, 0, planted=False), blocks),
        SHORT: (block_of(short, 1), blocks),
        CONTROL[SHORT]: (block_of(short, 1, planted=False), blocks),
        SEARCH: (block_of(length, 2), _SEARCHED),
    }


def given(
    samples: Sequence[Sample],
    trained: int,
    tokenizer: Any,
    short: int,
    most: int,
    seed: int,
    texts: Sequence[str] | None,
) -> Material:
    """Samples that somebody else made, told apart by their lengths; prose where texts are named.

    The last third of the long ones is the search's: what it finds is then compared on others.

    Args:
        samples: All.
        trained: Tokens of pretraining: what is longer is scored at the length.
        tokenizer: The model's; needed for texts.
        short: Tokens of prose.
        most: Samples of each kind at most.
        seed: Of prose.
        texts: Names or files, or None.

    Raises:
        ValueError: Too few of a kind.
    """
    long = [sample for sample in samples if len(sample.ids) > trained]
    within = [sample for sample in samples if len(sample.ids) <= trained]
    for name, some in (("more than", long), ("at most", within)):
        if len(some) < BLOCK:
            raise ValueError(
                f"{len(some)} of {len(samples)} samples have {name} the trained {trained:,} "
                f"tokens, at least {BLOCK} are needed: what a method gains is measured on the "
                "longer ones, what it costs on the others"
            )
    searched = len(long) // BLOCK // 3
    long, for_search = long[: len(long) - searched * BLOCK], long[len(long) - searched * BLOCK :]
    missing = []
    if not searched:
        missing.append(
            f"a search: it needs samples of its own, so at least {3 * BLOCK} beyond the trained "
            "length"
        )
    sets = {
        LONG: _cut(long, most),
        CONTROL[LONG]: _control(long, most, seed),
        SHORT: _cut(within, most),
        CONTROL[SHORT]: _control(within, most, seed),
    }
    if searched:
        sets[SEARCH] = _cut(for_search, _SEARCHED * BLOCK)
    if texts is None:
        missing.append("perplexity of documents: name a text to have it measured with samples")
    else:
        sets |= _prose(tokenizer, short, most, seed, texts)
    identity = {"samples": digest(samples), "texts": _hashed(texts)}
    return Material(sets, identity, tuple(missing))


def _control(
    samples: Sequence[Sample], most: int, seed: int
) -> tuple[Callable[[int], Sequence[Sample]], int]:
    """The samples with answers to others, in the blocks of the samples themselves."""
    false = swapped(samples, seed)
    block, blocks = _cut(samples, most)

    def control(number: int) -> list[Sample]:
        groups = {sample.group for sample in block(number)}
        found = [sample for sample in false if sample.group in groups]
        if not found:
            raise ValueError(
                "the answers of all samples are the same, or of other numbers of tokens, so none "
                "can stand in for another: give samples whose answers differ"
            )
        return found

    return control, blocks


def _prose(
    tokenizer: Any, short: int, most: int, seed: int, texts: Sequence[str] | None
) -> dict[str, tuple[Callable[[int], Sequence[Sample]], int]]:
    while True:
        try:
            return {PROSE: _cut(document_samples(tokenizer, short, most, seed, texts), most)}
        except ValueError:
            if most <= BLOCK:
                raise
            most = max(BLOCK, most // 2)


def _cut(samples: Sequence[Sample], most: int) -> tuple[Callable[[int], Sequence[Sample]], int]:
    blocks = min(len(samples), most) // BLOCK
    return lambda block: samples[block * BLOCK : (block + 1) * BLOCK], blocks


def _hashed(texts: Sequence[str] | None) -> list[str] | None:
    from rope_patch.tasks import texts as library

    if texts is None:
        return None
    return [hashlib.sha256(library.read(text).encode()).hexdigest()[:32] for text in texts]
