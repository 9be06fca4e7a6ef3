"""Test the tasks of rp_hard: each answer is found again in the prompt by other means."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from helpers import built_tasks
from helpers.built_tasks import build_rows

from rope_patch import tasks

NOVELS = [path.name.removesuffix(".txt.xz") for path in tasks.FOLDER.parent.glob("data/*.txt.xz")]


def planted_and_control(name, **request):
    """Return pairs of a sample and the control's."""
    both = (built_tasks.rows(name, planted=planted, **request) for planted in (True, False))
    return zip(*both, strict=True)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("rp_nonliteral", {"distractors": -1}, "64 strangers a text"),
        ("rp_nonliteral", {"distractors": 64}, "64 strangers a text"),
        ("rp_nonliteral", {"per_text": 63}, "64 strangers a text"),
        ("rp_count", {"per_text": 100}, "at most 99 questions .* got per_text 100"),
        ("rp_json_kv", {"confusable": -0.1}, "from 0 to 1, got -0.1"),
        ("rp_json_kv", {"confusable": 1.5}, "from 0 to 1, got 1.5"),
        ("rp_copy", {"span": 8}, "9 to 40 words, got 8"),
        ("rp_copy", {"span": 41}, "9 to 40 words, got 41"),
    ],
)
def test_options_beyond_what_there_is_are_refused(name, options, named):
    with pytest.raises(ValueError, match=named):
        build_rows(name, length=2000, **options)


# --- Needles that share no word with their question -----------------------------------------------

STRANGERS = json.loads(Path(tasks.__file__).with_name("nonliteral.json").read_text())
FACTS = STRANGERS["facts"]
# Words without content.
STOP_WORDS = {
    *("a", "an", "the", "of", "in", "at", "on", "to", "for", "from", "with", "by", "as", "and"),
    *("is", "was", "are", "be", "been", "has", "had", "have", "or", "not", "one"),
    *("must", "should", "would", "can", "cannot"),
}


def strangers(length=1024, **kwargs):
    return built_tasks.rows("rp_nonliteral", length=length, **kwargs)


def stems(sentence):
    return {word[:5] for word in re.findall(r"\w+", sentence.lower())} - STOP_WORDS


def story(row):
    return row["input"].partition("\n")[2].rpartition("\n")[0]


def asked_about_strangers(row):
    return re.search(r"Which of the strangers (.*)\? Answer", row["input"])[1]


def test_questions_share_no_content_word_with_any_needle():
    assert len(FACTS) >= 40
    assert len({fact for fact, _ in FACTS}) == len({asked for _, asked in FACTS}) == len(FACTS)
    (row, *_) = strangers()
    own_words = row["input"].rpartition("\n")[2].replace(asked_about_strangers(row), "")
    own_stems = stems(own_words + row["gen_prefix"])
    needles = set().union(*(stems(fact) for fact, _ in FACTS))
    for _, question in FACTS:
        assert stems(question), question
        assert not (stems(question) | own_stems) & needles, question


def test_no_name_is_in_a_novel_a_fact_or_another_name():
    names = [name.lower() for name in STRANGERS["names"]]
    others = [tasks.read_text(novel).lower() for novel in NOVELS] + [str(FACTS).lower()]
    assert len(names) >= 100
    for name in names:
        assert not any(name in text for text in others), name
        assert [other for other in names if name in other] == [name]


@pytest.mark.parametrize("per_text", [1, 4])
def test_the_answer_is_the_only_name_with_the_fact_in_question(per_text):
    fact_of_question = {question: fact for fact, question in FACTS}
    for row in strangers(samples=8, per_text=per_text):
        (name,) = row["answers"]
        assert f"{name} {fact_of_question[asked_about_strangers(row)]}." in row["input"]
        assert row["input"].lower().count(name.lower()) == 1
        assert row["target"] == name


@pytest.mark.parametrize("depth", [0, 30, 60, 100])
def test_the_needle_is_at_its_depth_between_two_sentences(depth):
    (row,) = strangers(8192, depths=(depth,), distractors=0)
    before, name, after = story(row).partition(row["target"])
    assert name
    after = after.partition(".")[2]
    assert 100 * len(before) / len(before + after) == pytest.approx(depth, abs=3)
    assert before == "" or before.rstrip().endswith((".", "!", "?", '"'))


def test_the_needle_goes_to_the_nearest_sentence_end_and_not_behind_a_title(tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("Mr. A went. Then he ate. It rained all day long.")
    for depth in range(0, 101, 5):
        (row,) = strangers(tokenizer="words", depths=(depth,), distractors=0, text=str(file))
        head, _, tail = story(row).partition(row["target"])
        words, at = (head + tail.partition(". ")[2]).split(), len(head.split())
        ends = [0, *(i + 1 for i, word in enumerate(words) if word in ("went.", "ate.", "long."))]
        target = depth * len(words) / 100
        assert at in ends
        assert abs(at - target) == min(abs(end - target) for end in ends)


def test_the_control_has_the_distractors_and_not_the_answer():
    for row, without in planted_and_control("rp_nonliteral", length=1024, samples=6, distractors=3):
        names = {name for name in STRANGERS["names"] if name in row["input"]}
        assert len(names) == 4
        left = {name for name in STRANGERS["names"] if name in without["input"]}
        assert left == names - {row["target"]}


def test_names_in_the_users_text_are_not_used(tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("They met. " + " ".join(f"{name} came." for name in STRANGERS["names"][5:]))
    built = strangers(samples=9, text=str(file), distractors=0)
    assert {row["target"] for row in built} <= set(STRANGERS["names"][:5])


# --- Counting -------------------------------------------------------------------------------------

NUMBERS = [
    "",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def counted(length=1500, **kwargs):
    return built_tasks.rows("rp_count", length=length, **kwargs)


def kind_in_question(row):
    return re.search(r"How many (\w+ \w+)s were left", row["input"])[1]


def count_kinds(row):
    """Return the number of sentences about each kind of thing."""
    return Counter(re.findall(r"A (\w+ \w+) was left [^.]*\.", row["input"]))


@pytest.mark.parametrize("per_text", [1, 3])
def test_the_answer_is_the_number_of_sentences_of_the_kind_in_question(per_text):
    for row in counted(samples=9, per_text=per_text):
        counts = count_kinds(row)
        assert row["answers"] == [str(counts[kind_in_question(row)])]
        assert NUMBERS.index(row["target"]) + 1 == counts[kind_in_question(row)]
        assert row["depth"] is None
        assert len(counts) == per_text + 1  # and a kind that no question is about


def test_sentences_of_a_kind_differ_and_spread_over_the_text():
    for row in counted(length=6000, samples=6):
        matches = list(re.finditer(rf"A {kind_in_question(row)} was left ([^.]*)\.", row["input"]))
        assert len({match[1] for match in matches}) == len(matches)
        part = len(row["input"]) / len(matches)
        for i, match in enumerate(matches):  # one in each part, give or take a sentence
            assert match.start() == pytest.approx((i + 0.5) * part, abs=0.5 * part + 900)


@pytest.mark.parametrize("length", [1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_numbers_from_2_to_12_are_equally_likely_at_every_length(length):
    built = build_rows("rp_count", "words", length=length, samples=300, per_text=6, text="emma")
    counts = [int(row["answers"][0]) for row in built]
    assert set(counts) == set(range(2, 13))
    # The mean of 300 draws has a standard error of 0.18.
    assert sum(counts) / len(counts) == pytest.approx(7, abs=0.7)


def test_the_control_has_all_kinds_but_that_in_question():
    for row, without in planted_and_control("rp_count", length=1500, samples=6):
        rest = {k: n for k, n in count_kinds(row).items() if k != kind_in_question(row)}
        assert count_kinds(without) == rest


# --- Key-value recall -----------------------------------------------------------------------------


def recalled(length=4096, **kwargs):
    return built_tasks.rows("rp_json_kv", length=length, **kwargs)


def read_pairs(row):
    """Return the object's pairs in order, and the key in question."""
    text, _, key = row["input"].rpartition("\nKey: ")
    pairs = json.loads(text[text.index("{") :], object_pairs_hook=list)
    assert len(dict(pairs)) == len(pairs)
    return pairs, key


def distance(a, b):
    return sum(x != y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_answer_is_the_value_of_the_key_in_question(per_text):
    for row in recalled(samples=10, per_text=per_text):
        pairs, key = read_pairs(row)
        assert row["answers"] == [row["target"]] == [dict(pairs)[key]]
        assert row["input"].count(row["target"]) == 1
        assert row["input"].count(key) == 2  # in the object and in the question
        assert all(str(UUID(part)) == part for pair in pairs for part in pair)


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_pair_is_at_its_depth_among_the_other_pairs(per_text):
    built = recalled(8000, depths=(100, 25, 0, 75, 50), samples=5, per_text=per_text)
    question_keys = {read_pairs(row)[1] for row in built}
    for row in built:
        pairs, key = read_pairs(row)
        order = [other for other, _ in pairs if other == key or other not in question_keys]
        assert order.index(key) == round(row["depth"] * (len(order) - 1) / 100)


def test_questions_at_one_depth_have_different_pairs():
    built = [read_pairs(row) for row in recalled(depths=(50,), samples=4, per_text=4)]
    assert all(pairs == built[0][0] for pairs, _ in built)
    assert len({key for _, key in built}) == 4


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_confusable_keys_differ_in_two_digits_from_the_key_in_question(share):
    others = near = 0
    for row in recalled(8192, samples=6, confusable=share):
        pairs, key = read_pairs(row)
        distances = [distance(key, other) for other, _ in pairs if other != key]
        others += len(distances)
        near += distances.count(2)
        # Random keys share about 2 of 32 digits.
        assert all(digits == 2 or digits > 15 for digits in distances)
    assert others > 300
    assert near / others == pytest.approx(share, abs=0.08)


def test_a_quarter_of_the_keys_is_confusable_by_default():
    assert recalled() == recalled(confusable=0.25) != recalled(confusable=0)


def test_the_control_lacks_the_key_and_keeps_confusable_ones():
    for row, without in planted_and_control("rp_json_kv", length=4096, confusable=0.5):
        pairs, key = read_pairs(without)
        assert key == read_pairs(row)[1]
        assert key not in dict(pairs)
        assert any(distance(key, other) == 2 for other, _ in pairs)


# --- Copying --------------------------------------------------------------------------------------


def copied(length=3000, **kwargs):
    return built_tasks.rows("rp_copy", length=length, **kwargs)


def places(words, phrase):
    """Return the indices at which a phrase begins in a list of words."""
    n = len(phrase)
    return [i for i in range(len(words) - n + 1) if words[i : i + n] == phrase]


def words_of(row):
    return row["input"].splitlines()[1].split()


@pytest.mark.parametrize(("per_text", "span"), [(1, None), (4, 32), (2, 12)])
def test_the_target_follows_the_only_place_of_the_quotation(per_text, span):
    options = {"span": span} if span else {}
    for row in copied(samples=8, per_text=per_text, **options):
        words, cue, target = words_of(row), row["gen_prefix"].split(), row["target"].split()
        (at,) = places(words, cue)
        assert words[at + len(cue) : at + (span or 32)] == target
        assert len(cue) + len(target) == (span or 32)
        assert row["answers"] == [row["target"]]
        assert span or len(cue) == 8  # by default eight quoted words


@pytest.mark.parametrize("per_text", [1, 5])
def test_the_passage_is_at_its_depth_among_the_words_outside_passages(per_text):
    built = copied(6000, depths=(100, 25, 0, 75, 50), samples=5, per_text=per_text)
    for row in built:
        words = words_of(row)
        (at,) = places(words, row["gen_prefix"].split())
        starts = [places(words, other["gen_prefix"].split()) for other in built]
        before = 32 * sum(start < at for places_of_cue in starts for start in places_of_cue)
        outside = len(words) - 32 * per_text
        assert at - before == round(row["depth"] * outside / 100)


def test_the_words_are_those_of_a_text_in_another_order():
    novel = tasks.read_text("emma").split()
    (row, *_) = copied(6000, text="emma")
    words = words_of(row)
    assert set(words) <= set(novel)
    neighbours, pairs = set(pairwise(novel)), list(pairwise(words))
    assert sum(pair in neighbours for pair in pairs) < 0.05 * len(pairs)


def test_the_control_quotes_words_that_do_not_stand_together_in_the_text():
    for _, without in planted_and_control("rp_copy", length=3000):
        assert places(words_of(without), without["gen_prefix"].split()[:3]) == []
        assert places(words_of(without), without["target"].split()[:3]) == []


def test_a_text_of_few_different_words_is_refused(tmp_path):
    file = tmp_path / "few.txt"
    file.write_text("the same words again " * 100)
    with pytest.raises(ValueError, match=r"at least 100 different words .* got 4"):
        copied(text=str(file))
