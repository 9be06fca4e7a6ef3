"""Counting: as many sentences as the answer says, all over the text, and exact scoring."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rope_patch.tasks import counting, samples, scoring

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
WORDS = dict(zip(scoring.NUMBERS, range(20), strict=True))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def rows(tokenizer, length=1500, **kwargs):
    return counting.build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def asked(row):
    return re.search(r"How many (\w+ \w+)s were left", row["input"]).group(1)


def left(row):
    """How many things of each kind were left, read from the sentences."""
    return Counter(re.findall(r"A (\w+ \w+) was left [^.]*\.", row["input"]))


@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_the_number_of_sentences_of_the_kind_in_question(tokenizer, per_text):
    for row in rows(tokenizer, samples=9, per_text=per_text):
        found = left(row)
        assert row["answers"] == [str(found[asked(row)])]
        assert WORDS[row["target"]] == found[asked(row)]
        assert row["depth"] is None
        assert len(found) == per_text + 1  # and a kind that nobody asks for


def test_sentences_of_a_kind_differ_and_spread_over_the_text(tokenizer):
    for row in rows(tokenizer, length=6000, samples=6):
        found = list(re.finditer(rf"A {asked(row)} was left ([^.]*)\.", row["input"]))
        assert len({match.group(1) for match in found}) == len(found)
        part = len(row["input"]) / len(found)
        for i, match in enumerate(found):  # one in each part, give or take a sentence
            assert match.start() == pytest.approx((i + 0.5) * part, abs=0.5 * part + 900)


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_numbers_from_2_to_12_are_as_likely_at_every_length(length):
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


def test_the_control_asks_the_same_of_a_text_without_the_things(tokenizer):
    planted, control = (rows(tokenizer, samples=6, planted=planted) for planted in (True, False))
    for with_them, without in zip(planted, control, strict=True):
        assert asked(without) == asked(with_them)
        assert without["target"] == with_them["target"]
        assert left(without) == left(with_them) - Counter({asked(with_them): 100})


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
def test_the_first_number_must_be_the_answer_exactly(answer, written, score):
    assert scoring.first_number({"answers": [answer]}, [written]) == {"score": score}
