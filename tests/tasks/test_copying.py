"""Test the copying task by searching its prompts for the quotation."""

from itertools import pairwise

import pytest

from rope_patch.tasks import copying, texts


def rows(tokenizer, length=3000, **kwargs):
    return copying.build(tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def places(words, phrase):
    """Return the indices at which a phrase begins in a list of words."""
    n = len(phrase)
    return [i for i in range(len(words) - n + 1) if words[i : i + n] == phrase]


def words_of(row):
    return row["input"].splitlines()[1].split()


@pytest.mark.parametrize(("per_text", "span"), [(1, 32), (4, 32), (2, 12)])
def test_the_target_follows_the_only_place_of_the_quotation(tokenizer, per_text, span):
    for row in rows(tokenizer, samples=8, per_text=per_text, span=span):
        words, cue, target = words_of(row), row["gen_prefix"].split(), row["target"].split()
        (at,) = places(words, cue)
        assert words[at + len(cue) : at + span] == target
        assert len(cue) + len(target) == span
        assert row["answers"] == [row["target"]]


def test_the_default_is_eight_quoted_words_and_24_target_words(tokenizer):
    (row, *_) = rows(tokenizer)
    assert (len(row["gen_prefix"].split()), len(row["target"].split())) == (8, 24)


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_passage_is_at_its_depth_among_the_words_outside_passages(tokenizer, per_text):
    built = rows(tokenizer, 6000, depths=(100, 25, 0, 75, 50), samples=5, per_text=per_text)
    for row in built:
        words = words_of(row)
        (at,) = places(words, row["gen_prefix"].split())
        starts = [places(words, other["gen_prefix"].split()) for other in built]
        before = 32 * sum(start < at for places_of_cue in starts for start in places_of_cue)
        outside = len(words) - 32 * per_text
        assert at - before == round(row["depth"] * outside / 100)


def test_the_words_are_those_of_a_text_in_another_order(tokenizer):
    novel = texts.split_words("emma")
    (row, *_) = rows(tokenizer, 6000, text="emma")
    words = words_of(row)
    assert set(words) <= set(novel)
    neighbours = set(pairwise(novel))
    pairs = list(pairwise(words))
    assert sum(pair in neighbours for pair in pairs) < 0.05 * len(pairs)


def test_the_control_quotes_words_that_are_not_in_the_text(tokenizer):
    planted, control = (rows(tokenizer, planted=planted) for planted in (True, False))
    for with_it, without in zip(planted, control, strict=True):
        assert (without["gen_prefix"], without["target"]) == (
            with_it["gen_prefix"],
            with_it["target"],
        )
        assert places(words_of(without), without["gen_prefix"].split()[:3]) == []
        assert places(words_of(without), without["target"].split()[:3]) == []


@pytest.mark.parametrize(
    ("written", "score"),
    [
        (" one two three four five", 1),
        ("one two three four", 1),
        ("one two\nthree", 0.75),
        ("one two 3 four", 0.5),
        ("two three four", 0),
        ("One two three four", 0),
        ("", 0),
    ],
)
def test_the_score_is_the_share_of_words_up_to_the_first_mistake(written, score):
    target = "one two three four"
    doc = {"target": target, "answers": [target]}
    assert copying.copied(doc, [written]) == {"score": score}


def test_the_likelihood_of_the_target_is_reported_if_the_model_gives_it():
    class Response(str):
        target_log_likelihood = -2.5

    doc = {"target": "one two", "answers": ["one two"]}
    scores = copying.copied(doc, [Response("one")])
    assert scores == {"score": 0.5, "target_log_likelihood": -2.5}


@pytest.mark.parametrize("span", [8, 41])
def test_a_span_that_is_too_short_or_too_long_is_refused(tokenizer, span):
    with pytest.raises(ValueError, match=f"9 to 40 words, got {span}"):
        rows(tokenizer, span=span)


def test_a_text_of_few_different_words_is_refused(tokenizer, tmp_path):
    text = tmp_path / "few.txt"
    text.write_text("the same words again " * 100)
    with pytest.raises(ValueError, match=r"at least 100 different words .* got 4"):
        rows(tokenizer, text=str(text))
