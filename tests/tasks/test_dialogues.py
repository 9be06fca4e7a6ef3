"""Repeated replies, checked by reading the dialogue back from the prompt."""

import random
import re
from collections import Counter
from difflib import SequenceMatcher

import pytest
from helpers.tokenizers import KINDS, check_length, check_lm_eval, load

from rope_patch import tasks
from rope_patch.tasks import dialogues

NEEDLES = [2, 4, 8]
LEAST = {2: 1024, 4: 1800, 8: 3000}  # tokens with room for as many replies, for every tokenizer


def rows(needles, length=6000, tokenizer="tiny", **kwargs):
    build = tasks.config(f"rp_mrcr_{needles}")["custom_dataset"]
    return build(tokenizer=load(tokenizer), length=length, **kwargs)["test"].to_list()


def turns(row):
    """Requests and replies in their order."""
    return re.findall(r"^User: Write a ([^.]+)\. Assistant: (.+)$", row["input"], re.M)


def asked(row):
    """The random string, the number and the request of the last message."""
    last = row["input"].split("\n\n")[-1]
    code, number, request = re.search(
        r"Write (\w{10}), .* the (\d)(?:st|nd|rd|th) (.+) that you wrote", last
    ).groups()
    return code, int(number), request


@pytest.mark.parametrize("needles", NEEDLES)
@pytest.mark.parametrize("per_text", [1, 3, 5])
def test_the_target_is_the_reply_that_the_number_says(needles, per_text):
    for row in rows(needles, samples=6, per_text=per_text):
        code, number, request = asked(row)
        replies = [reply for other, reply in turns(row) if other == request]
        assert len(replies) == len(set(replies)) == needles
        assert row["target"] == f"{code} {replies[number - 1]}"
        assert row["answers"] == [f"{row['target']}\n"]
        assert row["gen_prefix"] == "Assistant:"
        assert 200 <= len(replies[number - 1]) <= 400


@pytest.mark.parametrize("needles", NEEDLES)
def test_a_reply_stands_at_its_depth_among_other_turns(needles):
    for row in rows(needles, 20_000, "words", depths=(0, 25, 75, 100), samples=4):
        _, number, request = asked(row)
        listed = turns(row)
        places = [i for i, (other, _) in enumerate(listed) if other == request]
        at = places[number - 1] - (number - 1)
        assert at == round(row["depth"] * (len(listed) - needles) / 100)
        near = [other for other, _ in listed if other != request]
        kind, topic = request.split(" about ")
        assert sum(kind in other or topic in other for other in near) > 0.3 * len(near)


def test_every_number_is_asked_for_at_every_depth():
    built = rows(4, 2500, "words", samples=120, depths=(0, 50, 100))
    counts = Counter((row["depth"], asked(row)[1]) for row in built)
    assert len(counts) == 12
    assert max(counts.values()) < 22  # ten each on average


def test_the_control_asks_the_same_of_a_dialogue_without_the_replies():
    planted, control = (rows(4, samples=4, per_text=2, planted=p) for p in (True, False))
    for with_them, without in zip(planted, control, strict=True):
        assert asked(without) == asked(with_them)
        assert without["target"] == with_them["target"]
        assert asked(without)[2] not in {request for request, _ in turns(without)}
        assert without["target"].split(" ", 1)[1] not in without["input"]


@pytest.mark.parametrize("needles", NEEDLES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_fill_the_length_to_less_than_a_turn(needles, kind):
    for length in (LEAST[needles], 4096):
        built = rows(needles, length, kind, samples=2, per_text=2)
        check_length(built, load(kind), dialogues.ROOM, length, 230 if kind == "tiny" else 130)


def test_samples_are_the_same_however_many_are_built_and_share_their_text():
    random.seed(8)
    state = random.getstate()
    built = rows(2, samples=5, per_text=3)
    assert random.getstate() == state
    assert rows(2, samples=3, per_text=3) == built[:3]
    assert rows(2, samples=3, per_text=3, seed=1) != built[:3]
    assert len({str(turns(row)) for row in built[:3]}) == 1
    assert len({row["target"] for row in built}) == 5
    with pytest.raises(ValueError, match="room for 40 questions, got per_text 41"):
        rows(2, per_text=41)


TARGET = "aB3dE6gH9k The keeper fed the pigeons. It rained."


@pytest.mark.parametrize(
    ("written", "score"),
    [
        (f" {TARGET}", 1),
        (f"{TARGET}\n\nUser: Write a poem about kites.", 1),
        (TARGET.replace(" ", "\n", 1), 1),
        (TARGET.replace(" ", "", 1), 1),
        (TARGET.split(" ", 1)[1], 0),
        (TARGET.lower(), 0),
        (f"Here it is: {TARGET}", 0),
        ("aB3dE6gH9k", 0),
        ("", 0),
    ],
)
def test_the_score_is_one_for_the_reply_and_zero_without_the_string(written, score):
    doc = {"target": TARGET, "answers": [f"{TARGET}\n"]}
    assert dialogues.repeated(doc, [written])["score"] == score


def test_the_score_in_between_is_difflibs_ratio():
    doc = {"target": TARGET, "answers": [f"{TARGET}\n"]}
    reply = TARGET.split(" ", 1)[1]
    for other in ("The keeper fed the owls. It rained.", f"{reply} And snowed."):
        expected = SequenceMatcher(None, other, reply).ratio()
        assert 0.5 < expected < 1
        assert dialogues.repeated(doc, [f"aB3dE6gH9k {other}"])["score"] == expected


@pytest.mark.parametrize(("needles", "floor"), [(2, 0.53), (4, 0.30), (8, 0.19)])
def test_chance_is_the_score_of_a_random_one_of_the_replies(needles, floor):
    chances = []
    for row in rows(needles, samples=6):
        code, _, request = asked(row)
        replies = [reply for other, reply in turns(row) if other == request]
        scores = [dialogues.repeated(row, [f"{code} {reply}"])["score"] for reply in replies]
        assert sorted(scores)[-1] == 1
        assert sorted(scores)[-2] < 0.4  # a wrong reply is clearly wrong
        assert row["chance"] == pytest.approx(sum(scores) / needles)
        assert row["target_chance"] == 1 / needles
        chances.append(row["chance"])
    assert sum(chances) / len(chances) == pytest.approx(floor, abs=0.05)


@pytest.mark.parametrize("needles", NEEDLES)
def test_plain_lm_eval_builds_the_same_samples(needles):
    names = [f"rp_mrcr_{needles}", f"rp_mrcr_{needles}_ll"]
    check_lm_eval(names, rows(needles, 3000, samples=1), 3000, samples=1)
