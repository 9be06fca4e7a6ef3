"""Latent lists: the program is read back from the prompt and run by Python itself."""

import random
import re
from collections import Counter

import pytest
from helpers.tokenizers import KINDS, check_length, check_lm_eval, load

from rope_patch.tasks import list_operations


def rows(length=1500, tokenizer="tiny", **kwargs):
    built = list_operations.build(tokenizer=load(tokenizer), length=length, **kwargs)
    return built["test"].to_list()


def program(row):
    return re.search(r"```python\n(.*)\n```", row["input"], re.S).group(1)


def asked(row):
    return re.search(r"the line `print\((.+)\)` is", row["input"]).group(1)


def run(lines):
    """The variables that a program leaves; what it prints is dropped."""
    variables = {"print": lambda *_: None}
    exec(lines, variables)
    return variables


@pytest.mark.parametrize(("per_text", "operations"), [(1, 12), (5, 12), (9, 12), (3, 8), (2, 31)])
def test_the_answer_is_what_python_prints(per_text, operations):
    for row in rows(2500, samples=18, per_text=per_text, operations=operations):
        value = eval(asked(row), run(program(row)))
        assert row["answers"] == [row["target"]] == [str(value)]
        assert row["depth"] is None
        name = re.search(r"\w+_?(?=\)|\[|$)", asked(row)).group()
        changes = re.findall(rf"^{name}\.\w+\(", program(row), re.M)
        assert len(changes) == operations


def test_every_line_of_filler_runs_and_none_changes_the_list():
    """Also where the filler goes on much longer; and operations stand all over the program."""
    (row,) = rows(20_000, "words", samples=1)
    lines = program(row).splitlines()
    name = re.search(r"(?:alpha|beta|gamma|delta|kappa|lambda_|omega|sigma|theta|zeta)", asked(row))
    own = re.compile(rf"{name.group()}( = |\.(?:append|insert|remove|pop|sort|reverse)\()")
    without = "\n".join(line for line in lines if own.match(line))
    assert run(without)[name.group()] == run("\n".join(lines))[name.group()]
    places = [i / len(lines) for i, line in enumerate(lines) if own.match(line)]
    assert len(places) == 13
    assert min(places[1:]) < 0.4
    assert max(places) > 0.6
    assert sum(line.startswith("print(") for line in lines) > 0.15 * len(lines)
    longest = max(len(v) for v in run("\n".join(lines)).values() if isinstance(v, list))
    assert longest <= 12


def test_each_kind_of_question_comes_before_any_comes_twice():
    built = rows(samples=9, per_text=9)
    assert {row["question"] for row in built[:5]} == {"list", "sum", "length", "item", "slice"}
    assert len({asked(row) for row in built}) == 9
    with pytest.raises(ValueError, match="at most 9 questions about a list, got per_text 10"):
        rows(per_text=10)
    with pytest.raises(ValueError, match="at least 8 lines that change the list, got 7"):
        rows(operations=7)


def test_the_control_asks_the_same_of_a_program_without_the_list():
    planted, control = (rows(samples=5, per_text=5, planted=p) for p in (True, False))
    for with_it, without in zip(planted, control, strict=True):
        assert (asked(without), without["target"]) == (asked(with_it), with_it["target"])
        with pytest.raises(NameError):
            eval(asked(without), run(program(without)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planted", [True, False])
def test_prompts_fill_the_length_to_less_than_a_line(kind, planted):
    for length in (1024, 2500):
        built = rows(length, kind, samples=5, per_text=5, planted=planted)
        shortest = max(row["tokens"] for row in built)
        # Questions of one text have the filler of the longest.
        check_length(built, load(kind), list_operations.ROOM, length, 36)
        assert length - shortest < 16


def test_samples_are_the_same_however_many_are_built_and_share_their_text():
    random.seed(8)
    state = random.getstate()
    built = rows(samples=7, per_text=5)
    assert random.getstate() == state
    assert rows(samples=5, per_text=5) == built[:5]
    assert rows(samples=5, per_text=5, seed=1) != built[:5]
    assert len({program(row) for row in built}) == 2


@pytest.mark.parametrize(
    ("target", "written", "score"),
    [
        ("[1, 22, 3]", " [1, 22, 3]\nand so on [4]", 1),
        ("[1, 22, 3]", "[1,22,\n3]", 1),
        ("[1, 22, 3]", "[1, 22]", 0),
        ("[1, 22, 3]", "1, 22, 3", 0),
        ("[1, 22, 3]", "[11, 22, 3]", 0),
        ("12", " 12.", 1),
        ("12", " 12.5", 0),
        ("12", " 125", 0),
        ("12", "the number 12, as said", 1),
        ("12", " 2, or 12", 0),
        ("12", " [12]", 0),
        ("12", "", 0),
    ],
)
def test_the_first_value_must_be_the_answer_exactly(target, written, score):
    doc = {"target": target, "answers": [target]}
    assert list_operations.same_value(doc, [written])["score"] == score


def test_chance_is_the_score_of_the_best_constant():
    counts = {kind: Counter() for kind in list_operations.CHANCE}
    for row in rows(700, "words", samples=2000, per_text=5):
        counts[row["question"]][row["target"]] += 1
        chance = list_operations.CHANCE[row["question"]] or None
        assert (row["chance"], row["target_chance"]) == (chance, chance)
    for kind, counter in counts.items():
        ((_, most),) = counter.most_common(1)
        # The most frequent of 400 is more frequent by luck than on average.
        assert most / 400 < list_operations.CHANCE[kind] + 0.06
    assert set(counts["length"]) == {str(n) for n in range(4, 12)}


def test_plain_lm_eval_builds_the_same_samples():
    names = ["rp_latent_list", "rp_latent_list_ll"]
    check_lm_eval(names, rows(1000, samples=5, per_text=5), 1000, samples=5, per_text=5)
