"""Test key-value recall by reading the prompt's object with json."""

import json
from uuid import UUID

import pytest

from rope_patch.tasks import key_values


def rows(tokenizer, length=4096, **kwargs):
    return key_values.build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def read_pairs(row):
    """Return the object's pairs in order, and the key in question."""
    text, _, key = row["input"].rpartition("\nKey: ")
    pairs = json.loads(text[text.index("{") :], object_pairs_hook=list)
    assert len(dict(pairs)) == len(pairs)
    return pairs, key


def distance(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_answer_is_the_value_of_the_key_in_question(tokenizer, per_text):
    for row in rows(tokenizer, samples=10, per_text=per_text):
        pairs, key = read_pairs(row)
        assert row["answers"] == [row["target"]] == [dict(pairs)[key]]
        assert row["input"].count(row["target"]) == 1
        assert row["input"].count(key) == 2  # in the object and in the question
        assert all(str(UUID(part)) == part for pair in pairs for part in pair)


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_pair_is_at_its_depth_among_the_other_pairs(tokenizer, per_text):
    built = rows(tokenizer, 8000, depths=(100, 25, 0, 75, 50), samples=5, per_text=per_text)
    question_keys = {read_pairs(row)[1] for row in built}
    for row in built:
        pairs, key = read_pairs(row)
        order = [other for other, _ in pairs if other == key or other not in question_keys]
        assert order.index(key) == round(row["depth"] * (len(order) - 1) / 100)


def test_questions_at_one_depth_have_different_pairs(tokenizer):
    pairs_and_keys = [
        read_pairs(row) for row in rows(tokenizer, depths=(50,), samples=4, per_text=4)
    ]
    assert all(pairs == pairs_and_keys[0][0] for pairs, _ in pairs_and_keys)
    assert len({key for _, key in pairs_and_keys}) == 4


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_confusable_keys_differ_in_two_digits_from_the_key_in_question(tokenizer, share):
    others = near = 0
    for row in rows(tokenizer, 8192, samples=6, confusable=share):
        pairs, key = read_pairs(row)
        distances = [distance(key, other) for other, _ in pairs if other != key]
        others += len(distances)
        near += distances.count(2)
        # Random keys share about 2 of 32 digits.
        assert all(digits == 2 or digits > 15 for digits in distances)
    assert others > 300
    assert near / others == pytest.approx(share, abs=0.08)


def test_a_quarter_of_the_keys_is_confusable_by_default(tokenizer):
    assert rows(tokenizer) == rows(tokenizer, confusable=0.25) != rows(tokenizer, confusable=0)


def test_the_control_lacks_the_key_and_keeps_confusable_ones(tokenizer):
    control = rows(tokenizer, planted=False, confusable=0.5)
    for with_it, without in zip(rows(tokenizer, confusable=0.5), control, strict=True):
        pairs, key = read_pairs(without)
        assert key == read_pairs(with_it)[1]
        assert without["target"] == with_it["target"]
        assert key not in dict(pairs)
        assert without["target"] not in without["input"]
        assert any(distance(key, other) == 2 for other, _ in pairs)


@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_an_impossible_share_of_confusable_keys_is_refused(tokenizer, wrong):
    with pytest.raises(ValueError, match=f"from 0 to 1, got {wrong}"):
        rows(tokenizer, confusable=wrong)
