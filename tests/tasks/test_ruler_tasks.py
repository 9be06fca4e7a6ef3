"""Test RULER's tasks other than needles: wording as RULER's, counts, chains and documents."""

import json
import random
import re
from collections import Counter
from importlib import import_module

import numpy as np
import pytest
from helpers import built_tasks
from helpers.built_tasks import build_rows
from helpers.tokenizers import load


def rows(name, length=2048, tokenizer="tiny", **kwargs):
    return built_tasks.rows(name, tokenizer, length=length, **kwargs)


# --- Variable tracking ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2048, 4096])
def test_following_the_chain_from_the_value_gives_the_answers(length):
    for row in rows("rp_vt", length, samples=5):
        example, question = row["input"].split("\n\nMemorize")
        value = re.search(r"assigned the value (\d+) in the text", question)[1]
        follows = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question))
        chain, source = [], value
        while source in follows.values():
            (source,) = (name for name, origin in follows.items() if origin == source)
            chain.append(source)
        assert chain == row["answers"] == row["target"].split()
        assert len(set(chain)) == len(follows) == 5
        assert f"5 variables are assigned the value {value}" in row["gen_prefix"]
        assert not any(name in example for name in chain)
        assert row["depth"] is None


def test_the_chain_is_asked_for_as_by_ruler_except_names_places_and_spelling():
    from lm_eval.tasks.ruler import vt_utils

    (row,) = rows("rp_vt", samples=1)
    random.seed(0)
    example, names = vt_utils.generate_input_output(10, 1, 4, is_icl=True)
    noises = row["input"].split("\n\nMemorize")[1].count("There and back again")
    question, _ = vt_utils.generate_input_output(noises, 1, 4)
    cut = row["input"].index("Question:", row["input"].rindex("Memorize"))
    tail = re.search(r"(?<=There and back again\.\n)((?! VAR)(?!VAR)[^\n]*)\n$", row["input"][:cut])
    ours = f"{row['input']} {row['gen_prefix']}"
    assert "assgined" not in ours  # RULER has fixed this since
    assert normalised(f"{example} {' '.join(names)}\n\n{question}") == normalised(
        ours, but=tail and tail[1]
    )


def normalised(prompt, but=None):
    """Return the prompt without random parts: names, values and places of assignments."""
    prompt = prompt.replace("assgined", "assigned")
    if but and but.strip():
        prompt = "".join(prompt.rsplit(but, 1))
    assignments = re.findall(r"VAR (\w+) = (VAR )?", prompt)
    shape = [(len(name), bool(source)) for name, source in assignments]
    text = re.sub(r"VAR \w+ = (VAR )?\w+", "", prompt)
    text = re.sub(r"\d{5}", "VALUE", re.sub(r"\b[A-Z]{3,5}\b", "NAME", text))
    return shape, text.split()


@pytest.mark.parametrize("length", [1300, 2048])
def test_each_assignment_has_a_line_of_its_own(length):
    for row in rows("rp_vt", length, samples=3):
        assigning = [line for line in row["input"].split("\n") if "VAR" in line]
        assert len(assigning) == 10  # the example's and the question's
        assert all(re.fullmatch(r"VAR \w+ = (VAR )?\w+", line) for line in assigning)


# --- Common and frequent words --------------------------------------------------------------------


def entries(numbered):
    """Return the entries of "1. one 2. two"; an entry may be two words."""
    return re.split(r" ?\b\d+\. ", numbered)[1:]


def split_by_frequency(words, count):
    ordered = Counter(words).most_common()
    return ordered[:count], ordered[count:]


@pytest.mark.parametrize(("name", "answers"), [("rp_cwe", 10), ("rp_fwe", 3)])
@pytest.mark.parametrize("length", [300, 512, 900, 1200, 1400])
def test_a_short_length_gives_complete_samples_or_an_error(name, answers, length):
    built, error = rows_or_error(name, length)
    assert built or f"a length of {length} tokens is too short for {name}" in error
    assert all(len(row["answers"]) == answers for row in built)


def rows_or_error(name, length):
    try:
        return build_rows(name, length=length), ""
    except ValueError as error:
        return [], str(error)


@pytest.mark.parametrize(
    ("length", "example_counts", "others", "counts"),
    [(2048, (3, 1), 10, (6, 1)), (6144, (10, 3), 30, (30, 3))],
)
def test_common_words_are_counted_as_in_ruler_and_so_are_its_examples(
    length, example_counts, others, counts
):
    for row in rows("rp_cwe", length, samples=4):
        _, example, question = row["input"].split("Below is a numbered list")
        words = entries(question.split("\n")[1])
        first, rest = split_by_frequency(words, 10)
        assert {count for _, count in first} == {counts[0]}
        assert {word for word, _ in first} == set(row["answers"])
        assert len(rest) >= 10
        # The last word may be cut off to meet the length.
        assert rest[0][1] == counts[1]
        assert sum(count != counts[1] for _, count in rest) <= 1
        # Answers are in the order in which they first appear: a likelihood can know it.
        assert entries(row["target"]) == row["answers"] == sorted(row["answers"], key=words.index)

        first, rest = split_by_frequency(entries(example.split("\n")[1]), 10)
        assert {count for _, count in first} == {example_counts[0]}
        assert [count for _, count in rest] == [example_counts[1]] * others
        shown = entries(example.strip().split("often in the list are: ")[1])
        assert set(shown) == {word for word, _ in first}
        assert not set(shown) & set(words)


@pytest.mark.parametrize(("length", "words"), [(2048, 60), (6144, 40)])
def test_common_words_have_the_prompt_of_ruler(length, words):
    cwe = import_module("lm_eval.tasks.ruler.cwe_utils")
    (row,) = rows("rp_cwe", length, samples=1)
    example, question, _ = cwe.generate_input_output(words, length)
    ours = re.sub(r"\d+\. .*?(?=\n|$)", "LIST", f"{row['input']} {row['gen_prefix']}")
    assert re.sub(r"\d+\. .*?(?=\n|$)", "LIST", f"{example}\n{question}") == ours.replace(
        "are: LIST", "are:LIST"
    )


def test_common_words_are_those_of_ruler_and_never_run_out():
    known = set(import_module("lm_eval.tasks.ruler.cwe_utils").WORDS)
    (row,) = rows("rp_cwe", 120_000, "words", samples=1)
    words = {*entries(row["input"].rsplit("often.\n", 1)[1].split("\n")[0])}
    assert known - words == known & {*entries(row["input"].split("\n")[1])}  # but the example's
    added = words - known
    assert len(added) > 100
    assert all({*word.split("-")} & known or word.count("-") > 1 for word in added)


@pytest.mark.parametrize("length", [1500, 4096, 9000])
def test_frequent_words_follow_the_zeta_distribution_of_ruler(length):
    for row in rows("rp_fwe", length, "words" if length > 5000 else "tiny"):
        text = row["input"].split("coded words. ")[1].split("\nQuestion")[0].split(" ")
        (noise, _), *ranked = Counter(text).most_common()
        assert noise == "..."
        assert [word for word, _ in ranked[:3]] == row["answers"] == row["target"].split()
        assert ranked[2][1] >= ranked[3][1] + 2
        # RULER has rank k int(n / (zeta(2) k^2)) times, of as many ranks as the text has words for.
        counts = np.array(sorted(Counter(text).values(), reverse=True))
        ranks = np.arange(1, len(counts) + 1)
        expected = counts[0] / ranks**2
        assert np.all(np.abs(counts - expected) <= 1)


def test_frequent_words_have_the_prompt_of_ruler():
    fwe = import_module("lm_eval.tasks.ruler.fwe_utils")
    random.seed(0)
    theirs, _, _ = fwe.generate_input_output(2048, load("tiny"), num_words=300, vocab_size=40)
    (row,) = rows("rp_fwe", samples=1)
    ours, theirs = (
        re.sub(r"(?<=coded words\. )[a-z. ]+(?=\n)", "", text)
        for text in (f"{row['input']} {row['gen_prefix']}", theirs)
    )
    assert ours == theirs


# --- Questions about documents --------------------------------------------------------------------

both_questions = pytest.mark.parametrize("name", ["rp_qa_1", "rp_qa_2"])


def documents(row):
    context = row["input"].split("given documents.\n\n")[1].rsplit("\n\nAnswer the", 1)[0]
    return re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:]


def asked(row):
    return row["input"].rsplit("Question: ", 1)[1]


def person(row):
    return re.search(r"[A-Z]\w+ [A-Z]\w+ [A-Z]\w+", asked(row))[0]


def test_exactly_one_document_answers_the_question():
    for row in rows("rp_qa_1", samples=20):
        (document,) = (document for document in documents(row) if person(row) in document)
        assert row["answers"][0] in document
        assert row["target"] == row["answers"][0]


def test_two_documents_lead_to_the_one_answer():
    for row in rows("rp_qa_2", samples=20):
        (life,) = (document for document in documents(row) if person(row) in document)
        town = re.search(r"\bborn in (?:the town of )?(\w+)", life)[1]
        (place,) = (d for d in documents(row) if town in d and "county of" in d)
        (answer,) = row["answers"]
        assert re.search(rf"county of {answer}\b", place)
        assert answer not in life


@both_questions
def test_the_document_with_the_answer_is_at_its_depth(name):
    for row in rows(name, 8192, depths=(0, 25, 50, 100)):
        texts = documents(row)
        holds = [person(row) in text for text in texts]
        if name == "rp_qa_2":
            town = re.search(r"born in (?:the town of )?(\w+)", texts[holds.index(True)])[1]
            holds = [town in text and "county of" in text for text in texts]
        assert 100 * holds.index(True) / (len(texts) - 1) == pytest.approx(row["depth"], abs=6)


@both_questions
def test_the_control_has_no_document_about_the_person(name):
    assert all(row["input"].count(person(row)) >= 2 for row in rows(name))
    assert all(row["input"].count(person(row)) == 1 for row in rows(name, planted=False))


def test_the_wording_is_that_of_ruler():
    qa = import_module("lm_eval.tasks.ruler.qa_utils")
    (row,) = rows("rp_qa_1", 900, samples=1)
    numbered = [
        qa.DOCUMENT_PROMPT.format(i=i, document=d) for i, d in enumerate(documents(row), start=1)
    ]
    assert qa.TEMPLATE.format(context="\n\n".join(numbered), query=asked(row)) == row["input"]
    assert qa.CONFIG["answer_prefix"] == row["gen_prefix"]


def test_articles_have_40_to_100_words_and_are_all_different():
    (row,) = rows("rp_qa_1", 100_000, "words", samples=1)
    articles = documents(row)[:-1]  # the last one is cut
    sizes = [len(article.split()) for article in articles]
    assert min(sizes) >= 40
    assert max(sizes) <= 100
    assert len(set(articles)) == len(articles) > 1000
    towns = [a.removeprefix("The town of ").split()[0] for a in articles if "county of" in a]
    lives = [article for article in articles if "county of" not in article]
    people = [re.search(r"[A-Z]\w+ [A-Z]\w+ [A-Z]\w+", life)[0] for life in lives]
    assert min(len(towns), len(people)) > 400
    assert len({*towns, *people}) == len(articles)


def squad(contexts=6, impossible=False):
    paragraphs = [
        {
            "context": f"The tower of city{i} is {i + 10} metres high. It is old.",
            "qas": [
                {
                    "question": f"How high is the tower of city{i}?",
                    "answers": [{"text": f"{i + 10} metres"}, {"text": f"{i + 10}"}],
                    "is_impossible": impossible,
                },
                {"question": "Who built it?", "answers": [], "is_impossible": True},
                {
                    "question": "Who owns it?",
                    "answers": [{"text": "Nobody."}],
                    "is_impossible": True,
                },
            ],
        }
        for i in range(contexts)
    ]
    return {"data": [{"paragraphs": paragraphs}]}


def lines(given):
    return "\n".join(json.dumps(entry) for entry in given) + "\n"


@pytest.mark.parametrize("file_format", ["squad", "lines"])
def test_a_file_of_the_users_gives_questions_and_documents(tmp_path, file_format):
    file = tmp_path / "own"
    given = [
        {
            "question": paragraph["qas"][0]["question"],
            "answers": [answer["text"] for answer in paragraph["qas"][0]["answers"]],
            "context": paragraph["context"],
        }
        for paragraph in squad()["data"][0]["paragraphs"]
    ]
    file.write_text(json.dumps(squad()) if file_format == "squad" else lines(given))
    contexts = {entry["context"] for entry in given}
    for row in rows("rp_qa_1", 1024, questions=str(file), per_text=3, samples=6):
        (entry,) = (entry for entry in given if entry["question"] == asked(row))
        assert row["answers"] == entry["answers"]
        assert documents(row).count(entry["context"]) == 1
        assert sum(text not in contexts for text in documents(row)) <= 1  # the truncated one
        assert 1000 <= row["tokens"] <= 1024  # six documents are too few, so they are repeated
    (row,) = rows("rp_qa_1", questions=str(file), samples=1, planted=False)
    (entry,) = (entry for entry in given if entry["question"] in row["input"])
    assert entry["context"] not in row["input"]


def test_a_question_of_a_file_may_take_several_documents(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(
        lines(
            {"question": f"Q{i}?", "answers": [f"A{i}"], "context": [f"first {i}.", f"last {i}."]}
            for i in range(5)
        )
    )
    (row,) = rows("rp_qa_2", 512, questions=str(file), samples=1, depths=(100,))
    number = row["answers"][0][1:]
    assert documents(row).count(f"first {number}.") == 1
    assert documents(row).count(f"last {number}.") == 1
    assert documents(row)[-1] in (f"last {number}.", f"first {number}.")


GOOD = {"question": "Q?", "answers": ["A"], "context": "The A."}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not json", "line 1"),
        pytest.param("[" * 200_000, "line 1 .*nested too deep", id="deep"),
        (lines([GOOD]) + "{broken", "line 2"),
        ("", "no question with an answer"),
        (lines([GOOD, {"answers": ["A"], "context": "C"}]), "line 2: .*'question'"),
        (lines([GOOD | {"answers": "A"}]), "line 1: .*'answers' as list, got str"),
        (lines([GOOD | {"answers": []}]), "line 1: .*answers"),
        (lines([GOOD | {"answers": [""]}]), "line 1: .*answers"),
        (lines([GOOD | {"answers": [1]}]), "line 1: .*answers"),
        (lines([GOOD | {"context": None}]), "line 1: .*'context'"),
        (lines([GOOD | {"question": " "}]), "line 1: .*question"),
        (json.dumps(squad(impossible=True)), "no question with an answer"),
        ('{"data": 1}', "'data' as list, got int"),
        ('{"data": [{}]}', r"data\[0\]: .*'paragraphs'"),
        ('{"data": [{"paragraphs": [{"context": "c"}]}]}', r"paragraphs\[0\]: .*'qas'"),
        (lines([GOOD]), "other contexts"),
    ],
)
def test_a_malformed_file_is_refused_with_the_location(tmp_path, content, named):
    file = tmp_path / "bad"
    file.write_text(content)
    with pytest.raises(ValueError, match=named):
        rows("rp_qa_1", questions=str(file))


def test_files_without_what_is_asked_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read questions from"):
        rows("rp_qa_1", questions=str(tmp_path / "none"))
    file = tmp_path / "own"
    file.write_text(json.dumps(squad(contexts=2)))
    with pytest.raises(ValueError, match="per_text=3"):
        rows("rp_qa_1", questions=str(file), per_text=3)
    # Documents that all hold the answer leave none for a control.
    red = [
        GOOD | {"question": f"{i}?", "answers": ["red"], "context": f"{i} is Red."} for i in "ab"
    ]
    file.write_text(lines(red))
    assert rows("rp_qa_1", 512, samples=1, questions=str(file), seed=1)
    with pytest.raises(ValueError, match="hold the answers to the questions by chance"):
        rows("rp_qa_1", 512, samples=1, questions=str(file), seed=1, planted=False)
