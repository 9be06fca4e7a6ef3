"""Variable tracking: RULER's prompt, to the token, and one chain that can be followed."""

import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rope_patch.tasks import scoring, variables

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
NOISE = variables.NOISE


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def rows(tokenizer, length=2048, **kwargs):
    found = variables.variable_tracking(tokenizer=tokenizer, length=length, **kwargs)
    return found["test"].to_list()


@pytest.mark.parametrize("length", [1280, 1777, 2048, 4096])
def test_example_prompt_prefix_and_room_fill_the_length_and_never_exceed_it(tokenizer, length):
    unit = max(len(tokenizer(f" {s}\n", add_special_tokens=False).input_ids) for s in NOISE)
    for row in rows(tokenizer, length):
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + variables.ROOM
        assert used == row["tokens"]
        assert length - unit <= used <= length


@pytest.mark.parametrize("length", [2048, 4096])
def test_following_the_chain_from_the_value_gives_the_answers(tokenizer, length):
    for row in rows(tokenizer, length, samples=5):
        example, asked = row["input"].split("\n\nMemorize")
        value = re.search(r"assigned the value (\d+) in the text", asked)[1]
        follows = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked))
        found, source = [], value
        while source in follows.values():
            (source,) = (name for name, of in follows.items() if of == source)
            found.append(source)
        assert found == row["answers"] == row["target"].split()
        assert len(set(found)) == len(follows) == 5
        assert f"5 variables are assigned the value {value}" in row["gen_prefix"]
        assert not any(name in example for name in found)


def test_prompts_are_those_of_ruler_but_for_its_names_places_and_spelling(tokenizer):
    from lm_eval.tasks.ruler import vt_utils

    (row,) = rows(tokenizer, samples=1)
    random.seed(0)
    taught, names = vt_utils.generate_input_output(10, 1, 4, is_icl=True)
    noises = row["input"].split("\n\nMemorize")[1].count("There and back again")
    asked, _ = vt_utils.generate_input_output(noises, 1, 4)
    cut = row["input"].index("Question:", row["input"].rindex("Memorize"))
    tail = re.search(r"(?<=There and back again\.\n)((?! VAR)(?!VAR)[^\n]*)\n$", row["input"][:cut])
    ours = f"{row['input']} {row['gen_prefix']}"
    assert normal(f"{taught} {' '.join(names)}\n\n{asked}") == normal(ours, but=tail and tail[1])


def normal(prompt, but=None):
    """Without what differs by chance: names, values and where assignments stand."""
    prompt = prompt.replace("assgined", "assigned")  # mended by RULER since
    if but and but.strip():
        prompt = "".join(prompt.rsplit(but, 1))
    assignments = re.findall(r"VAR (\w+) = (VAR )?", prompt)
    shape = [(len(name), bool(source)) for name, source in assignments]
    text = re.sub(r"VAR \w+ = (VAR )?\w+", "", prompt)
    text = re.sub(r"\d{5}", "VALUE", re.sub(r"\b[A-Z]{3,5}\b", "NAME", text))
    return shape, text.split()


def test_the_spelling_is_right(tokenizer):
    assert "assgined" not in str(rows(tokenizer))


@pytest.mark.parametrize("length", [64, 512])
def test_a_length_that_is_too_short_ends_in_an_error(tokenizer, length):
    with pytest.raises(ValueError, match=f"a length of {length} tokens is too short for rp_vt"):
        rows(tokenizer, length)


def test_samples_are_the_same_in_any_number_and_share_no_text(tokenizer):
    random.seed(7)
    state = random.getstate()
    some = rows(tokenizer, samples=2)
    assert rows(tokenizer, samples=4, per_text=4)[:2] == some
    assert random.getstate() == state
    assert rows(tokenizer, samples=2, seed=1) != some
    assert [row["text"] for row in some] == [0, 1]
    assert [row["depth"] for row in some] == [None, None]


def test_there_is_no_control(tokenizer):
    with pytest.raises(ValueError, match="rp_vt has no control"):
        rows(tokenizer, planted=False)


def test_scores_are_those_of_ruler(tokenizer):
    from lm_eval.tasks.ruler.common_utils import string_match_all

    (row,) = rows(tokenizer, samples=1)
    for count in range(6):
        written = " ".join(row["answers"][:count]).lower()
        expected = string_match_all([written], [row["answers"]])
        assert scoring.all_answers(row, [written])["score"] == expected == count / 5
