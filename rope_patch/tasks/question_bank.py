"""Multiple-choice questions without end: facts, words and sums, or a file's such as MMLU's.

RULERv2 asks MMLU's. These are easier: whoever has read one answers it from what most people know,
and nobody who has not read it has more than one chance in four.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rope_patch.tasks.short import grammar, tables
from rope_patch.utils.errors import parse_json

LETTERS = "ABCD"
_FIELDS = '{"question": "...", "choices": ["...", "...", "...", "..."], "answer": 0}'

# Several wordings of each relation of short/facts.csv and short/induction.csv.
_FACTS = {
    "author": ("Who wrote {}?", "The work {} is by which writer?"),
    "capital": ("What is the capital of {}?", "Which of these cities is the capital of {}?"),
    "class": (
        "To which group of animals does the {} belong?",
        "A zoo puts up a sign beside the {}. Which of these groups should the sign name?",
    ),
    "continent": ("On which continent does {} lie?", "Which continent is {} a part of?"),
    "currency": ("Which currency is used in {}?", "With what money does one pay in {}?"),
    "element": (
        "What is the chemical symbol of {}?",
        "Which symbol stands for {} in the periodic table?",
    ),
    "language": (
        "Which language do most people speak in {}?",
        "Most newspapers in {} are written in which language?",
    ),
}
_WORDS = {
    "opposite": ("Which word means the opposite of {}?", "What is the contrary of {}?"),
    "past": ("What is the past tense of {}?", "Today they {}. What did they do yesterday?"),
    "plural": ("What is the plural of {}?", "Behind the number two, which word does {} become?"),
    "young": ("What is a young {} called?", "Which name does the child of the {} have?"),
}


class ChoiceQuestion(NamedTuple):
    """A question with four choices.

    Attributes:
        text: The question and its choices in one line, as they stand in a text.
        letter: The right one of A, B, C and D.
    """

    text: str
    letter: str


def questions(rng: random.Random) -> Iterator[ChoiceQuestion]:
    """Yield made-up questions without end, no text twice; each letter is right equally often."""
    seen: set[str] = set()
    while True:
        stem, right, wrong = rng.choice(_KINDS)(rng)
        choices, letter = rng.sample(wrong, len(wrong)), rng.choice(LETTERS)
        choices.insert(LETTERS.index(letter), right)
        question = _in_one_line(stem, choices, letter)
        if question.text not in seen:
            seen.add(question.text)
            yield question


def read_bank(path: str) -> list[ChoiceQuestion]:
    """Return the questions of a file of JSON lines, with the fields that MMLU has (`cais/mmlu`).

    Args:
        path: A file whose lines have `question`, `choices` (four texts) and `answer` (0 to 3, or a
            letter of A to D). Other fields are ignored, and so are repeated questions.

    Raises:
        ValueError: No such file, no question, or a line that is not of that kind.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read questions from {path}: {error}") from None
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    bank = list(dict.fromkeys(_parse(line, f"{path}, line {i}") for i, line in numbered))
    if not bank:
        raise ValueError(f"{path} has no question: expected {_FIELDS} on each line")
    return bank


def _parse(line: str, at: str) -> ChoiceQuestion:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{at} is not JSON ({error}): expected {_FIELDS}") from None
    get = entry.get if isinstance(entry, dict) else lambda name: None
    stem, choices, answer = map(get, ("question", "choices", "answer"))
    if not isinstance(stem, str) or not stem.strip():
        raise ValueError(f"{at}: expected a text as 'question', got {stem!r:.80}: {_FIELDS}")
    if (
        not isinstance(choices, list)
        or len(choices) != len(LETTERS)
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise ValueError(f"{at}: expected four texts as 'choices', got {choices!r:.80}: {_FIELDS}")
    if type(answer) is int and 0 <= answer < len(LETTERS):
        answer = LETTERS[answer]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in LETTERS:
        raise ValueError(
            f"{at}: expected a number from 0 to 3 or a letter from A to D as 'answer', got "
            f"{answer!r:.80}"
        )
    return _in_one_line(stem, choices, answer)


def _in_one_line(stem: str, choices: Sequence[str], letter: str) -> ChoiceQuestion:
    """Return a question as RULERv2 writes it: choices behind letters, white space folded."""
    listed = (f"{name}. {choice}" for name, choice in zip(LETTERS, choices, strict=True))
    return ChoiceQuestion(re.sub(r"\s+", " ", " ".join([stem, *listed])).strip(), letter)


# --- Kinds of questions: each returns the question, the right choice and three wrong ones ---------

_Choices = tuple[str, str, list[str]]


def _fact(rng: random.Random) -> _Choices:
    relation = rng.choice(list(_FACTS))
    table = tables.read_table("facts")[relation]
    subject = rng.choice(list(table))
    wrong = sorted(set(table.values()) - {table[subject]})
    wording = rng.choice(_FACTS[relation])
    return wording.format(subject), table[subject], rng.sample(wrong, 3)


def _word(rng: random.Random) -> _Choices:
    relation = rng.choice(list(_WORDS))
    table = tables.read_table("induction")[relation]
    word = rng.choice(list(table))
    wrong = sorted(set(table.values()) - {table[word]})
    return rng.choice(_WORDS[relation]).format(word), table[word], rng.sample(wrong, 3)


def _more(rng: random.Random) -> _Choices:
    one, other = rng.sample(range(11, 90), 2)
    name, thing = rng.choice(grammar.WOMEN + grammar.MEN), rng.choice(grammar.THINGS)
    stem = f"{name} has {one} {thing}s and buys {other} more at the {rng.choice(grammar.PLACES)}."
    return _count(rng, f"{stem} How many {thing}s does {name} have then?", one + other)


def _fewer(rng: random.Random) -> _Choices:
    left, taken = rng.sample(range(11, 90), 2)
    person, thing = rng.choice(grammar.PEOPLE), rng.choice(grammar.THINGS)
    stem = f"Of {left + taken} {thing}s in a {rng.choice(grammar.PLACES)}, a {person} sells {taken}"
    return _count(rng, f"{stem}. How many are left?", left)


def _times(rng: random.Random) -> _Choices:
    boxes, each = rng.randint(2, 9), rng.randint(6, 12)
    person, thing = rng.choice(grammar.PEOPLE), rng.choice(grammar.THINGS)
    stem = f"The {person} packs {boxes} boxes, each with {each} {thing}s."
    return _count(rng, f"{stem} How many {thing}s are that in all?", boxes * each)


def _extreme(rng: random.Random) -> _Choices:
    numbers = sorted(rng.sample(range(1000, 10_000), 4))
    word = rng.choice(("smallest", "largest"))
    right = numbers.pop(0 if word == "smallest" else -1)
    return f"Which of these numbers is the {word}?", str(right), [str(n) for n in numbers]


def _alphabet(rng: random.Random) -> _Choices:
    words = sorted(rng.sample(grammar.PEOPLE + grammar.THINGS, 4))
    word = rng.choice(("first", "last"))
    right = words.pop(0 if word == "first" else -1)
    return f"Which of these words comes {word} in a dictionary?", right, words


def _series(rng: random.Random) -> _Choices:
    start, step = rng.randint(2, 60), rng.randint(3, 12)
    shown = ", ".join(str(start + i * step) for i in range(4))
    return _count(rng, f"Which number goes on with the series {shown}?", start + 4 * step)


def _count(rng: random.Random, stem: str, right: int) -> _Choices:
    """Return near misses as wrong choices: the right one has each rank among them equally often."""
    below = rng.randint(0, 3)
    misses = [-n for n in rng.sample((1, 2, 3, 10), below)]
    misses += rng.sample((1, 2, 3, 10), 3 - below)
    return stem, str(right), [str(right + miss) for miss in misses]


# Facts and words are more than one kind each.
_KINDS: tuple[Callable[[random.Random], _Choices], ...] = (
    *(_fact, _fact, _fact, _word, _word),
    *(_more, _fewer, _times, _extreme, _alphabet, _series),
)
