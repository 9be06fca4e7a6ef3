"""RULERv2's ladders of numbered questions: copy one, copy and solve it, solve it; one of several.

After the tasks easy, medium and hard of mk_niah and mv_niah (NVIDIA-NeMo/Skills, branch
chsieh/ruler2, Apache-2.0; https://openreview.net/forum?id=GzzyuhP5Kz). The instructions are theirs,
and so are the starts of answers, which they give to base models only. Questions are made up, or a
file's; theirs are MMLU's.

The tasks of a ladder draw the same questions and numbers at the same seed and length: what one
task asks to copy, the next asks to solve. So scores of one ladder are paired by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

from rope_patch.tasks import needles, question_bank, samples, scoring
from rope_patch.tasks.question_bank import LETTERS, ChoiceQuestion
from rope_patch.tasks.samples import LadderStep, SampleDraft, TextContext

# Their wording.
_SOME = "Below are some questions. I will ask you to "
_COPY = f"{_SOME}copy one of them. Please copy and paste the question you find."
_COPY_SOME = f"{_SOME}copy some of them. Please copy and paste the questions you find."
_SOLVE = (
    f"{_SOME}solve one of them. Please solve the question you find and make sure to put the answer "
    "(and only answer) inside \\boxed\\{\\}."
)
_LINE = "Question {number}: {text}"
_EXAMPLES = (
    "Here are some examples to help you understand the task:\n\n{examples}\n\nHere is the actual "
    "task you need to solve:\n\n"
)

SHOTS = 5  # solved examples
COPIES = 4  # questions of one number
MOST = 100  # tokens of a question that is asked: a copy must have room
_ROOM = 128  # of one copy
_GUESSES = 32  # questions that chance is measured with
_ORDINALS = ("1st", "2nd", "3rd", "4th")


_COPY_ONE = LadderStep(
    "rp_v2_mk_niah_easy",
    _ROOM,
    _COPY,
    "Please copy the Question {number} from the context.",
    "Question {number}:",
)
_COPY_AND_SOLVE = LadderStep(
    "rp_v2_mk_niah_medium",
    _ROOM + 32,
    _SOLVE,
    "Please copy the Question {number} from the context and then solve it with an answer from A, "
    "B, C, D.",
    "Question {number}:",
)
_SOLVE_ONE = LadderStep(
    "rp_v2_mk_niah_hard",
    32,
    _SOLVE,
    "Please solve the Question {number} from the context with an answer from A, B, C, D.",
    "Solution:",
)
_COPY_ALL = LadderStep(
    "rp_v2_mv_niah_easy",
    COPIES * _ROOM,
    _COPY_SOME,
    "Please find and copy all the Question {number} from the context.",
    "Question {number}:",
)
_COPY_ALL_THEN_ONE = LadderStep(
    "rp_v2_mv_niah_medium",
    (COPIES + 1) * _ROOM,
    _COPY,
    "Please first copy all the Question {number} from the context and then copy the {order} (1 "
    "indexed) Question {number} at the end.",
    "Question {number}:",
)
_COPY_ONE_OF_ALL = LadderStep(
    "rp_v2_mv_niah_hard",
    _ROOM,
    _COPY,
    "Please copy the {order} (1 indexed) Question {number} from the context.",
    "Question {number}:",
)
_SINGLE = (_COPY_ONE, _COPY_AND_SOLVE, _SOLVE_ONE)
_GROUPS = (_COPY_ALL, _COPY_ALL_THEN_ONE, _COPY_ONE_OF_ALL)


def copy_one(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mk_niah_easy: copy the question with a number.

    Args:
        questions: A file for `question_bank.read_bank`; None takes made-up questions.
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `samples.build` and `read_bank`, or a file with too few questions.
    """
    return _build(_COPY_ONE, questions, metadata)


def copy_and_solve(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mk_niah_medium: copy the question, then solve it; as `copy_one`."""
    return _build(_COPY_AND_SOLVE, questions, metadata)


def solve(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mk_niah_hard: solve the question with a number; as `copy_one`."""
    return _build(_SOLVE_ONE, questions, metadata)


def copy_all(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mv_niah_easy: copy the four questions of a number; as `copy_one`."""
    return _build(_COPY_ALL, questions, metadata)


def copy_all_then_one(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mv_niah_medium: copy all four, then one of them; as `copy_one`."""
    return _build(_COPY_ALL_THEN_ONE, questions, metadata)


def copy_one_of_all(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of mv_niah_hard: copy the k-th question of a number; as `copy_one`."""
    return _build(_COPY_ONE_OF_ALL, questions, metadata)


def _build(step: LadderStep, questions: str | None, metadata: dict[str, Any]) -> dict[str, Any]:
    bank = question_bank.read_bank(questions) if questions else None
    ladder, draw = (_SINGLE, _draw_single) if step in _SINGLE else (_GROUPS, _draw_groups)
    return samples.build_step(partial(draw, bank=bank), step, ladder, **metadata)


def _draw_single(
    text: TextContext, bank: list[ChoiceQuestion] | None
) -> dict[LadderStep, list[SampleDraft]]:
    """Return samples of one text whose questions have a number each."""
    rng, numbers = text.rng, needles.numbers(text.rng)
    letters = islice(cycle(rng.sample(LETTERS, len(LETTERS))), len(text.depths))
    asked, others = _choose(text, bank, [*letters])
    numbered = [(next(numbers), question) for question in asked]
    # The examples are questions of the text, and of that of the task without examples.
    shown = [(next(numbers), next(others)) for _ in range(SHOTS)]
    placed = [(rng.uniform(0, 100), *each) for each in shown]
    if text.planted:
        placed += [(d, *each) for d, each in zip(text.depths, numbered, strict=True)]
    haystack = _Haystack(zip(numbers, others, strict=False), placed)

    def draft(step: LadderStep, number: str, question: ChoiceQuestion, depth: int) -> SampleDraft:
        is_copy, is_solution = step is _COPY_ONE, step is _SOLVE_ONE
        solved = (
            f"{step.ask.format(number=n)}\n{step.prefix.format(number=n)} {_solution(step, each)}"
            for n, each in shown
        )
        examples = "" if is_copy else _EXAMPLES.format(examples="\n\n".join(solved))
        return SampleDraft(
            prompt=partial(haystack.prompt, step.rule, examples + step.ask.format(number=number)),
            prefix=step.prefix.format(number=number),
            answers=[question.text if is_copy else question.letter],
            target=_solution(step, question),
            depth=depth,
            decoys=tuple(map(_box, LETTERS)) if is_solution else (),
            chance=haystack.chance([question.text]) if is_copy else _one_in_four,
            target_chance=_one_in_four if is_solution else None,
        )

    return {
        step: [draft(step, *each, depth) for each, depth in zip(numbered, text.depths, strict=True)]
        for step in _SINGLE
    }


def _draw_groups(
    text: TextContext, bank: list[ChoiceQuestion] | None
) -> dict[LadderStep, list[SampleDraft]]:
    """Return samples of one text in which each number has four questions."""
    rng, numbers = text.rng, needles.numbers(text.rng)
    asked, others = _choose(text, bank, [LETTERS] * COPIES * len(text.depths))
    groups = [
        (next(numbers), asked[at : at + COPIES], depth)
        for at, depth in zip(range(0, len(asked), COPIES), text.depths, strict=True)
    ]
    # Each rank comes as often at each depth: of four at random depths, the first of those that are
    # asked for near the end would be rare.
    ranks = list(islice(cycle(rng.sample(range(COPIES), COPIES)), len(groups)))
    placed: list[tuple[float, str, ChoiceQuestion]] = []
    for (number, group, depth), rank in zip(groups, ranks, strict=True):
        before = sorted(rng.uniform(0, depth) for _ in range(rank))
        behind = sorted(rng.uniform(depth, 100) for _ in range(COPIES - 1 - rank))
        if text.planted:
            at = [*before, depth, *behind]
            placed += [(d, number, question) for d, question in zip(at, group, strict=True)]
    haystack = _Haystack(_in_groups(numbers, others), placed, samples.scattered(rng))

    def draft(
        step: LadderStep, number: str, group: list[ChoiceQuestion], depth: int, rank: int
    ) -> SampleDraft:
        copies, one = [question.text for question in group], group[rank].text
        written = {_COPY_ALL: copies, _COPY_ALL_THEN_ONE: [*copies, one]}.get(step, [one])
        answers = copies if step is _COPY_ALL else [one]
        prefix = step.prefix.format(number=number)
        ask = step.ask.format(number=number, order=_ORDINALS[rank])
        return SampleDraft(
            prompt=partial(haystack.prompt, step.rule, ask),
            prefix=prefix,
            answers=answers,
            target=f"\n\n{prefix} ".join(written),
            depth=depth,
            chance=haystack.chance(answers),
        )

    return {
        step: [draft(step, *group, rank) for group, rank in zip(groups, ranks, strict=True)]
        for step in _GROUPS
    }


def _choose(
    text: TextContext, bank: list[ChoiceQuestion] | None, letters: Sequence[str]
) -> tuple[list[ChoiceQuestion], Iterator[ChoiceQuestion]]:
    """Return a question to ask for each of the letters, one of which is right; and all others."""
    rng = text.rng
    source = question_bank.questions(rng) if bank is None else iter(rng.sample(bank, len(bank)))
    passed: list[ChoiceQuestion] = []
    asked = []
    for right in letters:
        for i, question in enumerate(chain(passed, source)):  # from len(passed) on, the source's
            if question.letter in right and _tokens(text, question) <= MOST:
                asked.append(question)
                del passed[i : i + 1]
                break
            if i == len(passed):
                passed.append(question)
        else:
            raise ValueError(
                f"the file has too few questions whose answer is {' or '.join(right)} and which "
                f"take at most {MOST} tokens: the samples of a text ask {len(letters)}, got "
                f"{len(asked)}; give a longer file or a smaller per_text"
            )
    if bank is None:
        return asked, chain(passed, source)
    others = [*passed, *source]
    if len(others) < SHOTS:
        raise ValueError(
            f"the file has {len(bank)} questions, of which the samples of a text ask "
            f"{len(letters)}: expected {SHOTS} others at least to fill it with; give a longer file"
        )
    return asked, cycle(others)


def _tokens(text: TextContext, question: ChoiceQuestion) -> int:
    encoded = text.tokenizer(question.text, add_special_tokens=False, verbose=False)
    return len(encoded.input_ids)


def _in_groups(
    numbers: Iterator[str], questions: Iterator[ChoiceQuestion]
) -> Iterator[tuple[str, ChoiceQuestion]]:
    """Yield questions with a number for each four of them."""
    for number in numbers:
        for question in islice(questions, COPIES):
            yield number, question


class _Haystack:
    """Numbered questions without end, and others that are placed among the first n of them."""

    def __init__(
        self,
        source: Iterator[tuple[str, ChoiceQuestion]],
        placed: list[tuple[float, str, ChoiceQuestion]],
        order: Callable[[int], Sequence[int]] = range,
    ) -> None:
        self._source, self._order = source, order
        self._placed = sorted(placed, key=lambda each: each[0])  # depth in percent
        self._read: list[tuple[str, ChoiceQuestion]] = []

    def prompt(self, rule: str, ask: str, units: int) -> str:
        """Return the prompt with so many questions of the source."""
        self._read_to(units)
        questions = [self._read[i] for i in self._order(units)]
        for depth, number, question in reversed(self._placed):  # from the back: no place moves
            questions.insert(round(depth * units / 100), (number, question))
        lines = (_LINE.format(number=number, text=each.text) for number, each in questions)
        return "\n\n".join([rule, *lines, ask])

    def chance(self, answers: list[str]) -> Callable[[int], float]:
        """Return the mean score of other questions as answers."""

        def mean(_: int) -> float:
            self._read_to(_GUESSES)
            guesses = [question.text for _, question in self._read[:_GUESSES]]
            scores = (scoring.all_copies({"answers": answers}, [guess]) for guess in guesses)
            return sum(score["score"] for score in scores) / len(guesses)

        return mean

    def _read_to(self, count: int) -> None:
        self._read.extend(islice(self._source, max(count - len(self._read), 0)))


def _one_in_four(_: int) -> float:
    return 1 / len(LETTERS)


def _solution(step: LadderStep, question: ChoiceQuestion) -> str:
    """Return what follows the start of the answer."""
    if step is _COPY_ONE:
        return question.text
    box = _box(question.letter)
    return box if step is _SOLVE_ONE else f"{question.text}\nSolution: {box}"


def _box(letter: str) -> str:
    return f"\\boxed{{{letter}}}"
