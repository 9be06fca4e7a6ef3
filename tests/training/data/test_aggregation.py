"""Test questions woven into documents: every answer is computed again from the text above it."""

import json
import re

import pytest
import torch
from packed_rows import CountingTokenizer, make_rows, segments
from training_runs import novel as write_novel

from rope_patch.tasks import read_text
from rope_patch.training import TaskWeaver, TokenizedDocument

LENGTH = 1024
SETTINGS = {"row_length": LENGTH, "trained_length": 512, "seed": 0}
WOVEN = re.compile(r"\n\nQuestion: (.*?)\nAnswer: (.*?)\n\n", re.DOTALL)


TASKS = {"common_words": "What", "extraction": "Which", "records": "How"}  # first words


@pytest.fixture(scope="module")
def novel(tmp_path_factory):
    """Write pieces of a novel, shorter and longer than a row; return their file."""
    return str(write_novel(tmp_path_factory.mktemp("novel")))


def split_words(text):
    """Return the words in lower case, letter by letter."""
    words, word = [], ""
    for letter in f"{text} ":
        if letter.isalpha():
            word += letter
        elif word:
            words.append(word.lower())
            word = ""
    return words


def split_sentences(text):
    """Return the sentences, letter by letter."""
    sentences, sentence = [], ""
    for n, letter in enumerate(text):
        rest = text[n + 1 :]
        if sentence or not letter.isspace():
            sentence += letter
        ending = sentence.rstrip("\"'”’)")
        closed = ending[-1:] in (".", "!", "?") and not re.search(r"\b(Mrs?|Ms|Dr|St)\.$", ending)
        if sentence and ((closed and rest[:1].isspace()) or not rest or re.match(r"\n\s*\n", rest)):
            sentences.append(" ".join(sentence.split()))
            sentence = ""
    return [s for s in sentences if s]


def expected_answer(question, text):
    words = split_words(text)
    if match := re.fullmatch(
        r"What are the (\d+) most common words of at least 5 letters .*", question
    ):
        counts = {}
        for word in words:
            if len(word) >= 5:
                counts[word] = counts.get(word, 0) + 1
        ranks = sorted(sorted(counts), key=counts.get, reverse=True)
        number = int(match[1])
        assert counts[ranks[number - 1]] > counts[ranks[number]]
        return ", ".join(f"{word} ({counts[word]})" for word in ranks[:number])
    if match := re.fullmatch(
        r'Which sentences .* the word "(\w+)"\? Write them out in order\.', question
    ):
        found = [s for s in split_sentences(text) if match[1] in split_words(s)]
        assert 2 <= len(found) <= 6
        return "\n".join(f"{n + 1}. {sentence}" for n, sentence in enumerate(found))
    names = re.fullmatch(r"How often does each of these words .* time: (.*)\?", question)[1]
    lines = []
    for name in names.split(", "):
        followers = [words[n + 1] for n in range(len(words) - 1) if words[n] == name]
        lines.append(
            f"{name}: {words.count(name)} times, first {followers[0]}, last {followers[-1]}"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("packing", ["single", "masked", "best_fit"])
def test_answers_follow_from_the_text_above_them(tokenizer, novel, packing):
    rows = make_rows(
        tokenizer, 30, [novel], SETTINGS, packing=packing, packing_window=8, aggregation_share=1.0
    )
    kinds = set()
    for row in rows:
        assert len(row["input_ids"]) == LENGTH
        for ids in segments(row, LENGTH):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            for match in WOVEN.finditer(text):
                question, answer = match.groups()
                assert answer == expected_answer(question, text[: match.start()])
                kinds.add(question.split()[0])
    assert kinds == {*TASKS.values()}
    state = rows[-1]["row"]["state"]["long"][0]
    assert state["questions"] > 15


def test_the_document_goes_on_around_a_question(tokenizer):
    ids = torch.tensor([*tokenizer(read_text("emma")[5000:20_000]).input_ids, 1])
    labels = ids.masked_fill(ids == ids[7], -100)
    document = TokenizedDocument("emma", ids, labels)
    weaver = TaskWeaver(tokenizer, list(TASKS), 1.0, "0")
    offset = 0
    while offset < len(ids):
        woven = weaver.weave(document, offset, LENGTH, "a")
        rest, rest_labels = ids[offset:], labels[offset:]
        task = len(woven.ids) - woven.used
        assert 0 < task <= len(woven.ids) // 4
        assert len(woven.ids) == LENGTH or offset + woven.used == len(ids)
        head = next(n for n in range(woven.used + 1) if n == woven.used or woven.ids[n] != rest[n])
        while not woven.ids[head + task :].equal(rest[head : woven.used]):
            head -= 1  # the question may begin with the token that the document goes on with
        assert woven.ids[:head].equal(rest[:head])
        assert woven.labels[:head].equal(rest_labels[:head])
        assert woven.labels[head : head + task].equal(woven.ids[head : head + task])
        assert woven.labels[head + task :].equal(rest_labels[head : woven.used])
        offset += woven.used
    assert woven.ids[-1] == 1  # the end token stays last
    assert len(woven.ids) - task - head <= max(1, len(woven.ids) // 4)


def test_tasks_and_documents_are_chosen_by_the_seed(tokenizer, novel):
    def make(seed=0, share=1.0, tasks=tuple(TASKS)):
        rows = make_rows(
            tokenizer, 20, [novel], SETTINGS | {"seed": seed}, packing="masked",
            aggregation_share=share, aggregation_tasks=list(tasks),
        )  # fmt: skip
        return [q for row in rows for q in WOVEN.findall(tokenizer.decode(row["input_ids"]))]

    assert make() == make()
    assert make() != make(seed=1)
    assert 0 < len(make(share=0.4)) < 0.8 * len(make())
    assert make(share=0.0) == []
    for task, beginning in TASKS.items():
        questions = make(tasks=[task])
        assert questions
        assert {question.split()[0] for question, _ in questions} == {beginning}


def test_tokenised_documents_get_questions_and_short_ones_none(tokenizer, tmp_path):
    text = read_text("emma")[5000:9000]
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": tokenizer(text).input_ids}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "Emma came."}))
    for name, some in (("a", True), ("b", False)):
        rows = make_rows(
            tokenizer, 6, [str(tmp_path / f"{name}.jsonl")], SETTINGS, packing="masked",
            aggregation_share=1.0,
        )  # fmt: skip
        assert (rows[-1]["row"]["state"]["long"][0]["questions"] > 0) == some


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregation_share": 1.5}, "aggregation_share .* 1.5"),
        ({"aggregation_share": -0.5}, "aggregation_share .* -0.5"),
        ({"aggregation_share": 0.5, "aggregation_tasks": []}, "aggregation_tasks: .*records"),
        ({"aggregation_share": 0.5, "packing": "concatenate"}, "best_fit, got concatenate"),
        ({"aggregation_tasks": ["record"]}, "'record' .*mean 'records'"),
        ({"aggregation_tasks": ["records", "records"]}, "'records' twice"),
    ],
)
def test_bad_arguments_are_refused(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_rows(tokenizer, 1, ["novels:emma"], SETTINGS, **arguments)


def test_a_tokenizer_that_cannot_decode_is_refused(tokenizer):
    with pytest.raises(ValueError, match="this tokenizer cannot decode: leave it out"):
        make_rows(CountingTokenizer(tokenizer), 1, ["novels:emma"], SETTINGS, aggregation_share=0.5)
