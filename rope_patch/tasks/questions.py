"""Questions over documents in RULER's wording: made-up articles, or a file of the user's own.

The person's full name stands in the question and in the article, so questions over made-up articles
are key lookups; RULER's are SQuAD's and HotpotQA's.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from rope_patch.tasks import samples
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

_MOST_LEFT_OUT = 20_000  # documents in a row that a control may have to skip
_FIELDS = '{"question": "...", "answers": ["..."], "context": "..."}'


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
    rng = text.rng
    if questions:
        chosen, others = _choose_questions(questions, len(text.depths), rng)
    else:
        encyclopaedia = Encyclopaedia(rng)
        ask = encyclopaedia.one_hop if hops == 1 else encyclopaedia.two_hops
        chosen, others = [ask() for _ in text.depths], encyclopaedia.distractors()
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

    def prompt(units: int, question: str) -> str:
        documents = filler.take(units)
        count = len(documents)
        # From the last place on, so that the places before stay what they are.
        for document, depth in sorted(places.items(), key=lambda item: -item[1]):
            documents.insert(round(count * depth / 100), document)
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
