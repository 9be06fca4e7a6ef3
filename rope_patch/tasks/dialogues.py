"""Multi-round co-reference: repeat the n-th of several replies to one and the same request.

After OpenAI-MRCR (https://huggingface.co/datasets/openai/mrcr), itself after Michelangelo's MRCR
(arXiv:2409.12640), with its 2, 4 or 8 equal requests, its random string before the answer and its
score. The differences: replies are one paragraph of 200 to 400 characters from a grammar (OpenAI's
are a model's, and longer), the dialogue is plain text without a chat template or worked examples,
prompts are made to the token, and several questions may share a dialogue.
"""

from __future__ import annotations

import json
import random
import re
import string
from difflib import SequenceMatcher
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

from rope_patch.tasks import samples, scoring

ROOM = 224  # a reply of at most 400 characters, and the string before it

PROMPT = (
    "Below is a conversation between a user and an assistant. Its last message asks for one of the "
    "assistant's replies again.\n\n{turns}\n\nUser: Write {code}, and after it repeat, word for "
    "word, the {ordinal} {kind} about {topic} that you wrote in this conversation. Write nothing "
    "else."
)
# Worded like the end of the prompt with its answer, so that the answer continues the dialogue.
TURN = "User: Write a {kind} about {topic}. Assistant: {reply}"
PREFIX = "Assistant:"

_LENGTHS = (200, 400)  # characters; below 200 difflib counts frequent letters, and ratios are high
_CODE = string.ascii_letters + string.digits
_ORDINALS = ["1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th"]
_SENTENCES = 4


def two_needles(**metadata: Any) -> dict[str, Any]:
    """Build rp_mrcr_2; the arguments are those of `samples.build`. Prompts grow by turns."""
    return samples.build(partial(_generate, needles=2), "rp_mrcr_2", ROOM, **metadata)


def four_needles(**metadata: Any) -> dict[str, Any]:
    """Build rp_mrcr_4; the arguments are those of `samples.build`. Prompts grow by turns."""
    return samples.build(partial(_generate, needles=4), "rp_mrcr_4", ROOM, **metadata)


def eight_needles(**metadata: Any) -> dict[str, Any]:
    """Build rp_mrcr_8; the arguments are those of `samples.build`. Prompts grow by turns."""
    return samples.build(partial(_generate, needles=8), "rp_mrcr_8", ROOM, **metadata)


class _Needle(NamedTuple):
    """A reply of the assistant to a request that has several replies."""

    depth: float  # share of the other turns that come before it: 0 is the first turn, 1 the last
    sample_index: int | None  # of the sample that asks for this reply; None if none does
    kind: str  # the requested kind of text
    topic: str  # the requested topic
    reply: str


def _generate(text: samples.TextContext, needles: int) -> list[samples.SampleDraft]:
    """Return drafts of samples of one dialogue."""
    rng, count = text.rng, len(text.depths)
    kinds, topics = list(_words()["kinds"]), _words()["topics"]
    requests = -(-count // needles)
    if requests > len(topics) // 2:
        raise ValueError(
            f"the dialogue has room for {len(topics) // 2 * needles} questions, got per_text "
            f"{count}: take fewer"
        )
    asked_requests = [(rng.choice(kinds), topic) for topic in rng.sample(topics, requests)]
    # The first `needles` samples ask for the replies to one request, the next ones for the replies
    # to another request, and so on.
    groups = [
        [
            _Needle(depth, index, *request, _reply(rng, *request))
            for depth, index in _needle_depths(
                rng, text.depths, range(i, min(i + needles, count)), needles
            )
        ]
        for i, request in zip(range(0, count, needles), asked_requests, strict=True)
    ]
    codes = ["".join(rng.choices(_CODE, k=10)) for _ in text.depths]
    all_needles = sorted((n for group in groups for n in group), key=lambda needle: needle.depth)
    others: list[str] = []

    def turns(n: int) -> str:
        while len(others) < n:  # the search for the prompt's length asks for any number
            others.append(_other_turn(rng, asked_requests))
        dialogue = others[:n]
        for needle in reversed(all_needles if text.planted else []):
            # From the back, so that earlier indices stay right.
            dialogue.insert(round(needle.depth * n), TURN.format(**needle._asdict()))
        return "\n\n".join(dialogue)

    def draft(number: int) -> samples.SampleDraft:
        group = groups[number // needles]
        order, needle = next((i, one) for i, one in enumerate(group) if one.sample_index == number)
        words = {"kind": needle.kind, "topic": needle.topic, "ordinal": _ORDINALS[order]}
        target = f"{codes[number]} {needle.reply}"
        return samples.SampleDraft(
            prompt=lambda n: PROMPT.format(turns=turns(n), code=codes[number], **words),
            prefix=PREFIX,
            # The end is a part, because words that follow count against the answer.
            answers=[f"{target}\n"],
            target=target,
            depth=text.depths[number],
            chance=lambda n: sum(_ratio(other.reply, needle.reply) for other in group) / needles,
            target_chance=lambda n: 1 / needles,
        )

    return [draft(number) for number in range(count)]


def _needle_depths(
    rng: random.Random, depths: list[int], numbers: range, needles: int
) -> list[tuple[float, int | None]]:
    """Return the depth of each reply to one request, in order, and the sample that asks for it."""
    # A random share of the other replies comes before the one that is asked for. So the first reply
    # is asked for as often as the second or the last, at any depth.
    order = sorted(numbers, key=depths.__getitem__)
    ranks = dict(zip(sorted(rng.sample(range(needles), len(order))), order, strict=True))
    found: list[tuple[float, int | None]] = []
    low, others = 0.0, 0
    for rank in range(needles + 1):
        if rank < needles and rank not in ranks:
            others += 1
            continue
        high = depths[ranks[rank]] / 100 if rank in ranks else 1.0
        found += [(depth, None) for depth in sorted(rng.uniform(low, high) for _ in range(others))]
        if rank in ranks:
            found.append((high, ranks[rank]))
        low, others = high, 0
    return found


@lru_cache(maxsize=1)
def _words() -> dict[str, Any]:
    """Return kinds of text with their first sentences, topics, sentences and what fills them."""
    path = files(__package__) / "dialogues.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _reply(rng: random.Random, kind: str, topic: str) -> str:
    """Return a text of a kind about a topic, in one paragraph of 200 to 400 characters."""
    words = _words()
    while True:
        parts = [rng.choice(words["kinds"][kind]), *rng.sample(words["sentences"], _SENTENCES)]
        reply = " ".join(_fill(rng, part, topic) for part in parts)
        if _LENGTHS[0] <= len(reply) <= _LENGTHS[1]:
            return reply


def _fill(rng: random.Random, sentence: str, topic: str) -> str:
    """Return a sentence with its slots filled; slots of one sentence get different words."""
    words = _words()
    slots: dict[str, str] = {"topic": topic}
    for kind in ("name", "place", "thing", "adjective"):
        slots[kind], slots[f"{kind}2"] = rng.sample(words[kind], 2)
    slots["deed"], slots["time"] = rng.choice(words["deed"]), rng.choice(words["time"])
    slots["time_first"] = slots["time"][0].upper() + slots["time"][1:]
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence.format(**slots))


def draw_speech(rng: random.Random) -> str:
    """Return a sentence as people in a story say it, without any topic."""
    return _fill(rng, rng.choice(_words()["sentences"]), "")


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Return different first names."""
    return rng.sample(_words()["name"], count)


def _other_turn(rng: random.Random, asked: list[tuple[str, str]]) -> str:
    """Return a turn with another request; half of them share kind or topic with one asked for."""
    words = _words()
    while True:
        kind, topic = rng.choice(list(words["kinds"])), rng.choice(words["topics"])
        if rng.random() < 0.5:
            near = rng.choice(asked)
            kind, topic = rng.choice([(near[0], topic), (kind, near[1])])
        if (kind, topic) not in asked:
            return TURN.format(kind=kind, topic=topic, reply=_reply(rng, kind, topic))


def repeated(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return difflib's ratio of the text after the string to the reply; 0 without the string.

    The text counts up to the end of its paragraph: replies are one, and what a base model writes
    next is another turn.
    """
    code, reply = doc["target"].split(" ", 1)
    response = str(results[0]).strip()
    score = 0.0
    if response.startswith(code):
        paragraph = response[len(code) :].lstrip().split("\n")[0].rstrip()
        score = _ratio(paragraph, reply)
    return scoring.all_answers(doc, results) | {"score": score}


def _ratio(response: str, reply: str) -> float:
    return SequenceMatcher(None, response, reply).ratio()
