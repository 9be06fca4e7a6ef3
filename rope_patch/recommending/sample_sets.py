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
    document_samples,
    needle_samples,
    permuted_answers,
    recall_samples,
    samples_digest,
)
from rope_patch.recommending.bench import BLOCK_SIZE

LONG, SHORT, PROSE, SEARCH = "long", "short", "prose", "search"
CONTROL = {LONG: "long, control", SHORT: "short, control"}
_SEARCH_BLOCKS = 4  # blocks that a search may score a candidate on
_SEEDS_PER_KIND = 1000  # of one kind, which so share no seed with another


@dataclass(frozen=True)
class SampleBlocks:
    """Samples by kind.

    Attributes:
        by_kind: By kind a function that makes the samples of a block, and how many blocks there
            are.
        identity: What tells them from others.
        not_measured: What cannot be measured for want of samples, a sentence each.
    """

    by_kind: dict[str, tuple[Callable[[int], Sequence[Sample]], int]]
    identity: dict[str, Any]
    not_measured: tuple[str, ...] = ()


def needle_blocks(
    tokenizer: Any, length: int, short: int, most: int, seed: int, texts: Sequence[str] | None
) -> SampleBlocks:
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
        return needle_samples(tokenizer, tokens, BLOCK_SIZE, seed, texts, planted=planted)

    prose = _prose_blocks(tokenizer, short, most, seed, texts)
    return SampleBlocks(
        _question_blocks(made, length, short, most, seed) | prose, {"texts": _text_digests(texts)}
    )


def recall_blocks(tokenizer: Any, length: int, short: int, most: int, seed: int) -> SampleBlocks:
    """Return pairs of words in noise, and prose: for models of a short context.

    Args:
        tokenizer: The model's.
        length: Target length in tokens.
        short: A length within the trained one.
        most: Samples of each kind at most.
        seed: Another one makes others.
    """

    def made(tokens: int, seed: int, planted: bool) -> Sequence[Sample]:
        return recall_samples(tokenizer, tokens, BLOCK_SIZE, seed, planted=planted)

    prose = _prose_blocks(tokenizer, short, most, seed, None)
    return SampleBlocks(
        _question_blocks(made, length, short, most, seed) | prose,
        {"texts": None, "samples": "recall"},
        (
            f"needles in prose: they do not fit into {short:,} tokens, so all were asked for pairs "
            "of words in noise",
        ),
    )


def _question_blocks(
    made: Callable[[int, int, bool], Sequence[Sample]],
    length: int,
    short: int,
    most: int,
    seed: int,
) -> dict[str, tuple[Callable[[int], Sequence[Sample]], int]]:
    """Return the sets of questions; `made` takes tokens, a seed, and whether answers are there."""
    blocks = max(1, most // BLOCK_SIZE)

    def block_of(tokens: int, kind: int, planted: bool = True) -> Callable[[int], Sequence[Sample]]:
        first = (10 * seed + kind) * _SEEDS_PER_KIND
        return lambda block: made(tokens, first + block, planted)

    return {
        LONG: (block_of(length, 0), blocks),
        CONTROL[LONG]: (block_of(length, 0, planted=False), blocks),
        SHORT: (block_of(short, 1), blocks),
        CONTROL[SHORT]: (block_of(short, 1, planted=False), blocks),
        SEARCH: (block_of(length, 2), _SEARCH_BLOCKS),
    }


def from_user_samples(
    samples: Sequence[Sample],
    trained: int,
    tokenizer: Any,
    short: int,
    most: int,
    seed: int,
    texts: Sequence[str] | None,
) -> SampleBlocks:
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
        if len(some) < BLOCK_SIZE:
            raise ValueError(
                f"{len(some)} of {len(samples)} samples have {name} the trained {trained:,} "
                f"tokens, at least {BLOCK_SIZE} are needed: what a method gains is measured on the "
                "longer ones, what it costs on the others"
            )
    searched = len(long) // BLOCK_SIZE // 3
    long, for_search = (
        long[: len(long) - searched * BLOCK_SIZE],
        long[len(long) - searched * BLOCK_SIZE :],
    )
    missing = []
    if not searched:
        missing.append(
            f"a search: it needs samples of its own, so at least {3 * BLOCK_SIZE} beyond the trained "
            "length"
        )
    sets = {
        LONG: _split_into_blocks(long, most),
        CONTROL[LONG]: _control_blocks(long, most, seed),
        SHORT: _split_into_blocks(within, most),
        CONTROL[SHORT]: _control_blocks(within, most, seed),
    }
    if searched:
        sets[SEARCH] = _split_into_blocks(for_search, _SEARCH_BLOCKS * BLOCK_SIZE)
    if texts is None:
        missing.append("perplexity of documents: name a text to have it measured with samples")
    else:
        sets |= _prose_blocks(tokenizer, short, most, seed, texts)
    identity = {"samples": samples_digest(samples), "texts": _text_digests(texts)}
    return SampleBlocks(sets, identity, tuple(missing))


def _control_blocks(
    samples: Sequence[Sample], most: int, seed: int
) -> tuple[Callable[[int], Sequence[Sample]], int]:
    """The samples with answers to others, in the blocks of the samples themselves."""
    false = permuted_answers(samples, seed)
    block, blocks = _split_into_blocks(samples, most)

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


def _prose_blocks(
    tokenizer: Any, short: int, most: int, seed: int, texts: Sequence[str] | None
) -> dict[str, tuple[Callable[[int], Sequence[Sample]], int]]:
    while True:
        try:
            return {
                PROSE: _split_into_blocks(
                    document_samples(tokenizer, short, most, seed, texts), most
                )
            }
        except ValueError:
            if most <= BLOCK_SIZE:
                raise
            most = max(BLOCK_SIZE, most // 2)


def _split_into_blocks(
    samples: Sequence[Sample], most: int
) -> tuple[Callable[[int], Sequence[Sample]], int]:
    blocks = min(len(samples), most) // BLOCK_SIZE
    return lambda block: samples[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE], blocks


def _text_digests(texts: Sequence[str] | None) -> list[str] | None:
    from rope_patch.tasks import texts as library

    if texts is None:
        return None
    return [hashlib.sha256(library.read_text(text).encode()).hexdigest()[:32] for text in texts]
