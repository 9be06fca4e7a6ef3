"""Questions over documents in RULER's wording: made-up articles, or a file of the user's own.

RULER's are SQuAD's and HotpotQA's. Over made-up articles, its two tasks ask by the person's full
name, so they are key lookups. The four steps of RULERv2's ladder ask by three things that the
article tells, each of which other articles tell, too.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from rope_patch.tasks import needles, samples
from rope_patch.tasks.synthetic_documents import DocumentQuestion, Encyclopaedia
from rope_patch.utils.errors import parse_json

ROOM = 32  # tokens that generation may take; they count towards the length

# RULER's wording (NVIDIA/RULER, Apache-2.0).
_RULE = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
PROMPT = (
    f"{_RULE}\n\nThe following are given documents.\n\n{{context}}\n\n{_RULE}\n\n"
    "Question: {question}"
)
DOCUMENT = "Document {i}:\n{document}"
PREFIX = "Answer:"

_LONGEST = 250  # words of the documents of a question in RULERv2's ladder: a copy must have room
_MOST_LEFT_OUT = 20_000  # documents in a row that a control may have to skip
_FIELDS = '{"question": "...", "answers": ["..."], "context": "..."}'


# RULERv2's wording (NVIDIA-NeMo/Skills, branch chsieh/ruler2, Apache-2.0). The starts of answers
# are those for base models; that of `medium` is ours: behind theirs, "Answer:", nobody would copy.
_SOME = "Below are some documents. I will "
_NUMBER_ONLY = "Only give me the index without any document contents."
_ANSWER = f"{_SOME}ask you to answer a question based on the documents. Please answer the question."
_FIND_TEXT = samples.LadderStep(
    "rp_v2_qa_basic",
    ROOM,
    f"{_SOME}give you a text at the end. Please find the document index of the text. "
    f"{_NUMBER_ONLY}",
    "Text: {document}",
    "Most relevant document index:",
)
_FIND_ANSWER = samples.LadderStep(
    "rp_v2_qa_easy",
    ROOM,
    f"{_SOME}give you a question at the end. Please find the index of the most relevant document "
    f"that can help answer the question. {_NUMBER_ONLY}",
    "Question: {question}",
    "Index of the most relevant document that can help answer the question:",
)
_COPY_AND_ANSWER = samples.LadderStep(
    "rp_v2_qa_medium",
    512,
    _ANSWER,
    "Please first find and copy paste the documents relevant to the following question and then "
    "answer it based on the documents you find.\n\nQuestion: {question}",
    "Relevant documents:",
)
_ANSWER_ONLY = samples.LadderStep(
    "rp_v2_qa_hard",
    ROOM,
    _ANSWER,
    "Please answer the following question based on the documents.\n\nQuestion: {question}",
    PREFIX,
)
_LADDER = (_FIND_TEXT, _FIND_ANSWER, _COPY_AND_ANSWER, _ANSWER_ONLY)


def one_hop(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of rp_qa_1: one document answers (after RULER, arXiv:2404.06654).

    Samples of one text have the same documents and ask other questions.

    Args:
        questions: A file in SQuAD's format (1.1 or 2.0), or lines of JSON with question, answers
            and context (a text, or a list of texts whose last one holds the answer). Other
            contexts are the distractors, repeated if they are too few. None takes made-up articles.
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `samples.build`, or a file that is not of that kind or has too few contexts.
    """
    draw = partial(_generate, hops=1, questions=read_questions(questions) if questions else None)
    return samples.build(draw, "rp_qa_1", ROOM, **metadata)


def two_hops(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of rp_qa_2: the answer takes two documents (after RULER, 2404.06654).

    Depth is the position of the second document, which holds the answer. The first document has a
    random position.

    Args:
        questions: As of `one_hop`.
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `one_hop`.
    """
    draw = partial(_generate, hops=2, questions=read_questions(questions) if questions else None)
    return samples.build(draw, "rp_qa_2", ROOM, **metadata)


def find_text(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of RULERv2's qa_basic: the number of the document that is quoted.

    Args:
        questions: As of `one_hop`; those whose documents have more than 250 words are left out.
        **metadata: As of `samples.build`.

    Raises:
        ValueError: As `one_hop`.
    """
    return _build_step(_FIND_TEXT, questions, metadata)


def find_answer(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of qa_easy: the number of the document that answers; as `find_text`."""
    return _build_step(_FIND_ANSWER, questions, metadata)


def copy_and_answer(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of qa_medium: copy the document, then answer; as `find_text`."""
    return _build_step(_COPY_AND_ANSWER, questions, metadata)


def answer(questions: str | None = None, **metadata: Any) -> dict[str, Any]:
    """Return samples of qa_hard: answer the question; as `find_text`."""
    return _build_step(_ANSWER_ONLY, questions, metadata)


def _build_step(
    step: samples.LadderStep, questions: str | None, metadata: dict[str, Any]
) -> dict[str, Any]:
    bank = read_questions(questions) if questions else None
    if bank is not None:
        bank = [each for each in bank if len(" ".join(each.documents).split()) <= _LONGEST]
        if not bank:
            raise ValueError(
                f"{questions} has no question whose documents have at most {_LONGEST} words, which "
                f"{step.name} asks to copy: give shorter documents"
            )
    draw = partial(_generate_steps, questions=bank)
    return samples.build_step(draw, step, _LADDER, **metadata)


def read_questions(path: str) -> list[DocumentQuestion]:
    """Return the questions of a file that have an answer.

    Raises:
        ValueError: No such file, neither SQuAD's format nor lines of JSON, a field missing or of
            the wrong type, or no question with an answer.
    """
    try:
        raw = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read questions from {path}: {error}") from None
    try:
        whole = parse_json(raw)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "data" in whole:
        questions = list(_read_squad(whole, path))
    else:
        questions = list(_read_json_lines(raw, path))
    if not questions:
        raise ValueError(f"{path} has no question with an answer: expected one at least")
    return questions


def _read_squad(whole: dict[str, Any], path: str) -> Iterator[DocumentQuestion]:
    for a, article in enumerate(_get_field(whole, "data", list, path)):
        at = f"{path}, data[{a}]"
        for p, paragraph in enumerate(_get_field(article, "paragraphs", list, at)):
            at = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get_field(paragraph, "context", str, at)
            for q, entry in enumerate(_get_field(paragraph, "qas", list, at)):
                at = f"{path}, data[{a}].paragraphs[{p}].qas[{q}]"
                question = _get_field(entry, "question", str, at)
                if entry.get("is_impossible"):
                    continue
                answers = [
                    _get_field(x, "text", str, at) for x in _get_field(entry, "answers", list, at)
                ]
                yield _make_question(question, answers, [context], at)


def _read_json_lines(raw: str, path: str) -> Iterator[DocumentQuestion]:
    for i, line in enumerate(raw.split("\n"), start=1):
        if not line.strip():
            continue
        at = f"{path}, line {i}"
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{at} is not JSON ({error}): expected SQuAD's format, or {_FIELDS} on each line"
            ) from None
        question = _get_field(entry, "question", str, at)
        answers = _get_field(entry, "answers", list, at)
        context = _get_field(entry, "context", (str, list), at)
        yield _make_question(
            question, answers, [context] if isinstance(context, str) else context, at
        )


def _get_field(entry: Any, name: str, kind: type | tuple[type, ...], at: str) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in kinds)
        got = "nothing" if value is None else type(value).__name__
        raise ValueError(
            f"{at}: expected {name!r} as {expected}, got {got}; files are in SQuAD's format, or "
            f"have {_FIELDS} on each line"
        )
    return value


def _make_question(
    question: str, answers: list[Any], documents: list[Any], at: str
) -> DocumentQuestion:
    for name, values in (("answers", answers), ("context", documents)):
        # An empty answer would be found in whatever a model writes.
        if not values or not all(isinstance(v, str) and v.strip() for v in values):
            raise ValueError(f"{at}: expected {name} with text in each, got {values!r:.200}")
    if not question.strip():
        raise ValueError(f"{at}: expected a question, got an empty one")
    return DocumentQuestion(
        question=question, answers=list(dict.fromkeys(answers)), documents=documents
    )


def _generate(
    text: samples.TextContext, hops: int, questions: list[DocumentQuestion] | None
) -> list[samples.SampleDraft]:
    chosen, take = _draw_documents(text, questions, "one_hop" if hops == 1 else "two_hops")

    def prompt(units: int, question: str) -> str:
        documents = take(units)
        numbered = (DOCUMENT.format(i=i, document=d) for i, d in enumerate(documents, start=1))
        return PROMPT.format(context="\n\n".join(numbered), question=question)

    return [
        samples.SampleDraft(
            prompt=partial(prompt, question=question.question),
            prefix=PREFIX,
            answers=question.answers,
            target=question.answers[0],
            depth=depth,
        )
        for question, depth in zip(chosen, text.depths, strict=True)
    ]


def _generate_steps(
    text: samples.TextContext, questions: list[DocumentQuestion] | None
) -> dict[samples.LadderStep, list[samples.SampleDraft]]:
    chosen, take = _draw_documents(text, questions, "by_description")
    # Of its own: how many documents were read before does not change a number.
    numbers = needles.numbers(random.Random(text.rng.random()))
    own = {document: next(numbers) for each in chosen for document in each.documents}
    others: list[str] = []

    def prompt(units: int, rule: str, ask: str) -> str:
        documents = take(units)
        others.extend(next(numbers) for _ in range(len(documents) - len(others)))
        rest = iter(others)
        numbered = (DOCUMENT.format(i=own.get(d) or next(rest), document=d) for d in documents)
        return "\n\n".join([rule, *numbered, ask])

    def draft(
        step: samples.LadderStep, question: DocumentQuestion, depth: int
    ) -> samples.SampleDraft:
        ask = step.ask.format(question=question.question, document=question.documents[-1])
        answers, target = question.answers, question.answers[0]
        if step is _FIND_TEXT:
            answers = [own[question.documents[-1]]]
        elif step is _FIND_ANSWER:
            answers = [own[document] for document in reversed(question.documents)]
        if step is _COPY_AND_ANSWER:
            copied = (DOCUMENT.format(i=own[d], document=d) for d in question.documents)
            target = "\n\n".join([*copied, f"{PREFIX} {target}"])
        else:
            target = answers[0]
        return samples.SampleDraft(
            prompt=partial(prompt, rule=step.rule, ask=ask),
            prefix=step.prefix,
            answers=answers,
            target=target,
            depth=depth,
        )

    return {
        step: [draft(step, *each) for each in zip(chosen, text.depths, strict=True)]
        for step in _LADDER
    }


def _draw_documents(
    text: samples.TextContext, questions: list[DocumentQuestion] | None, ask: str
) -> tuple[list[DocumentQuestion], Callable[[int], list[str]]]:
    """Return a text's questions, and a function of n: its documents, with n words of others."""
    rng = text.rng
    if questions:
        chosen, others = _choose_questions(questions, len(text.depths), rng)
    else:
        encyclopaedia = Encyclopaedia(rng)
        chosen = [getattr(encyclopaedia, ask)() for _ in text.depths]
        others = encyclopaedia.distractors()
    if not text.planted:
        others = _without_answers(others, chosen)
    places: dict[str, float] = {}
    if text.planted:
        for question, depth in zip(chosen, text.depths, strict=True):
            places[question.documents[-1]] = depth
        for question in chosen:
            for document in question.documents[:-1]:
                places.setdefault(document, rng.uniform(0, 100))
    filler = _Filler(others)

    def take(units: int) -> list[str]:
        documents = filler.take(units)
        count = len(documents)
        # From the last place on, so that the places before stay what they are.
        for document, depth in sorted(places.items(), key=lambda item: -item[1]):
            documents.insert(round(count * depth / 100), document)
        return documents

    return chosen, take


def _choose_questions(
    questions: list[DocumentQuestion], count: int, rng: random.Random
) -> tuple[list[DocumentQuestion], Iterator[str]]:
    """Return `count` questions on different documents, and the documents that none needs."""
    by_document: dict[str, list[DocumentQuestion]] = defaultdict(list)
    for question in questions:
        by_document[question.documents[-1]].append(question)
    if count > len(by_document):
        raise ValueError(
            f"the file has questions on {len(by_document)} documents, per_text={count} needs as "
            "many: give a longer file or a smaller per_text"
        )
    chosen = [rng.choice(by_document[d]) for d in rng.sample(list(by_document), count)]
    needed = {document for question in chosen for document in question.documents}
    every = dict.fromkeys(document for question in questions for document in question.documents)
    others = [document for document in every if document not in needed]
    if not others:
        raise ValueError(
            f"all {len(every)} documents of the file are needed for the questions of one text: "
            "give a file with other contexts too, as distractors"
        )
    rng.shuffle(others)
    return chosen, cycle(others)


def _without_answers(documents: Iterator[str], questions: list[DocumentQuestion]) -> Iterator[str]:
    """Yield the documents that hold no answer to a question, without end."""
    answers = {answer.strip() for question in questions for answer in question.answers}
    words = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(answers)))})(?!\w)", re.I)
    left_out = 0
    for document in documents:
        if words.search(document) is None:
            left_out = 0
            yield document
        elif (left_out := left_out + 1) > _MOST_LEFT_OUT:
            raise ValueError(
                "the other documents hold the answers to the questions by chance, so there is no "
                "control: expected other contexts without the words of the answers, got "
                f"{left_out:,} in turn that hold one of {', '.join(sorted(answers))!s:.200}"
            )


class _Filler:
    """The first n words of endless documents; the last document is cut there."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._source = iter(documents)
        self._read: list[str] = []

    def take(self, words: int) -> list[str]:
        documents: list[str] = []
        while words > 0:
            if len(documents) == len(self._read):
                self._read.append(next(self._source))
            document = self._read[len(documents)]
            split = document.split()
            documents.append(document if len(split) <= words else " ".join(split[:words]))
            words -= len(split)
        return documents
