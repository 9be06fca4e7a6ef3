"""Sentences with and without an error of grammar, from templates and lists of words."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

from rope_patch.tasks.short import choices

SENTENCES_BEFORE = 4  # right sentences that move the pair away from the first positions

Pair = tuple[str, str]  # the right sentence, the wrong one


def _words(text: str) -> list[str]:
    return text.split()


# All nouns make their plural with -s; none begins with a vowel.
PEOPLE = _words(
    "teacher doctor farmer singer painter lawyer sailor driver writer student neighbour brother "
    "sister cousin friend guest waiter banker soldier nurse"
)
THINGS = _words(
    "table lamp book chair bottle picture basket window carpet curtain letter ticket hammer mirror "
    "blanket pillow bucket ladder candle violin"
)
STUFF = _words("water sand sugar milk rice money furniture luggage bread smoke")
PLACES = _words("village kitchen garden station library hotel theatre harbour market museum")
QUALITIES = _words("old new heavy small strange clean broken white large cheap")
MOODS = _words("tired happy late ready famous rude polite nervous silent angry")
WOMEN = _words("Mary Susan Julia Helen Laura Emma Alice Martha")
MEN = _words("John Peter David George Robert Thomas Henry William")
LIKED = _words("liked knew avoided admired followed trusted")
TO_SELF = _words("hurt blamed praised introduced described defended surprised excused")
PARTICIPLES = {  # participle by past tense, where the two differ
    "broke": "broken", "stole": "stolen", "forgot": "forgotten", "drew": "drawn",
    "hid": "hidden", "saw": "seen", "took": "taken", "chose": "chosen", "threw": "thrown",
}  # fmt: skip


def build(**metadata: Any) -> dict[str, Any]:
    """Build lm-eval's `custom_dataset`; its metadata is what `choices.build` takes."""
    return choices.build(questions, "rp_short_grammar", **metadata)


def questions(rng: random.Random) -> Iterator[choices.ChoiceQuestion]:
    """Yield questions without end; phenomena take turns, no pair comes twice."""
    seen: set[Pair] = set()
    for phenomenon in cycle(PHENOMENA):
        pair = phenomenon(rng)
        while pair in seen:
            pair = phenomenon(rng)
        seen.add(pair)
        before = [rng.choice(PHENOMENA)(rng)[0] for _ in range(SENTENCES_BEFORE)]
        yield choices.ChoiceQuestion(context=" ".join(before), right=pair[0], wrong=[pair[1]])


def agreement_past_a_phrase(rng: random.Random) -> Pair:
    """Return a verb that agrees with the subject, past a noun of the other number."""
    plural = rng.random() < 0.5
    subject, beside = _inflect(rng.choice(THINGS), plural), _inflect(rng.choice(PEOPLE), not plural)
    start = f"The {subject} that belonged to the {beside} from the {rng.choice(PLACES)}"
    return _sentence_pair(f"{start} {{}} very {rng.choice(QUALITIES)}.", ("was", "were"), plural)


def agreement_past_a_clause(rng: random.Random) -> Pair:
    """Return the same past a relative clause with a subject of the other number."""
    plural = rng.random() < 0.5
    subject, other = rng.sample(PEOPLE, 2)
    start = f"The {_inflect(subject, plural)} that the {_inflect(other, not plural)} "
    start += f"{rng.choice(LIKED)} at the {rng.choice(PLACES)}"
    return _sentence_pair(f"{start} {{}} always {rng.choice(MOODS)}.", ("is", "are"), plural)


def reflexive_gender(rng: random.Random) -> Pair:
    """Return a reflexive that has the gender of its own clause's subject."""
    woman, man = rng.choice(WOMEN), rng.choice(MEN)
    female = rng.random() < 0.5
    outer, inner = (man, woman) if female else (woman, man)
    start = f"{outer} said that {inner} had {rng.choice(['often', 'never', 'once'])} "
    start += f"{rng.choice(TO_SELF)} {{}} at the {rng.choice(PLACES)}."
    return _sentence_pair(start, ("himself", "herself"), female)


def reflexive_number(rng: random.Random) -> Pair:
    """Return a reflexive that has the number of its subject."""
    plural = rng.random() < 0.5
    subject, beside = rng.sample(PEOPLE, 2)
    name, reflexive = rng.choice([(rng.choice(WOMEN), "herself"), (rng.choice(MEN), "himself")])
    whole_subject = name if not plural else f"The {_inflect(subject, True)}"
    start = f"{whole_subject}, who {rng.choice(LIKED)} the {_inflect(beside, not plural)} at the "
    start += f"{rng.choice(PLACES)}, {rng.choice(TO_SELF)}"
    return _sentence_pair(f"{start} {{}}.", (reflexive, "themselves"), plural)


def determiner(rng: random.Random) -> Pair:
    """Return a noun that has the number of its determiner, past adjectives."""
    plural = rng.random() < 0.5
    word = rng.choice(["these", "those"] if plural else ["this", "that"])
    first, second = rng.sample(QUALITIES, 2)
    noun = rng.choice(THINGS)
    start = f"The {rng.choice(PEOPLE)} sold {word} {first} {second} {{}} at the market."
    return _sentence_pair(start, (noun, _inflect(noun, True)), plural)


def polarity(rng: random.Random) -> Pair:
    """Return a sentence with `ever`, which needs a negative subject."""
    verb = rng.choice(sorted(PARTICIPLES.values()))
    rest = f"in the {rng.choice(PLACES)} has ever {verb} the {rng.choice(THINGS)}."
    return f"Nobody {rest}", f"Somebody {rest}"


def participle(rng: random.Random) -> Pair:
    """Return a verb form: the participle after `had`, else the past tense."""
    past, perfect = rng.choice(sorted(PARTICIPLES.items()))
    helped = rng.random() < 0.5
    subject, other = rng.sample(PEOPLE, 2)
    start = (
        f"The {subject}{' had' if helped else ''}, like the {other} at the {rng.choice(PLACES)},"
    )
    return _sentence_pair(f"{start} {{}} the {rng.choice(THINGS)}.", (past, perfect), helped)


def quantity(rng: random.Random) -> Pair:
    """Return a quantity: `many` counts things, `much` measures stuff."""
    counted = rng.random() < 0.5
    noun = _inflect(rng.choice(THINGS), True) if counted else rng.choice(STUFF)
    start = f"The {rng.choice(PEOPLE)} did not see {{}} {noun} in the {rng.choice(PLACES)}."
    return _sentence_pair(start, ("much", "many"), counted)


PHENOMENA: tuple[Callable[[random.Random], Pair], ...] = (
    agreement_past_a_phrase,
    agreement_past_a_clause,
    reflexive_gender,
    reflexive_number,
    determiner,
    polarity,
    participle,
    quantity,
)


def _sentence_pair(sentence: str, forms: tuple[str, str], second: bool) -> Pair:
    """Return the sentence with the right and with the wrong form; `second` picks the right one."""
    right, wrong = reversed(forms) if second else forms
    return sentence.format(right), sentence.format(wrong)


def _inflect(noun: str, plural: bool) -> str:
    return f"{noun}s" if plural else noun
