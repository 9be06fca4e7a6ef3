"""Latent lists: a program changes a list line by line; the question is what it holds at the end.

After the latent list of Michelangelo (arXiv:2409.12640), whose data is not public. So wording,
filler and the mix of operations are this project's own: filler changes four other lists, or prints.
The score is exact. Prompts are made to the token, and several questions may share a program.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rope_patch.tasks import samples, scoring

ROOM = 64  # eleven numbers with brackets and commas, even where a digit is a token

PROMPT = (
    "Below is a Python program. I will ask about one of its lists afterwards.\n```python\n"
    "{lines}\n```\nWhat does the program print at its end if the line `print({expression})` is "
    "added there?"
)
PREFIX = "Output:"

OPERATIONS = 12  # operations that change the list in question, unless given
FINAL_LENGTHS = range(4, 12)
# The expected score of the best constant answer (an item's by its place), over 40,000 lists; a
# length is one of eight.
CHANCE = {"list": 0.0, "sum": 0.003, "length": 1 / len(FINAL_LENGTHS), "item": 0.02, "slice": 0.0}

_NAMES = ["alpha", "beta", "gamma", "delta", "kappa", "lambda_", "omega", "sigma", "theta", "zeta"]
_START = 5  # numbers that each list begins with
_OTHERS = 4  # lists that nothing is asked about
_VALUES = range(100)
_Question = tuple[str, str, object]
_MOST_QUESTIONS = 9  # questions; about the shortest list there are no more
ANSWER = re.compile(r"\[[^\]]*\]|-?\d+(?:\.\d+)?")


def build(**metadata: Any) -> dict[str, Any]:
    """Build rp_latent_list; the arguments are those of `samples.build` and `operations`.

    `operations` (12 unless given, 8 at least) is how many lines change the list in question.
    Prompts grow by whole lines.
    """
    return samples.build(generate, "rp_latent_list", ROOM, **metadata)


def generate(text: samples.TextContext) -> list[samples.SampleDraft]:
    """Return drafts of samples of one program: each asks for something else of the same list.

    Raises:
        ValueError: Too few operations, or more questions than there are about the list.
    """
    count = int(text.options.get("operations", OPERATIONS))
    if count < 8:
        raise ValueError(f"operations must be at least 8 lines that change the list, got {count}")
    rng = text.rng
    name, *others = rng.sample(_NAMES, 1 + _OTHERS)
    start, own, final = _program(rng, name, count)
    questions = _questions(rng, name, final, len(text.depths))
    # In the control nothing says what the list held, nor prints it, and no line has a number that
    # is an answer.
    answers = set() if text.planted else {str(value) for _, _, value in questions}
    values = [value for value in _VALUES if str(value) not in answers]
    state = {other: [rng.choice(values) for _ in range(_START)] for other in others}
    heads = [(other, list(values)) for other, values in state.items()]
    if text.planted:
        heads.append((name, start))
    rng.shuffle(heads)
    head = [f"{variable} = {values}" for variable, values in heads]
    filler = partial(_other_line, rng, name if text.planted else None, state)
    if not text.planted:
        filler = partial(_line_without, filler, answers, state)
    insertions = list(zip(sorted(rng.random() for _ in own), own, strict=True))
    filler_lines: list[str] = []

    def lines(n: int) -> str:
        while len(filler_lines) < n:  # only the fitting of the length knows how many
            filler_lines.append(filler())
        program = filler_lines[:n]
        for share, line in reversed(insertions if text.planted else []):
            program.insert(round(share * n), line)  # from the back: no place moves
        return "\n".join([*head, *program])

    return [_draft(lines, kind, expression, value) for kind, expression, value in questions]


def _draft(
    lines: Callable[[int], str], kind: str, expression: str, value: object
) -> samples.SampleDraft:
    chance = (lambda n: CHANCE[kind]) if CHANCE[kind] else None
    return samples.SampleDraft(
        prompt=lambda n: PROMPT.format(lines=lines(n), expression=expression),
        prefix=PREFIX,
        answers=[str(value)],
        target=str(value),
        chance=chance,
        target_chance=chance,
        columns={"question": kind},
    )


def _program(rng: random.Random, name: str, count: int) -> tuple[list[int], list[str], list[int]]:
    """Return a list's first values, lines that change it, and its last values."""
    # Every final length is as likely as the others, so it cannot be guessed.
    growth = rng.choice(FINAL_LENGTHS) - _START
    neutral = 2 + (count - growth) % 2  # the others are in pairs, but for the growth
    longer = (count - neutral + growth) // 2
    kinds = ["sort", "reverse", rng.choice(["sort", "reverse"])][:neutral]
    kinds += ["longer"] * longer + ["shorter"] * (count - neutral - longer)
    while True:
        rng.shuffle(kinds)
        sizes = [_START]
        for kind in kinds:
            sizes.append(sizes[-1] + {"longer": 1, "shorter": -1}.get(kind, 0))
        if min(sizes) >= 2:
            break
    start = [rng.choice(_VALUES) for _ in range(_START)]
    values = list(start)
    lines = [_change(rng, name, values, kind) for kind in kinds]
    return start, lines, values


def _change(rng: random.Random, name: str, values: list[int], kind: str) -> str:
    """Change a list in place, and return the line of Python that does the same."""
    if kind == "sort":
        values.sort()
        return f"{name}.sort()"
    if kind == "reverse":
        values.reverse()
        return f"{name}.reverse()"
    if kind == "longer":
        value = rng.choice(_VALUES)
        if rng.random() < 0.5:
            values.append(value)
            return f"{name}.append({value})"
        at = rng.randrange(len(values))
        values.insert(at, value)
        return f"{name}.insert({at}, {value})"
    way = rng.choice(["remove", "pop", "pop at"])
    if way == "remove":
        value = rng.choice(values)
        values.remove(value)
        return f"{name}.remove({value})"
    if way == "pop":
        values.pop()
        return f"{name}.pop()"
    at = rng.randrange(len(values))
    values.pop(at)
    return f"{name}.pop({at})"


def _other_line(rng: random.Random, name: str | None, state: dict[str, list[int]]) -> str:
    """Return a line that leaves the list in question as it is; `state` follows other lists."""
    other = rng.choice(sorted(state))
    if rng.random() < 0.3:
        argument = rng.choice([name, other]) if name else other
        return rng.choice(
            [
                f"print({argument})",
                f"print(len({argument}))",
                f"print({argument}[0])",
                f"print({rng.choice(_VALUES)} in {argument})",
                f"print({argument}.count({rng.choice(_VALUES)}))",
                f"print(sorted({argument}))",
            ]
        )
    size = len(state[other])
    kinds = ["sort", "reverse", *["longer"] * (3 if size < 12 else 0)]
    kinds += ["shorter"] * (3 if size > 2 else 0)
    return _change(rng, other, state[other], rng.choice(kinds))


def _line_without(draw: Callable[[], str], answers: set[str], state: dict[str, list[int]]) -> str:
    """Return a line that has none of the numbers in `answers`; `state` follows that line alone."""
    before = {name: list(values) for name, values in state.items()}
    while answers & set(re.findall(r"\d+", line := draw())):
        for name, values in before.items():
            state[name][:] = values
    return line


def _questions(rng: random.Random, name: str, final: list[int], count: int) -> list[_Question]:
    """Return kinds of question, expressions and values; each kind once before any comes twice."""
    if count > _MOST_QUESTIONS:
        raise ValueError(
            f"rp_latent_list asks at most {_MOST_QUESTIONS} questions about a list, got per_text "
            f"{count}: take fewer"
        )
    whole: list[_Question] = [
        ("list", name, list(final)),
        ("sum", f"sum({name})", sum(final)),
        ("length", f"len({name})", len(final)),
    ]
    items: list[_Question] = [("item", f"{name}[{i}]", final[i]) for i in range(len(final))]
    slices: list[_Question] = [
        ("slice", f"{name}[{i}:{i + 3}]", final[i : i + 3]) for i in range(len(final) - 2)
    ]
    first = [*whole, items.pop(rng.randrange(len(items))), slices.pop(rng.randrange(len(slices)))]
    rng.shuffle(first)
    rest = items + slices
    rng.shuffle(rest)
    return (first + rest)[:count]


def same_value(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return 1 if the first list or number in the text is the answer, blanks aside."""
    match = ANSWER.search(str(results[0]))
    response = re.sub(r"\s", "", match.group()) if match else None
    right = response == doc["target"].replace(" ", "")
    return scoring.all_answers(doc, results) | {"score": float(right)}
