"""Test the counting task: the number of sentences, their spread, and scores."""

import random
import re
from collections import Counter

import pytest

from rope_patch.tasks import counting, samples, scoring

WORDS = dict(zip(scoring.NUMBERS, range(20), strict=True))


def rows(tokenizer, length=1500, **kwargs):
    return counting.build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def kind_in_question(row):
    return re.search(r"How many (\w+ \w+)s were left", row["input"]).group(1)


def count_kinds(row):
    """Return the number of sentences about each kind of thing."""
    return Counter(re.findall(r"A (\w+ \w+) was left [^.]*\.", row["input"]))


@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_the_number_of_sentences_of_the_kind_in_question(tokenizer, per_text):
    for row in rows(tokenizer, samples=9, per_text=per_text):
        counts = count_kinds(row)
        assert row["answers"] == [str(counts[kind_in_question(row)])]
        assert WORDS[row["target"]] == counts[kind_in_question(row)]
        assert row["depth"] is None
        assert len(counts) == per_text + 1  # and a kind that no question is about


def test_sentences_of_a_kind_differ_and_spread_over_the_text(tokenizer):
    for row in rows(tokenizer, length=6000, samples=6):
        matches = list(re.finditer(rf"A {kind_in_question(row)} was left ([^.]*)\.", row["input"]))
        assert len({match.group(1) for match in matches}) == len(matches)
        part = len(row["input"]) / len(matches)
        for i, match in enumerate(matches):  # one in each part, give or take a sentence
            assert match.start() == pytest.approx((i + 0.5) * part, abs=0.5 * part + 900)


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_numbers_from_2_to_12_are_equally_likely_at_every_length(length):
    counts = []
    for i in range(150):
        text = samples.TextContext(
            rng=random.Random(f"{length}/{i}"),
            length=length,
            depths=[0, 50],
            planted=True,
            texts=("emma",),
            options={},
        )
        counts += [int(draft.answers[0]) for draft in counting.generate(text)]
    assert set(counts) == set(range(2, 13))
    # The mean of 300 draws has a standard error of 0.18.
    assert sum(counts) / len(counts) == pytest.approx(7, abs=0.7)


def test_the_control_asks_the_same_question_about_a_text_without_the_kind(tokenizer):
    planted, control = (rows(tokenizer, samples=6, planted=planted) for planted in (True, False))
    for with_them, without in zip(planted, control, strict=True):
        assert kind_in_question(without) == kind_in_question(with_them)
        assert without["target"] == with_them["target"]
        assert count_kinds(without) == count_kinds(with_them) - Counter(
            {kind_in_question(with_them): 100}
        )


def test_more_questions_than_kinds_are_refused(tokenizer):
    with pytest.raises(ValueError, match="at most 99 questions about a text, got per_text 100"):
        rows(tokenizer, per_text=100)


@pytest.mark.parametrize(
    ("answer", "written", "score"),
    [
        ("1", " 12.", 0),
        ("12", " 12.", 1),
        ("2", " 12 lanterns", 0),
        ("7", " seven.", 1),
        ("7", " Seven of them; then eight", 1),
        ("8", " seven of them; then eight", 0),
        ("7", " seventeen", 0),
        ("7", " seventy-seven", 0),
        ("7", " seventy seven", 0),
        ("7", " 7,5", 0),
        ("7", " 7, I think", 1),
        ("1", " 1,000", 0),
        ("10", "there were 10", 1),
        ("1", " someone left none", 0),
        ("3", "", 0),
    ],
)
def test_the_first_number_must_equal_the_answer(answer, written, score):
    assert scoring.first_number({"answers": [answer]}, [written]) == {"score": score}
