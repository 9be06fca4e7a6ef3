"""The samples of a recommendation: at the target length, within the trained length, and prose.

Samples come in blocks that are made on first use, so that the budget decides how many are made.
"""

from __future__ import annotations

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
from rope_patch.utils.checksums import digest

BLOCK_SIZE = 6  # samples in a block: the fewest texts that give an interval
LONG, SHORT, PROSE, SEARCH = "long", "short", "prose", "search"
CONTROL = {LONG: "long, control", SHORT: "short, control"}
_SEARCH_BLOCKS = 4  # blocks on which a search may score each candidate
_SEEDS_PER_KIND = 1000  # more than blocks of a kind, so that kinds share no seed


@dataclass(frozen=True)
class SampleBlocks:
    """Blocks of samples by kind.

    Attributes:
        by_kind: By kind, a function that makes a block's samples, and the number of blocks.
        identity: What identifies the samples.
        not_measured: What these samples cannot measure, and why, a sentence each.
    """

    by_kind: dict[str, tuple[Callable[[int], Sequence[Sample]], int]]
    identity: dict[str, Any]
    not_measured: tuple[str, ...] = ()


def needle_blocks(
    tokenizer: Any, length: int, short: int, most: int, seed: int, texts: Sequence[str] | None
) -> SampleBlocks:
    """Return samples of four needles in prose, and of prose itself.

    Args:
        tokenizer: The model's tokenizer.
        length: Target length in tokens.
        short: A length within the trained length.
        most: Samples of each kind at most.
        seed: Another seed makes other samples.
        texts: Names or files; those of the package unless given.
    """

    def generate(tokens: int, seed: int, with_answers: bool) -> Sequence[Sample]:
        return needle_samples(tokenizer, tokens, BLOCK_SIZE, seed, texts, planted=with_answers)

    prose = _prose_blocks(tokenizer, short, most, seed, texts)
    return SampleBlocks(
        _question_blocks(generate, length, short, most, seed) | prose,
        {"texts": _text_digests(texts)},
    )


def recall_blocks(tokenizer: Any, length: int, short: int, most: int, seed: int) -> SampleBlocks:
    """Return samples of word pairs in noise, and of prose: for models of a short context.

    Args:
        tokenizer: The model's tokenizer.
        length: Target length in tokens.
        short: A length within the trained length.
        most: Samples of each kind at most.
        seed: Another seed makes other samples.
    """

    def generate(tokens: int, seed: int, with_answers: bool) -> Sequence[Sample]:
        return recall_samples(tokenizer, tokens, BLOCK_SIZE, seed, planted=with_answers)

    prose = _prose_blocks(tokenizer, short, most, seed, None)
    return SampleBlocks(
        _question_blocks(generate, length, short, most, seed) | prose,
        {"texts": None, "samples": "recall"},
        (
            f"needles in prose: they do not fit into {short:,} tokens, so all were asked for pairs "
            "of words in noise",
        ),
    )


def _question_blocks(
    generate: Callable[[int, int, bool], Sequence[Sample]],
    length: int,
    short: int,
    most: int,
    seed: int,
) -> dict[str, tuple[Callable[[int], Sequence[Sample]], int]]:
    """Return the blocks of questions by kind, `generate` called as (tokens, seed, with answers)."""
    blocks = max(1, most // BLOCK_SIZE)

    def block_of(
        tokens: int, kind: int, with_answers: bool = True
    ) -> Callable[[int], Sequence[Sample]]:
        first = (10 * seed + kind) * _SEEDS_PER_KIND
        return lambda block: generate(tokens, first + block, with_answers)

    return {
        LONG: (block_of(length, 0), blocks),
        CONTROL[LONG]: (block_of(length, 0, with_answers=False), blocks),
        SHORT: (block_of(short, 1), blocks),
        CONTROL[SHORT]: (block_of(short, 1, with_answers=False), blocks),
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
    """Return the user's own samples, split by their lengths; and prose if texts are given.

    The last third of the long samples is for the search, so that its result is compared on others.

    Args:
        samples: All samples.
        trained: Trained length in tokens; longer samples are for the target length.
        tokenizer: The model's tokenizer; needed for texts.
        short: Tokens of prose samples.
        most: Samples of each kind at most.
        seed: Seed of prose and controls.
        texts: Names or files, or None.

    Raises:
        ValueError: There are too few samples of a kind.
    """
    long = [sample for sample in samples if len(sample.ids) > trained]
    short_samples = [sample for sample in samples if len(sample.ids) <= trained]
    for name, group in (("more than", long), ("at most", short_samples)):
        if len(group) < BLOCK_SIZE:
            raise ValueError(
                f"{len(group)} of {len(samples)} samples have {name} the trained {trained:,} "
                f"tokens, at least {BLOCK_SIZE} are needed: what a method gains is measured on the "
                "longer ones, what it costs on the others"
            )
    search_blocks = len(long) // BLOCK_SIZE // 3
    long, search_samples = (
        long[: len(long) - search_blocks * BLOCK_SIZE],
        long[len(long) - search_blocks * BLOCK_SIZE :],
    )
    not_measured = []
    if not search_blocks:
        not_measured.append(
            f"a search: it needs samples of its own, so at least {3 * BLOCK_SIZE} beyond the "
            "trained length"
        )
    by_kind = {
        LONG: _split_into_blocks(long, most),
        CONTROL[LONG]: _control_blocks(long, most, seed),
        SHORT: _split_into_blocks(short_samples, most),
        CONTROL[SHORT]: _control_blocks(short_samples, most, seed),
    }
    if search_blocks:
        by_kind[SEARCH] = _split_into_blocks(search_samples, _SEARCH_BLOCKS * BLOCK_SIZE)
    if texts is None:
        not_measured.append("perplexity of documents: name a text to have it measured with samples")
    else:
        by_kind |= _prose_blocks(tokenizer, short, most, seed, texts)
    identity = {"samples": samples_digest(samples), "texts": _text_digests(texts)}
    return SampleBlocks(by_kind, identity, tuple(not_measured))


def _control_blocks(
    samples: Sequence[Sample], most: int, seed: int
) -> tuple[Callable[[int], Sequence[Sample]], int]:
    """Return the samples with permuted answers, in the same blocks as the samples."""
    false = permuted_answers(samples, seed)
    block, blocks = _split_into_blocks(samples, most)

    def control(number: int) -> list[Sample]:
        groups = {sample.group for sample in block(number)}
        controls = [sample for sample in false if sample.group in groups]
        if not controls:
            raise ValueError(
                "the answers of all samples are the same, or of other numbers of tokens, so none "
                "can stand in for another: give samples whose answers differ"
            )
        return controls

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
    return [digest(library.read_text(text), 32) for text in texts]
