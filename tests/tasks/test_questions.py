"""Test questions about documents: answers, depths, wording, scores and users' files."""

import json
import random
import re
from importlib import import_module
from itertools import islice

import pytest

from rope_patch.tasks import questions, scoring
from rope_patch.tasks.synthetic_documents import Encyclopaedia

BUILDERS = {"rp_qa_1": questions.one_hop, "rp_qa_2": questions.two_hops}
both_tasks = pytest.mark.parametrize("task", BUILDERS)


def rows(tokenizer, task, length=2048, **kwargs):
    return BUILDERS[task](tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def documents(row):
    context = row["input"].split("given documents.\n\n")[1].rsplit("\n\nAnswer the", 1)[0]
    return re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:]


def person(row):
    return re.search(r"[A-Z]\w+ [A-Z]\w+ [A-Z]\w+", row["input"].rsplit("Question: ", 1)[1])[0]


@both_tasks
@pytest.mark.parametrize("length", [777, 1024, 2048, 4096])
def test_prompt_prefix_and_room_fill_the_length_to_a_word(tokenizer, task, length):
    for row in rows(tokenizer, task, length):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + questions.ROOM
        assert used == row["tokens"]
        # One more word may begin another document.
        assert length - 24 <= used <= length


def test_exactly_one_document_answers_the_question(tokenizer):
    for row in rows(tokenizer, "rp_qa_1", samples=20):
        documents_with_name = [document for document in documents(row) if person(row) in document]
        assert len(documents_with_name) == 1
        assert row["answers"][0] in documents_with_name[0]
        assert row["target"] == row["answers"][0]


def test_two_documents_lead_to_the_one_answer(tokenizer):
    for row in rows(tokenizer, "rp_qa_2", samples=20):
        (life,) = (document for document in documents(row) if person(row) in document)
        town = re.search(r"\bborn in (?:the town of )?(\w+)", life)[1]
        (place,) = (d for d in documents(row) if town in d and "county of" in d)
        (answer,) = row["answers"]
        assert re.search(rf"county of {answer}\b", place)
        assert answer not in life


@both_tasks
def test_the_document_with_the_answer_is_at_its_depth(tokenizer, task):
    for row in rows(tokenizer, task, 8192, depths=(0, 25, 50, 100)):
        texts = documents(row)
        holds = [person(row) in text for text in texts]
        if task == "rp_qa_2":
            town = re.search(r"born in (?:the town of )?(\w+)", texts[holds.index(True)])[1]
            holds = [town in text and "county of" in text for text in texts]
        assert 100 * holds.index(True) / (len(texts) - 1) == pytest.approx(row["depth"], abs=6)


@both_tasks
def test_samples_of_one_text_differ_only_in_the_question(tokenizer, task):
    built = rows(tokenizer, task, per_text=3, samples=6)
    heads = [row["input"].rsplit("Question: ", 1)[0] for row in built]
    assert heads == [heads[0]] * 3 + [heads[3]] * 3
    assert heads[0] != heads[3]
    assert len({row["input"] for row in built}) == 6
    assert [row["depth"] for row in built] == [10, 50, 90] * 2


@both_tasks
def test_the_control_asks_the_same_question_without_its_document(tokenizer, task):
    planted, control = rows(tokenizer, task), rows(tokenizer, task, planted=False)
    for with_it, without in zip(planted, control, strict=True):
        assert with_it["answers"] == without["answers"]
        assert with_it["input"].count(person(with_it)) >= 2
        assert without["input"].count(person(with_it)) == 1
        assert without["input"].rsplit("\n", 1)[1] == with_it["input"].rsplit("\n", 1)[1]


@both_tasks
def test_samples_do_not_depend_on_their_number(tokenizer, task):
    random.seed(7)
    state = random.getstate()
    some = rows(tokenizer, task, samples=2)
    assert rows(tokenizer, task, samples=5)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, task, samples=2, seed=1) != some


def test_the_wording_is_that_of_ruler(tokenizer):
    qa = import_module("lm_eval.tasks.ruler.qa_utils")
    (row,) = rows(tokenizer, "rp_qa_1", 900, samples=1)
    texts = documents(row)
    question = row["input"].rsplit("Question: ", 1)[1]
    numbered = [qa.DOCUMENT_PROMPT.format(i=i + 1, document=d) for i, d in enumerate(texts)]
    assert qa.TEMPLATE.format(context="\n\n".join(numbered), query=question) == row["input"]
    assert qa.CONFIG["answer_prefix"] == row["gen_prefix"]
    assert qa.CONFIG["tokens_to_generate"] == questions.ROOM


def test_any_of_the_answers_scores_in_full_where_lm_eval_divides():
    from lm_eval.tasks.ruler.common_utils import string_match_part

    alternatives = ["France", "in France", "the French Republic"]
    for written in ("It is france.", "Spain", "in France"):
        right = any(a.lower() in written.lower() for a in alternatives)
        score = scoring.any_answer({"answers": alternatives}, [written])["score"]
        assert score == float(right)
        alone = [string_match_part([written], [[a]]) for a in alternatives]
        assert score == max(alone)  # RULER's rule
    assert string_match_part(["It is France."], [alternatives]) == pytest.approx(1 / 3)


def test_articles_have_40_to_100_words_and_are_all_different():
    articles = list(islice(Encyclopaedia(random.Random(1)).distractors(), 4000))
    sizes = [len(article.split()) for article in articles]
    assert min(sizes) >= 40
    assert max(sizes) <= 100
    assert len(set(articles)) == 4000
    people = [re.search(r"[A-Z]\w+ [A-Z]\w+ [A-Z]\w+", article)[0] for article in articles[::2]]
    towns = [article.removeprefix("The town of ").split()[0] for article in articles[1::2]]
    assert len(set(people)) == 2000
    assert len(set(towns)) == 2000


def squad(contexts=6, impossible=False):
    return {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"The tower of city{i} is {i + 10} metres high. It is old.",
                        "qas": [
                            {
                                "question": f"How high is the tower of city{i}?",
                                "answers": [{"text": f"{i + 10} metres"}, {"text": f"{i + 10}"}],
                                "is_impossible": impossible,
                            },
                            {"question": "Who built it?", "answers": [], "is_impossible": True},
                        ],
                    }
                    for i in range(contexts)
                ]
            }
        ]
    }


def lines(entries):
    return "\n".join(json.dumps(entry) for entry in entries) + "\n"


@pytest.mark.parametrize("file_format", ["squad", "lines"])
def test_a_file_of_the_users_gives_questions_and_documents(tokenizer, tmp_path, file_format):
    file = tmp_path / "own"
    paragraphs = squad()["data"][0]["paragraphs"]
    entries = [
        {
            "question": p["qas"][0]["question"],
            "answers": [a["text"] for a in p["qas"][0]["answers"]],
            "context": p["context"],
        }
        for p in paragraphs
    ]
    file.write_text(json.dumps(squad()) if file_format == "squad" else lines(entries))
    contexts = {p["context"] for p in paragraphs}
    built = rows(tokenizer, "rp_qa_1", 1024, questions=str(file), per_text=3, samples=3)
    for row in built:
        question = row["input"].rsplit("Question: ", 1)[1]
        (entry,) = (e for e in entries if e["question"] == question)
        assert row["answers"] == entry["answers"]
        assert documents(row).count(entry["context"]) == 1
        assert sum(text not in contexts for text in documents(row)) <= 1  # the truncated one
        assert 1000 <= row["tokens"] <= 1024  # six documents are too few, so they are repeated
    (row,) = rows(tokenizer, "rp_qa_1", questions=str(file), samples=1, planted=False)
    (entry,) = (e for e in entries if e["question"] in row["input"])
    assert entry["context"] not in row["input"]


def test_a_question_of_a_file_may_take_several_documents(tokenizer, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(
        lines(
            {"question": f"Q{i}?", "answers": [f"A{i}"], "context": [f"first {i}.", f"last {i}."]}
            for i in range(5)
        )
    )
    (row,) = rows(tokenizer, "rp_qa_2", 512, questions=str(file), samples=1, depths=(100,))
    number = row["answers"][0][1:]
    assert documents(row).count(f"first {number}.") == 1
    assert documents(row).count(f"last {number}.") == 1
    assert documents(row)[-1] in (f"last {number}.", f"first {number}.")


GOOD = {"question": "Q?", "answers": ["A"], "context": "The A."}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "line 1 is not JSON"),
        pytest.param("[" * 200_000, r"line 1 is not JSON \(its .* nested too deep", id="deep"),
        (lines([GOOD]) + "{broken", "line 2 is not JSON"),
        ("", "no question with an answer"),
        (lines([GOOD, {"answers": ["A"], "context": "C"}]), "line 2: expected 'question' as str"),
        (lines([GOOD | {"answers": "A"}]), "line 1: expected 'answers' as list, got str"),
        (lines([GOOD | {"answers": []}]), "line 1: expected answers with text in each"),
        (lines([GOOD | {"answers": [""]}]), "line 1: expected answers with text in each"),
        (lines([GOOD | {"answers": [1]}]), "line 1: expected answers with text in each"),
        (lines([GOOD | {"context": None}]), "line 1: expected 'context' as str or list"),
        (lines([GOOD | {"question": " "}]), "line 1: expected a question"),
        (json.dumps(squad(impossible=True)), "no question with an answer"),
        ('{"data": 1}', "expected 'data' as list, got int"),
        ('{"data": [{}]}', r"data\[0\]: expected 'paragraphs' as list, got nothing"),
        ('{"data": [{"paragraphs": [{"context": "c"}]}]}', r"paragraphs\[0\]: expected 'qas'"),
        (lines([GOOD]), "give a file with other contexts"),
    ],
)
def test_a_malformed_file_is_refused_with_the_location(tokenizer, tmp_path, content, message):
    file = tmp_path / "bad"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        rows(tokenizer, "rp_qa_1", questions=str(file))


def test_impossible_options_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="cannot read questions from"):
        rows(tokenizer, "rp_qa_1", questions=str(tmp_path / "none"))
    file = tmp_path / "own"
    file.write_text(json.dumps(squad(contexts=2)))
    with pytest.raises(ValueError, match="per_text=3 needs as many"):
        rows(tokenizer, "rp_qa_1", questions=str(file), per_text=3)
    with pytest.raises(ValueError, match="too short for rp_qa_2"):
        rows(tokenizer, "rp_qa_2", 128)
