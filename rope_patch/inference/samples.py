"""Samples that models are scored on: fixed sequences with some scored tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.utils.checksums import digest
from rope_patch.utils.errors import parse_json

IGNORE_INDEX = -100  # the label of a token that is not scored, as in transformers

_DEPTHS = (10, 30, 50, 70, 90)  # percent: depths of the first needle
_SCORED_DIVISOR = 8  # a document's last eighth is scored


@dataclass(frozen=True)
class Sample:
    """A sequence and its scored tokens.

    Attributes:
        ids: Tokens.
        answers: Half-open spans of positions, ascending: the scored tokens. Each is predicted from
            all true tokens before it.
        group: Samples of one group share a text; statistics take a group as one unit.
        prose: Whether the scored tokens are a document's instead of answers. A whole span of prose
            is never predicted, so hits are not counted.
    """

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    group: str
    prose: bool = False

    def __post_init__(self) -> None:
        edges = [edge for span in self.answers for edge in span]
        spans = all(start < stop for start, stop in self.answers)
        if not edges or not spans or edges != sorted(edges):
            raise ValueError(
                "answers must be spans of positions, ascending and without overlap, got "
                f"{list(self.answers)}"
            )
        if edges[0] < 1 or edges[-1] > len(self.ids):
            raise ValueError(
                f"answers must lie within positions 1 to {len(self.ids) - 1} (the first token has "
                f"nothing before it), got {list(self.answers)}"
            )

    @property
    def positions(self) -> list[int]:
        """Return the positions of all scored tokens."""
        return [p for start, stop in self.answers for p in range(start, stop)]


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return a digest that identifies a list of samples."""
    rows = [[s.ids, s.answers, s.group, s.prose] for s in samples]
    return digest(json.dumps(rows), 32)


def needle_samples(
    tokenizer: Any,
    length: int,
    count: int,
    seed: int,
    texts: Sequence[str] | None = None,
    planted: bool = True,
) -> list[Sample]:
    """Return samples of four needles in prose that ask for all four and score their values.

    These are RULER's multi-query needles (arXiv:2404.06654) with only the values' tokens scored, as
    in LongRoPE2's search (arXiv:2502.20082). Each sample asks for four depths: the first needle's
    depths rotate, the others are drawn.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens of each sample, in all.
        count: Number of samples; each has a text of its own.
        seed: Another seed makes other needles in other texts.
        texts: Names or files; those of the package unless given.
        planted: False makes the control: the same questions of texts without their answers.

    Raises:
        ValueError: A text is shorter than the length, too short for a haystack.
    """
    from rope_patch.tasks.needles import multiquery

    require_text_length(tokenizer, texts, length)
    rows = multiquery(
        tokenizer=tokenizer,
        length=length,
        samples=count,
        depths=_DEPTHS,
        seed=seed,
        planted=planted,
        text=None if texts is None else tuple(texts),
    )["test"]
    return _samples_from_rows(tokenizer, rows, seed)


def needles_refusal(tokenizer: Any, length: int) -> str | None:
    """Return why a length has no room for `needle_samples`, or None if it has room."""
    from rope_patch.tasks.samples import TooShort

    try:
        needle_samples(tokenizer, length, 1, seed=0)
    except TooShort as error:
        return f"needles in prose take {error.least:,} tokens with this tokenizer"
    return None


def recall_samples(
    tokenizer: Any, length: int, count: int, seed: int, planted: bool = True
) -> list[Sample]:
    """Return samples of word pairs in noise that ask for all eight keys and score the values.

    For models whose trained length is too short for `needle_samples`, or that read no English: a
    sample needs a few dozen tokens, and each word is one token of the model's own vocabulary.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens of each sample, in all.
        count: Number of samples; each has a text of its own.
        seed: Another seed makes other pairs.
        planted: False makes the control: the same questions of texts with other pairs.

    Raises:
        ValueError: A length without room for the pairs, or a tokenizer with too few words.
    """
    from rope_patch.tasks.recall import multiquery

    rows = multiquery(
        tokenizer=tokenizer, length=length, samples=count, seed=seed, planted=planted
    )["test"]
    return _samples_from_rows(tokenizer, rows, seed)


def _samples_from_rows(tokenizer: Any, rows: Any, seed: int) -> list[Sample]:
    """Return samples of rows that ask for several answers in one target."""
    samples = []
    for row in rows:
        prompt = f"{row['input']} {row['gen_prefix']}"
        text = f"{prompt} {row['target']}"
        ids = _encode(tokenizer, text)
        answers, end = [], len(prompt)
        for value in row["answers"]:
            match = re.compile(rf"\b{re.escape(value)}\b").search(text, end)
            assert match is not None, f"{value!r} is not in its target"
            # The space before it is part of its first token, or a token without information.
            first = _common_prefix_length(ids, _encode(tokenizer, text[: match.start()]))
            end = match.end()
            answers.append((first, _common_prefix_length(ids, _encode(tokenizer, text[:end]))))
        samples.append(Sample(tuple(ids), tuple(answers), f"{seed}/{row['text']}"))
    return samples


def document_samples(
    tokenizer: Any, length: int, count: int, seed: int, texts: Sequence[str] | None = None
) -> list[Sample]:
    """Return passages of prose with their last eighth scored.

    So each scored token has at least seven eighths of the length before it, as with a window that
    slides by an eighth. Scoring whole passages would mostly measure short contexts, where any
    stretch only costs.

    Args:
        tokenizer: The model's tokenizer.
        length: Tokens of each passage.
        count: Number of passages, drawn without overlap from all texts.
        seed: The seed of the draw.
        texts: Names or files; those of the package unless given.

    Raises:
        ValueError: The texts are too short for so many passages.
    """
    from rope_patch.tasks import texts as library

    names = list(texts or library.names())
    excerpts = []
    for name in names:
        available = library.count_tokens(name, tokenizer) // length
        if not available:
            require_text_length(tokenizer, [name], length)
        excerpts += library.documents([name], tokenizer, length, available)
    if len(excerpts) < count:
        raise ValueError(
            f"{count} passages of {length:,} tokens are needed, the texts {', '.join(names)} have "
            f"{len(excerpts)}: give more texts, fewer samples or a shorter length"
        )
    drawn = random.Random(f"{seed}/documents/{length}").sample(excerpts, count)
    first = length - max(length // _SCORED_DIVISOR, 1)
    return [Sample(tuple(d.tokens), ((first, length),), d.name, prose=True) for d in drawn]


def read_samples(file: str | Path) -> list[Sample]:
    """Return samples from JSON lines with `input_ids` and `labels`, as in training data.

    A label is at its own token's position, -100 if the token is not scored. Adjacent scored tokens
    are one answer. Samples with the same `group` share a text.

    Raises:
        ValueError: The file has another format; the message names the line.
    """
    samples = []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read samples from {file}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            ids, labels = row["input_ids"], row["labels"]
            if not all(type(token) is int for token in [*ids, *labels]):
                raise TypeError("tokens are whole numbers")
            samples.append(_from_labels(ids, labels, str(row.get("group", number))))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{file}, line {number}: expected JSON with input_ids and labels, as many of each; "
                f"{problem}"
            ) from None
    if not samples:
        raise ValueError(f"{file} holds no samples: expected JSON lines with input_ids and labels")
    return samples


def from_labelled_tensors(input_ids: Any, labels: Any) -> list[Sample]:
    """Return samples from tensors of tokens and labels, both `[B, S]`; each row is a group."""
    rows = zip(input_ids.tolist(), labels.tolist(), strict=True)
    return [_from_labels(ids, row, str(number)) for number, (ids, row) in enumerate(rows)]


def permuted_answers(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Return a control of samples: each answer is replaced by one of another sample.

    A model that finds the answers gives these a low likelihood; one that does not, the same as the
    right ones. An answer that does not stand in the sample's own text is preferred, since a model
    might copy it. Answers without another one of as many tokens are no longer scored.

    Args:
        samples: The samples.
        seed: The seed of the draw.
    """
    rng = random.Random(seed)
    pool: dict[int, set[tuple[int, ...]]] = {}
    for sample in samples:
        for start, stop in sample.answers:
            pool.setdefault(stop - start, set()).add(sample.ids[start:stop])
    controls = []
    for sample in samples:
        ids, answers = list(sample.ids), []
        own = {sample.ids[start:stop] for start, stop in sample.answers}
        for start, stop in sample.answers:
            if others := sorted(pool[stop - start] - own):
                shifted = (sample.ids[first:start] for first in range(stop - start))
                present = set(zip(*shifted, strict=False))  # all runs of as many tokens
                absent = [other for other in others if other not in present]
                ids[start:stop] = rng.choice(absent or others)
                answers.append((start, stop))
        if answers:
            controls.append(replace(sample, ids=tuple(ids), answers=tuple(answers)))
    return controls


def _from_labels(ids: list[int], labels: list[int], group: str) -> Sample:
    if len(ids) != len(labels):
        raise ValueError(f"got {len(ids)} input_ids and {len(labels)} labels")
    answers: list[tuple[int, int]] = []
    for position, label in enumerate(labels):
        if label == IGNORE_INDEX:
            continue
        if label != ids[position]:
            raise ValueError(
                f"the label at position {position} is {label}, its token {ids[position]}: labels "
                "stand at their own token's position"
            )
        if answers and answers[-1][1] == position:
            answers[-1] = (answers[-1][0], position + 1)
        else:
            answers.append((position, position + 1))
    return Sample(tuple(ids), tuple(answers), group)


def require_text_length(tokenizer: Any, texts: Sequence[str] | None, length: int) -> None:
    """Raise if a text would have to be repeated to fill a sample.

    Raises:
        ValueError: A text has fewer tokens than `length`.
    """
    from rope_patch.tasks import texts as library

    for name in texts or ():
        if (tokens := library.count_tokens(name, tokenizer)) < length:
            raise ValueError(
                f"the text {name!r} has {tokens:,} tokens, {length:,} are needed: give a longer "
                "one or a shorter length"
            )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False).input_ids


def _common_prefix_length(ids: list[int], start: list[int]) -> int:
    """Return the length of the common prefix of two lists of tokens."""
    same = 0
    for one, other in zip(ids, start, strict=False):
        if one != other:
            break
        same += 1
    return same
