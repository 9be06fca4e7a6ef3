"""Test common and frequent words: counts, lengths, wording and scores, against RULER."""

import random
import re
from collections import Counter
from importlib import import_module
from itertools import islice

import numpy as np
import pytest
from scipy.special import zeta

from rope_patch.tasks import frequent_words, scoring

BUILDERS = {"rp_cwe": frequent_words.common_words, "rp_fwe": frequent_words.frequent_words}
ROOMS = {"rp_cwe": frequent_words.COMMON_ROOM, "rp_fwe": frequent_words.FREQUENT_ROOM}


def rows(tokenizer, task, length=2048, **kwargs):
    return BUILDERS[task](tokenizer=tokenizer, length=length, **kwargs)["test"].to_list()


def entries(numbered):
    """Return the entries of "1. one 2. two"; an entry may be two words."""
    return re.split(r" ?\b\d+\. ", numbered)[1:]


@pytest.mark.parametrize("length", [1500, 2048, 4095, 6144])
@pytest.mark.parametrize("task", BUILDERS)
def test_prompt_prefix_and_room_fill_the_length_to_a_word(tokenizer, task, length):
    for row in rows(tokenizer, task, length):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + ROOMS[task]
        assert used == row["tokens"]
        # The longest entry is a number of three digits and a word of a small vocabulary.
        assert length - (20 if task == "rp_cwe" else 8) <= used <= length


@pytest.mark.parametrize("task", BUILDERS)
@pytest.mark.parametrize("length", [64, 300, 512, 900, 1024, 1200, 1400])
def test_a_short_length_gives_complete_samples_or_an_error(tokenizer, task, length):
    built, error = rows_or_error(tokenizer, task, length)
    assert built or f"a length of {length} tokens is too short for {task}" in error
    for row in built:
        assert len(row["answers"]) == {"rp_cwe": 10, "rp_fwe": 3}[task]
        assert row["tokens"] <= length


def rows_or_error(tokenizer, task, length):
    try:
        return rows(tokenizer, task, length), ""
    except ValueError as error:
        return [], str(error)


@pytest.mark.parametrize(("length", "seldom", "often"), [(2048, 1, 6), (6144, 3, 30)])
def test_common_words_are_counted_as_in_ruler(tokenizer, length, seldom, often):
    for row in rows(tokenizer, "rp_cwe", length, samples=4):
        _, _, question = row["input"].split("Below is a numbered list")
        words = entries(question.split("\n")[1])
        (*first, (_, fewest)), rest = split_by_frequency(words, 10)
        assert {count for _, count in first} == {fewest} == {often}
        assert {word for word, _ in Counter(words).most_common(10)} == set(row["answers"])
        assert len(rest) >= 10
        # The last word may be cut off to meet the length.
        assert sorted(Counter(c for _, c in rest), reverse=True)[0] == seldom
        assert sum(c != seldom for _, c in rest) <= 1


def split_by_frequency(words, count):
    ordered = Counter(words).most_common()
    return ordered[:count], ordered[count:]


def test_targets_name_common_words_as_they_first_appear(tokenizer):
    for row in rows(tokenizer, "rp_cwe"):
        words = entries(row["input"].rsplit("often.\n", 1)[1].split("\n")[0])
        assert entries(row["target"]) == row["answers"] == sorted(row["answers"], key=words.index)


@pytest.mark.parametrize(
    ("length", "seldom", "often", "others"), [(2048, 1, 3, 10), (6144, 3, 10, 30)]
)
def test_the_prompt_has_the_example_of_ruler(tokenizer, length, seldom, often, others):
    (row,) = rows(tokenizer, "rp_cwe", length, samples=1)
    _, example, question = row["input"].split("Below is a numbered list")
    first, rest = split_by_frequency(entries(example.split("\n")[1]), 10)
    assert {count for _, count in first} == {often}
    assert [count for _, count in rest] == [seldom] * others
    example_answers = entries(example.strip().split("often in the list are: ")[1])
    assert set(example_answers) == {word for word, _ in first}
    assert not set(example_answers) & set(entries(question.split("\n")[1]))


@pytest.mark.parametrize(("length", "words"), [(2048, 60), (6144, 40)])
def test_common_words_have_the_prompt_of_ruler(tokenizer, length, words):
    cwe = import_module("lm_eval.tasks.ruler.cwe_utils")
    (row,) = rows(tokenizer, "rp_cwe", length, samples=1)
    example, question, _ = cwe.generate_input_output(words, length)
    ours = re.sub(r"\d+\. .*?(?=\n|$)", "LIST", f"{row['input']} {row['gen_prefix']}")
    assert re.sub(r"\d+\. .*?(?=\n|$)", "LIST", f"{example}\n{question}") == ours.replace(
        "are: LIST", "are:LIST"
    )
    assert frequent_words._vocabulary() == sorted(cwe.WORDS)


def test_the_words_never_run_out():
    words = [frequent_words._other(["a", "b", "c"], i) for i in range(9)]
    assert words[:3] == ["a", "b", "c"]
    assert len(set(words)) == 9


def test_frequent_words_are_counted(tokenizer):
    for length in (1500, 4096):
        for row in rows(tokenizer, "rp_fwe", length):
            text = row["input"].split("coded words. ")[1].split("\nQuestion")[0].split(" ")
            (noise, _), *ranked = Counter(text).most_common()
            assert noise == "..."
            assert [word for word, _ in ranked[:3]] == row["answers"] == row["target"].split()
            assert ranked[2][1] >= ranked[3][1] + 2


@pytest.mark.parametrize("number", [300, 1000, 5000])
def test_frequencies_follow_the_zeta_distribution_of_ruler(number):
    ranks = np.arange(1, 101)
    expected = (number * ranks**-2.0 / zeta(2.0)).astype(int)
    counts = Counter(islice(frequent_words._zeta(100), int(expected.sum())))
    assert [counts[rank] for rank in ranks] == expected.tolist()


def test_three_words_lead_clearly_at_every_length():
    stream = frequent_words._zeta(10)
    counts = Counter(islice(stream, frequent_words._MIN_FREQUENT_WORDS))
    for rank in islice(stream, 5000):
        one, two, three, four, five = (counts[rank] for rank in range(1, 6))
        assert one > two > three > four >= five + 2
        counts[rank] += 1


def test_frequent_words_have_the_prompt_of_ruler_and_room_for_the_answer(tokenizer):
    fwe = import_module("lm_eval.tasks.ruler.fwe_utils")
    random.seed(0)
    ruler_prompt, _, _ = fwe.generate_input_output(2048, tokenizer, num_words=300, vocab_size=40)
    (row,) = rows(tokenizer, "rp_fwe", samples=1)
    ours = f"{row['input']} {row['gen_prefix']}"

    def blank(text):
        return re.sub(r"(?<=coded words\. )[a-z. ]+(?=\n)", "", text)

    assert blank(ours) == blank(ruler_prompt)
    used = len(tokenizer(ours).input_ids)
    assert used <= 2048 - 50


@pytest.mark.parametrize("task", BUILDERS)
def test_samples_do_not_depend_on_their_number_and_share_no_text(tokenizer, task):
    random.seed(7)
    state = random.getstate()
    some = rows(tokenizer, task, samples=2)
    assert rows(tokenizer, task, samples=4, per_text=4)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, task, samples=2, seed=1) != some
    assert [(row["text"], row["depth"]) for row in some] == [(0, None), (1, None)]


@pytest.mark.parametrize("task", BUILDERS)
def test_a_control_is_refused(tokenizer, task):
    with pytest.raises(ValueError, match=f"{task} has no control"):
        rows(tokenizer, task, planted=False)


@pytest.mark.parametrize("task", BUILDERS)
def test_scores_equal_those_of_ruler(tokenizer, task):
    from lm_eval.tasks.ruler.common_utils import string_match_all

    (row,) = rows(tokenizer, task, samples=1)
    for written in ("", row["target"], row["answers"][0].upper(), " ".join(row["answers"][1:])):
        expected = string_match_all([written], [row["answers"]])
        assert scoring.all_answers(row, [written])["score"] == expected
