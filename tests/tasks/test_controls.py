"""Test that no control's text holds an answer, not even by chance."""

import re
from dataclasses import replace

import pytest

from rope_patch import tasks
from rope_patch.inference.samples import Sample, permuted_answers
from rope_patch.tasks.questions import one_hop

# Texts long enough that answers would stand in them by chance, where one must look after that.
LENGTHS = {"rp_count": 4000, "rp_qa_1": 6000, "rp_qa_2": 6000, "rp_icl": 3000}
# How the question begins, which may have a number in it.
QUESTIONS = ("\nSentence: ", "\nWhat does the program print", "\nHow many ")
WITHOUT_CONTROL = ("rp_cwe", "rp_fwe", "rp_vt")


def controls(name, tokenizer, length, per_text):
    build = tasks.config(name)["custom_dataset"]
    more = {"length": length, "samples": 2 * per_text, "per_text": per_text, "seed": 7}
    return build(tokenizer=tokenizer, planted=False, **more)["test"].to_list()


def holding(rows):
    """Return the samples whose text has an answer as a word or a number of its own."""
    found = []
    for row in rows:
        text = row["input"]
        for question in QUESTIONS:
            text = text.rsplit(question, 1)[0]
        for answer in {*row["answers"], row["target"]}:
            if re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text):
                found.append((row["id"], answer))
    return found


@pytest.mark.parametrize(
    "name", sorted({tasks.question_of(name) for name in tasks.names()} - {*WITHOUT_CONTROL})
)
def test_no_control_holds_an_answer(name, tokenizer):
    rows = controls(name, tokenizer, LENGTHS.get(name, 2000), per_text=2)
    assert len(rows) == 4
    assert holding(rows) == []


@pytest.mark.parametrize(("name", "per_text"), [("rp_icl", 16), ("rp_latent_list", 9)])
def test_controls_of_many_questions_hold_no_answer(name, per_text, tokenizer):
    """Of 16 classes, all are asked for: labels are numbers that none of them has."""
    assert holding(controls(name, tokenizer, 3000, per_text)) == []


def test_a_file_whose_other_documents_all_hold_the_answer_has_no_control(tokenizer, tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        f'{{"question": "Which {i}?", "answers": ["red"], "context": "Number {i} is Red."}}'
        for i in range(4)
    ]
    path.write_text("\n".join(lines))
    arguments = {"tokenizer": tokenizer, "length": 512, "samples": 1, "questions": str(path)}
    assert len(one_hop(**arguments)["test"]) == 1
    with pytest.raises(ValueError, match="hold the answers to the questions by chance"):
        one_hop(planted=False, **arguments)


def test_permuted_answers_are_not_those_of_the_same_text():
    """Three texts of one answer each; the second text has the third's answer by chance."""
    first = Sample(ids=(1, 2, 3, 11), answers=((3, 4),), group="a")
    second = replace(first, ids=(1, 13, 3, 12), group="b")
    third = replace(first, ids=(1, 2, 3, 13), group="c")
    for seed in range(8):
        for sample in permuted_answers([first, second, third], seed):
            assert sample.ids[3] not in sample.ids[:3]
    # Where all other answers stand in the text, as labels of examples do, one of them is taken.
    labels = [replace(first, ids=(11, 12, 3, answer)) for answer in (11, 12)]
    assert [sample.ids[3] for sample in permuted_answers(labels)] == [12, 11]
