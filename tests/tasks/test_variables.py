"""Test variable tracking: RULER's prompt, its length, and the chain of assignments."""

import random
import re

import pytest

from rope_patch.tasks import scoring, variables

NOISE = variables.NOISE


def rows(tokenizer, length=2048, **kwargs):
    dataset = variables.variable_tracking(tokenizer=tokenizer, length=length, **kwargs)
    return dataset["test"].to_list()


@pytest.mark.parametrize("length", [1280, 1777, 2048, 4096])
def test_example_prompt_prefix_and_room_fill_the_length(tokenizer, length):
    unit = max(len(tokenizer(f" {s}\n", add_special_tokens=False).input_ids) for s in NOISE)
    for row in rows(tokenizer, length):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + variables.ROOM
        assert used == row["tokens"]
        assert length - unit <= used <= length


@pytest.mark.parametrize("length", [2048, 4096])
def test_following_the_chain_from_the_value_gives_the_answers(tokenizer, length):
    for row in rows(tokenizer, length, samples=5):
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


def test_prompts_equal_those_of_ruler_except_names_places_and_spelling(tokenizer):
    from lm_eval.tasks.ruler import vt_utils

    (row,) = rows(tokenizer, samples=1)
    random.seed(0)
    example, names = vt_utils.generate_input_output(10, 1, 4, is_icl=True)
    noises = row["input"].split("\n\nMemorize")[1].count("There and back again")
    question, _ = vt_utils.generate_input_output(noises, 1, 4)
    cut = row["input"].index("Question:", row["input"].rindex("Memorize"))
    tail = re.search(r"(?<=There and back again\.\n)((?! VAR)(?!VAR)[^\n]*)\n$", row["input"][:cut])
    ours = f"{row['input']} {row['gen_prefix']}"
    assert normalised(f"{example} {' '.join(names)}\n\n{question}") == normalised(
        ours, but=tail and tail[1]
    )


def normalised(prompt, but=None):
    """Return the prompt without random parts: names, values and places of assignments."""
    prompt = prompt.replace("assgined", "assigned")  # RULER has fixed this since
    if but and but.strip():
        prompt = "".join(prompt.rsplit(but, 1))
    assignments = re.findall(r"VAR (\w+) = (VAR )?", prompt)
    shape = [(len(name), bool(source)) for name, source in assignments]
    text = re.sub(r"VAR \w+ = (VAR )?\w+", "", prompt)
    text = re.sub(r"\d{5}", "VALUE", re.sub(r"\b[A-Z]{3,5}\b", "NAME", text))
    return shape, text.split()


@pytest.mark.parametrize("length", [1300, 2048])
def test_each_assignment_has_a_line_of_its_own(tokenizer, length):
    for row in rows(tokenizer, length, samples=3):
        assigning = [line for line in row["input"].split("\n") if "VAR" in line]
        assert len(assigning) == 10  # the example's and the question's
        assert all(re.fullmatch(r"VAR \w+ = (VAR )?\w+", line) for line in assigning)


def test_prompts_lack_the_misspelling_of_ruler(tokenizer):
    assert "assgined" not in str(rows(tokenizer))


@pytest.mark.parametrize("length", [64, 512])
def test_a_length_that_is_too_short_is_refused(tokenizer, length):
    with pytest.raises(ValueError, match=f"a length of {length} tokens is too short for rp_vt"):
        rows(tokenizer, length)


def test_samples_do_not_depend_on_their_number_and_share_no_text(tokenizer):
    random.seed(7)
    state = random.getstate()
    some = rows(tokenizer, samples=2)
    assert rows(tokenizer, samples=4, per_text=4)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, samples=2, seed=1) != some
    assert [row["text"] for row in some] == [0, 1]
    assert [row["depth"] for row in some] == [None, None]


def test_a_control_is_refused(tokenizer):
    with pytest.raises(ValueError, match="rp_vt has no control"):
        rows(tokenizer, planted=False)


def test_scores_equal_those_of_ruler(tokenizer):
    from lm_eval.tasks.ruler.common_utils import string_match_all

    (row,) = rows(tokenizer, samples=1)
    for count in range(6):
        written = " ".join(row["answers"][:count]).lower()
        expected = string_match_all([written], [row["answers"]])
        assert scoring.all_answers(row, [written])["score"] == expected == count / 5
