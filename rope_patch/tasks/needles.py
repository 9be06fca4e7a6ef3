"""RULER's eight needle tasks (arXiv:2404.06654) and RULERv2's two, as lm-eval's `custom_dataset`.

Their wording is RULER's (NVIDIA/RULER, Apache-2.0) and so are the numbers and kinds of needles, so
that scores compare. The novels that come with the package stand for its essays.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, repeat
from typing import Any, NamedTuple

from rope_patch.tasks import samples
from rope_patch.tasks.samples import SampleDraft, TextContext

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PROMPT_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{text}\nWhat is the special magic {kind} for {keys} "
    "mentioned in the provided text?"
)
PROMPT_MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind}s afterwards.\n{text}\nWhat are all the special magic {kind}s "
    "for {keys} mentioned in the provided text?"
)
PROMPT_MANY_2 = PROMPT_MANY.replace("memorize it", "memorize them")  # RULERv2's
PREFIX_ONE = "The special magic {kind} for {keys} mentioned in the provided text is"
PREFIX_MANY = "The special magic {kind}s for {keys} mentioned in the provided text are"

ROOM = 128  # tokens that an answer may take
SEVERAL = 4  # RULER's number of keys, values or queries wherever it has more than one
_DIGITS_2 = 10  # digits of RULERv2's values

_SENTENCE_ENDS = (".", "!", "?", '."', '!"', '?"')
_TITLES = {"Mr.", "Mrs.", "Dr.", "St."}


def single_1(**metadata: Any) -> dict[str, Any]:
    """Build a number in repeated noise sentences; arguments as of `samples.build`."""
    return samples.build(
        lambda t: _single_needle(t, "number", _noise), "rp_niah_single_1", ROOM, **metadata
    )


def single_2(**metadata: Any) -> dict[str, Any]:
    """Build a number in prose; arguments as of `samples.build`."""
    return samples.build(
        lambda t: _single_needle(t, "number", _prose), "rp_niah_single_2", ROOM, **metadata
    )


def single_3(**metadata: Any) -> dict[str, Any]:
    """Build a UUID in prose; arguments as of `samples.build`."""
    return samples.build(
        lambda t: _single_needle(t, "uuid", _prose), "rp_niah_single_3", ROOM, **metadata
    )


def multikey_1(**metadata: Any) -> dict[str, Any]:
    """Build one of four needles in prose; arguments as of `samples.build`, `per_text` up to 4."""
    return samples.build(_one_of_four, "rp_niah_multikey_1", ROOM, **_at_most_four(metadata))


def multikey_2(**metadata: Any) -> dict[str, Any]:
    """Build a number in a text of nothing but needles; arguments as of `samples.build`."""
    return samples.build(
        lambda t: _one_of_all(t, "number", _words), "rp_niah_multikey_2", ROOM, **metadata
    )


def multikey_3(**metadata: Any) -> dict[str, Any]:
    """Build a UUID with a UUID as its key in such a text; arguments as of `samples.build`."""
    return samples.build(
        lambda t: _one_of_all(t, "uuid", _uuids), "rp_niah_multikey_3", ROOM, **metadata
    )


def multivalue(**metadata: Any) -> dict[str, Any]:
    """Build four numbers of one key, in prose; arguments as of `samples.build`."""
    return samples.build(_all_values, "rp_niah_multivalue", ROOM, **metadata)


def multiquery(**metadata: Any) -> dict[str, Any]:
    """Build four numbers of four keys, in prose; arguments as of `samples.build`.

    `per_text` is at most 4.
    """
    return samples.build(_all_keys, "rp_niah_multiquery", ROOM, **_at_most_four(metadata))


def one_value_of_all(**metadata: Any) -> dict[str, Any]:
    """Build a number of ten digits in a text of nothing but needles (RULERv2's mk_niah_basic)."""
    draw = partial(_one_of_all, kind="number", keys=_words, digits=_DIGITS_2)
    return samples.build(draw, "rp_v2_mk_niah_basic", ROOM, **metadata)


def four_values_of_all(**metadata: Any) -> dict[str, Any]:
    """Build four such numbers of one key, where each key has four (RULERv2's mv_niah_basic)."""
    return samples.build(_all_values_of_all, "rp_v2_mv_niah_basic", ROOM, **metadata)


def _at_most_four(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata with at most a question for each of a text's four needles."""
    return metadata | {"per_text": min(int(metadata.get("per_text", 1)), SEVERAL)}


class _Needle(NamedTuple):
    key: str
    value: str
    depth: int  # percent


# A text of so many units with these sentences, each at its depth in percent.
_Haystack = Callable[[int, list[tuple[int, str]]], str]


def _single_needle(
    text: TextContext, kind: str, haystack: Callable[[TextContext], _Haystack]
) -> list[SampleDraft]:
    """Return samples with the same words, each with its own needle at its own depth."""
    # All samples share the words before the shallowest needle, and no text holds the answer of
    # another sample.
    fill, needles = haystack(text), _needles(text.depths, _words(text.rng), _values(text.rng, kind))
    return [_draft(kind, fill, [one] if text.planted else [], [one], one.depth) for one in needles]


def _one_of_four(text: TextContext) -> list[SampleDraft]:
    """Return samples that ask for a text's needles in turn: only the question differs."""
    needles = _needles(_depths(text), _words(text.rng), _values(text.rng, "number"))
    return _ask_in_turn(text, "number", _prose(text), needles)


def _one_of_all(
    text: TextContext, kind: str, keys: Callable[[random.Random], Iterator[str]], digits: int = 7
) -> list[SampleDraft]:
    """Return samples as `_one_of_four`, in a text of nothing but needles."""
    names, values = keys(text.rng), _values(text.rng, kind, digits)
    needles = _needles(text.depths, names, values)
    # The filler continues the same iterators, so no key comes twice.
    others = (
        NEEDLE.format(kind=f"{kind}s", key=k, value=v) for k, v in zip(names, values, strict=True)
    )
    return _ask_in_turn(text, kind, _lines(others), needles)


def _ask_in_turn(
    text: TextContext, kind: str, fill: _Haystack, needles: list[_Needle]
) -> list[SampleDraft]:
    targets, others = needles[: len(text.depths)], needles[len(text.depths) :]
    inside = needles if text.planted else others
    decoys = tuple(needle.value for needle in others)
    drafts = [_draft(kind, fill, inside, [target], target.depth) for target in targets]
    return [replace(draft, decoys=decoys) for draft in drafts]


def _all_keys(text: TextContext) -> list[SampleDraft]:
    """Return samples that ask for the same four needles, each for another one first."""
    # The answer follows the order of the question. So samples share the text up to the question and
    # have different answers. A sample's depth is that of the first needle in its question.
    needles = _needles(_depths(text), _words(text.rng), _values(text.rng, "number"))
    fill, inside = _prose(text), needles if text.planted else []
    return [
        _draft("number", fill, inside, needles[i:] + needles[:i], depth)
        for i, depth in enumerate(text.depths)
    ]


def _all_values(text: TextContext) -> list[SampleDraft]:
    """Return samples that differ in one of the key's four values and in its depth."""
    # Another key with four values for each sample would make the task harder if more samples share
    # a text, and one set of values serves only one question. So three values keep their random
    # places, and the fourth differs between samples. A sample's depth is that of its fourth value.
    key, values, fill = next(_words(text.rng)), _values(text.rng, "number"), _prose(text)
    others = [text.rng.randint(0, 100) for _ in range(SEVERAL - 1)]
    needles = [_Needle(key, next(values), depth) for depth in [*text.depths, *others]]
    drafts = []
    for own in needles[: len(text.depths)]:
        # Answers are listed in the order of the text.
        four = sorted([own, *needles[len(text.depths) :]], key=lambda needle: needle.depth)
        drafts.append(_draft("number", fill, four if text.planted else [], four, own.depth))
    return drafts


def _all_values_of_all(text: TextContext) -> list[SampleDraft]:
    """Return samples that ask for all values of a key, in a text of keys with four values each."""
    # A sample's depth is that of one of its values; the others have random places.
    names, values = _words(text.rng), numbers(text.rng, _DIGITS_2)
    asked = []
    for depth in text.depths:
        key, places = next(names), [depth, *(text.rng.randint(0, 100) for _ in range(SEVERAL - 1))]
        asked.append([_Needle(key, next(values), place) for place in sorted(places)])
    inside = [needle for four in asked for needle in four] if text.planted else []
    others: list[str] = []
    order = samples.scattered(text.rng)

    def fill(units: int, needles: list[tuple[int, str]]) -> str:
        while len(others) < units:
            key = next(names)
            for _ in range(SEVERAL):
                others.append(NEEDLE.format(kind="numbers", key=key, value=next(values)))
        lines = [others[i] for i in order(units)]
        return "\n".join(_plant(lines, needles, range(units + 1)))

    return [
        _draft("number", fill, inside, four, depth, PROMPT_MANY_2)
        for four, depth in zip(asked, text.depths, strict=True)
    ]


def _draft(
    kind: str,
    fill: _Haystack,
    inside: list[_Needle],
    targets: list[_Needle],
    depth: int,
    many: str = PROMPT_MANY,
) -> SampleDraft:
    """Return the question for the target needles in a text with the needles `inside`."""
    prompt, prefix = (PROMPT_ONE, PREFIX_ONE) if len(targets) == 1 else (many, PREFIX_MANY)
    keys = _join_words(list(dict.fromkeys(needle.key for needle in targets)))
    answers = [needle.value for needle in targets]
    planted = [
        (n.depth, NEEDLE.format(kind=f"{kind}s", key=n.key, value=n.value))
        for n in sorted(inside, key=lambda needle: needle.depth)
    ]
    return SampleDraft(
        prompt=lambda units: prompt.format(kind=kind, text=fill(units, planted), keys=keys),
        prefix=prefix.format(kind=kind, keys=keys),
        answers=answers,
        target=_join_words(answers),
        depth=depth,
    )


def _join_words(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _depths(text: TextContext) -> list[int]:
    """Return one depth for each of at most four samples, and random ones up to four."""
    further = SEVERAL - len(text.depths)
    return [*text.depths, *(text.rng.randint(0, 100) for _ in range(further))]


def _needles(depths: Sequence[int], keys: Iterator[str], values: Iterator[str]) -> list[_Needle]:
    return [_Needle(next(keys), next(values), depth) for depth in depths]


def _words(rng: random.Random) -> Iterator[str]:
    adjectives, nouns = _vocabulary()
    return _without_repeats(lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}")


def _uuids(rng: random.Random) -> Iterator[str]:
    return _without_repeats(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def _values(rng: random.Random, kind: str, digits: int = 7) -> Iterator[str]:
    return _uuids(rng) if kind == "uuid" else numbers(rng, digits)


def numbers(rng: random.Random, digits: int = 7) -> Iterator[str]:
    """Yield different numbers of so many digits, without end."""
    return _without_repeats(lambda: str(rng.randint(10 ** (digits - 1), 10**digits - 1)))


def _without_repeats(draw: Callable[[], str]) -> Iterator[str]:
    """Yield draws without end and without repetition: a question has one answer."""
    seen: set[str] = set()
    while True:
        if (value := draw()) not in seen:
            seen.add(value)
            yield value


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[list[str], list[str]]:
    from wonderwords import RandomWord

    random_word = RandomWord(enhanced_prefixes=False)
    return tuple(random_word.filter(include_categories=[kind]) for kind in ("adjective", "noun"))


def _prose(text: TextContext) -> _Haystack:
    """Return the words of a novel as a haystack; needles go to the ends of sentences."""
    words = text.word_source()

    def fill(units: int, needles: list[tuple[int, str]]) -> str:
        chosen = words(units)
        ends = [at for at, word in enumerate(chosen, start=1) if _ends_sentence(word)]
        return " ".join(_plant(chosen, needles, [0, *ends]))

    return fill


def _ends_sentence(word: str) -> bool:
    return word.endswith(_SENTENCE_ENDS) and word not in _TITLES


def _noise(_: TextContext) -> _Haystack:
    return _lines(repeat(NOISE))


def _lines(source: Iterator[str]) -> _Haystack:
    """Return lines of a source, read once each, as a haystack; a needle is a line among them."""
    lines: list[str] = []

    def fill(units: int, needles: list[tuple[int, str]]) -> str:
        lines.extend(islice(source, max(units - len(lines), 0)))
        return "\n".join(_plant(lines[:units], needles, range(units + 1)))

    return fill


def _plant(units: list[str], needles: list[tuple[int, str]], places: Sequence[int]) -> list[str]:
    """Put each needle at the one of `places` that is nearest to its depth."""
    # Needles are depths in percent and sentences, in ascending order of depth. A place is the
    # number of units before a needle.
    planted, before = [], 0
    for depth, sentence in needles:
        at = min(places, key=lambda place: abs(100 * place - depth * len(units)))
        planted += [*units[before:at], sentence]
        before = at
    return planted + units[before:]
