"""Test what all tasks have in common; a task is a row of TASKS."""

import random
import re
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from helpers.built_tasks import build_rows, read_config, rows, score_of
from helpers.tokenizers import TINY, load
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from rope_patch import tasks
from rope_patch.evaluation import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.tasks import settled_part, stop_rule


class Task(NamedTuple):
    """What is peculiar to a task.

    Attributes:
        question: What stands in the prompt between the text and the question.
        units: The most tokens of a unit of filler, by the tiny tokenizer and by that of words.
        length: The least thousands of tokens with room for the task's own words, or so.
        further: Lengths at which the text is made in another way.
        less: The most tokens, by the two tokenizers, by which it is shorter than the longest prompt
            and answer about the same text.
        shares: Whether samples of one text differ in nothing but the question.
        head: What comes before the text, and names answers of which one is right.
    """

    question: str
    units: tuple[int, int]
    length: int = 1024
    further: tuple[int, ...] = ()
    less: tuple[int, int] = (0, 0)
    shares: bool = True
    head: str = ""


NEEDLE, PROSE = "\nWhat ", (24, 4)
TASKS = {
    "rp_niah_single_1": Task(NEEDLE, (60, 25), shares=False),
    "rp_niah_single_2": Task(NEEDLE, PROSE, shares=False),
    "rp_niah_single_3": Task(NEEDLE, PROSE, shares=False),
    "rp_niah_multikey_1": Task(NEEDLE, PROSE),
    "rp_niah_multikey_2": Task(NEEDLE, (70, 20)),
    "rp_niah_multikey_3": Task(NEEDLE, (90, 30)),
    "rp_niah_multivalue": Task(NEEDLE, PROSE, shares=False),
    "rp_niah_multiquery": Task(NEEDLE, PROSE),
    "rp_vt": Task("\nQuestion: ", (16, 6), 1280, shares=False),
    "rp_cwe": Task("\nQuestion: ", (20, 5), 1500, (4095, 6144), shares=False),
    "rp_fwe": Task("\nQuestion: ", (8, 4), shares=False),
    "rp_qa_1": Task("Question: ", (24, 8)),  # one more word may begin another document
    "rp_qa_2": Task("Question: ", (24, 8)),
    "rp_nonliteral": Task("\nWhich ", (16, 5)),
    "rp_count": Task("\nHow many ", (12, 6)),
    "rp_json_kv": Task("\nKey: ", (90, 24)),
    "rp_copy": Task("\nThe quoted ", (12, 3)),
    "rp_recall": Task("\n", (40, 0)),  # only the prefix asks
    "rp_code": Task("this line:\n", (90, 36)),
    "rp_code_next": Task("this line:\n", (90, 36), 4096),
    "rp_graph_bfs": Task("\nRun ", (24, 6)),
    "rp_graph_parents": Task("\nWhich ", (24, 6)),
    "rp_icl": Task("\nSentence: ", (90, 50)),
    "rp_latent_list": Task("\nWhat does ", (36, 16)),
    "rp_mrcr_2": Task("\n\nUser: ", (230, 130)),
    "rp_mrcr_4": Task("\n\nUser: ", (230, 130), 1800),
    "rp_mrcr_8": Task("\n\nUser: ", (230, 130), 3000),
    "rp_v2_mk_niah_basic": Task(NEEDLE, (75, 20)),
    "rp_v2_mk_niah_easy": Task("\n\nPlease ", (120, 40), 1400),
    "rp_v2_mk_niah_medium": Task("\n\nPlease ", (120, 40), 2600),
    "rp_v2_mk_niah_hard": Task("\n\nPlease ", (120, 40), 2600, less=(560, 280)),
    "rp_v2_mv_niah_basic": Task(NEEDLE, (75, 20), 1300),
    "rp_v2_mv_niah_easy": Task("\n\nPlease ", (120, 40), 2600),
    "rp_v2_mv_niah_medium": Task("\n\nPlease ", (120, 40), 2600),
    "rp_v2_mv_niah_hard": Task("\n\nPlease ", (120, 40), 2600, less=(500, 500)),
    "rp_v2_qa_basic": Task("\n\nText: ", (40, 12), 1600),
    "rp_v2_qa_easy": Task("\n\nQuestion: ", (40, 12), 1400),
    "rp_v2_qa_medium": Task("\n\nPlease ", (40, 12), 2200),
    "rp_v2_qa_hard": Task("\n\nPlease ", (40, 12), 2200, less=(500, 500)),
    **{
        f"rp_oolong_{name}": Task(
            "\nAmong ", (70, 40), 2000, less=(40, 12), head=" count for nothing.\n"
        )
        for name in ("count", "topic", "compare", "user", "date")
    },
    **{
        f"rp_oolong_{name}_labelled": Task(
            "\nAmong ", (85, 45), 2000, less=(40, 12), head=" count for nothing.\n"
        )
        for name in ("count", "topic", "compare")
    },
    "rp_oolong_rolls": Task("\nIn this session, ", (70, 40), 2000),
    "rp_oolong_spells": Task("\nIn this session, ", (70, 40), 2000),
}
RULER2 = [name for name in TASKS if name.startswith("rp_v2_")]
OOLONG = [name for name in TASKS if "oolong" in name]
# Questions about one text may have the same answer, such as two kinds of things that are as many.
ALIKE = ["rp_count", *OOLONG]
SEVERAL = ["rp_vt", "rp_cwe", "rp_fwe"]  # the answer is all of the text: nothing to share or remove
each_task = pytest.mark.parametrize("name", TASKS)
each_control = pytest.mark.parametrize("name", sorted({*TASKS} - {*SEVERAL}))


def built(name, planted=True):
    """Return two texts' samples of a task, built once for all tests."""
    length = max(2048, TASKS[name].length)
    return rows(name, length=length, samples=6, per_text=3, planted=planted)


def brief(name):
    """Return samples of one text at the least length, as `manager` asks for them."""
    return rows(name, length=TASKS[name].length, samples=2, per_text=2)


def by_words(name, **changes):
    """Return the arguments of samples in words; recall needs a vocabulary."""
    kind = "tiny" if name == "rp_recall" else "words"
    return {"name": name, "tokenizer": kind, "length": 2048, "samples": 3, "per_text": 2, **changes}


def text_and_question(row):
    """Return a sample's text, and all that asks about it."""
    text, between, question = row["input"].rpartition(TASKS[row["task"]].question)
    if row["task"] == "rp_recall":
        return row["input"], row["gen_prefix"]
    assert between
    return text, (question, row["gen_prefix"])


def test_the_table_has_every_task():
    assert {tasks.question_of(name) for name in tasks.names()} == {*TASKS}


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("rp_hard", ["rp_nonliteral", "rp_count", "rp_json_kv", "rp_copy"]),
        ("rp_reasoning", [*TASKS][[*TASKS].index("rp_code") : [*TASKS].index(RULER2[0])]),
        ("rp_ruler2", RULER2),
        ("rp_oolong", OOLONG),
    ],
)
def test_groups_hold_their_tasks_both_ways(group, names):
    assert sorted(tasks.groups()[group]) == sorted(names)
    assert tasks.groups()[f"{group}_ll"] == [f"{name}_ll" for name in tasks.groups()[group]]


@pytest.mark.parametrize("ending", ["", "_ll"])
def test_a_group_has_the_13_tasks_of_ruler(ending):
    """The reference is lm-eval's group, in which two tasks have other names."""
    (folder,) = find_spec("lm_eval.tasks.ruler").submodule_search_locations
    theirs = yaml.safe_load((Path(folder) / "ruler.yaml").read_text())["task"]
    renamed = {"ruler_qa_squad": "qa_1", "ruler_qa_hotpot": "qa_2"}
    ours = [f"rp_{renamed.get(name, name.removeprefix('ruler_'))}{ending}" for name in theirs]
    assert sorted(tasks.groups()[f"rp_ruler{ending}"]) == sorted(ours)


@pytest.mark.parametrize("name", [*tasks.groups()["rp_reasoning"], *RULER2, *OOLONG])
def test_the_file_of_a_task_says_its_source(name):
    head = (tasks.FOLDER / f"{name}.yaml").read_text().split("\ninclude")[0]
    assert "arXiv:" in head or "https://" in head


def assert_filled(samples, kind):
    for row in samples:
        name, length = row["task"], row["length"]
        unit = TASKS[name].units[kind == "words"] + TASKS[name].less[kind == "words"]
        room = read_config(name)["generation_kwargs"]["max_gen_toks"]
        tokenizer = load(kind)
        used = len(tokenizer(f"{row['input']} {row['gen_prefix']}").input_ids) + room
        assert length - unit <= used <= length
        assert row["tokens"] == used
        target = tokenizer(f" {row['target']}", add_special_tokens=False).input_ids
        assert row["target_tokens"] == len(target) <= room


@each_task
def test_prompt_prefix_and_room_fill_the_length_to_a_unit(name):
    assert_filled(built(name), "tiny")
    assert_filled(brief(name), "tiny")
    if name not in SEVERAL:
        assert_filled(built(name, planted=False), "tiny")
    if name != "rp_recall":
        assert_filled(rows(**by_words(name)), "words")
    for length in TASKS[name].further:
        assert_filled(rows(name, length=length, samples=3, per_text=2), "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TASKS} - {"rp_cwe"}))  # which has further lengths above
def test_a_longer_length_is_filled_to_a_unit(name):
    length = 5000 if name == "rp_code_next" else 4096
    assert_filled(rows(name, length=length, samples=3, per_text=2), "tiny")


@each_task
def test_a_length_without_room_for_the_tasks_own_words_is_refused(name):
    with pytest.raises(ValueError, match=rf"16 tokens is too short for {name}:"):
        build_rows(name, length=16)


@each_task
def test_samples_depend_neither_on_their_number_nor_on_global_random_state(name):
    random.seed(8)
    state = random.getstate()
    some = build_rows(**by_words(name, samples=2))
    assert random.getstate() == state
    random.seed(7)
    assert build_rows(**by_words(name))[:2] == some
    other = build_rows(**by_words(name, samples=2, seed=1))
    assert {row["input"] for row in other}.isdisjoint(row["input"] for row in some)
    assert [row["text"] for row in some] == ([0, 1] if name in SEVERAL else [0, 0])


@each_control
def test_samples_of_one_text_differ_only_in_the_question(name):
    for planted in (True, False):
        samples = built(name, planted)
        assert [row["text"] for row in samples] == [0, 0, 0, 1, 1, 1]
        assert [row["depth"] for row in samples] in ([10, 50, 90] * 2, [None] * 6)
        texts, questions = zip(*map(text_and_question, samples), strict=True)
        if name not in ALIKE:
            assert len({row["target"] for row in samples[:3]}) == 3
        if TASKS[name].shares:
            assert len({*texts[:3]}) == len({*texts[3:]}) == 1
            assert len({*questions[:3]}) == 3
            pairs = zip(texts[0], texts[3], strict=False)
            assert len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) < 0.3 * len(texts[0])


# --- Controls -------------------------------------------------------------------------------------

# Texts long enough that answers would stand in them by chance, where one must look after that.
LONGER = {"rp_count": 4000, "rp_qa_1": 6000, "rp_qa_2": 6000, "rp_icl": 3000}
LONGER |= {"rp_mrcr_8": 3000, "rp_code_next": 4096}


def held(row):
    """Return the answers that a sample's text has as a word or a number of its own."""
    text, _ = text_and_question(row)
    text = text.partition(TASKS[row["task"]].head)[2] if TASKS[row["task"]].head else text
    answers = {*row["answers"], row["target"]}
    if "boxed" in row["target"]:  # every text has every letter: the question must be missing
        answers = {re.search(r"(Question \d+) from the context", row["input"][len(text) :])[1]}
    return [a for a in answers if re.search(rf"(?<!\w){re.escape(a.strip())}(?!\w)", text)]


@each_control
def test_no_control_holds_an_answer(name):
    """It asks the same question, of a text without its answer, not even by chance."""
    planted, control = built(name), built(name, planted=False)
    if name in LONGER:
        request = {"name": name, "length": LONGER[name], "samples": 2, "per_text": 2, "seed": 7}
        planted, control = rows(**request), rows(planted=False, **request)
    for row, without in zip(planted, control, strict=True):
        for same in ("id", "depth", "gen_prefix", "answers", "target", "text"):
            assert without[same] == row[same]
        assert text_and_question(without)[1] == text_and_question(row)[1]
        assert held(without) == []


@pytest.mark.parametrize(("name", "per_text"), [("rp_icl", 16), ("rp_latent_list", 9)])
def test_controls_of_many_questions_hold_no_answer(name, per_text):
    """Of 16 classes, all are asked for: labels are numbers that none of them has."""
    request = {"length": 3000, "samples": 2 * per_text, "per_text": per_text, "seed": 7}
    assert not any(map(held, rows(name, planted=False, **request)))


# Lines that tell nothing of the answer stay without the text: examples, and what nobody asks for.
STAY = {"rp_count", "rp_graph_bfs", "rp_icl", "rp_latent_list", "rp_niah_multikey_1"}
STAY |= {
    "rp_nonliteral",
    "rp_recall",
    *(f"rp_v2_mk_niah_{step}" for step in ("easy", "medium", "hard")),
}


@each_control
def test_a_closed_book_leaves_the_question_alone(name):
    """The same question and chance; what comes before it is one for all texts: the task's words."""
    request = {"length": max(2048, TASKS[name].length), "samples": 6, "per_text": 3}
    before = set()
    for row, closed in zip(built(name), rows(name, closed_book=True, **request), strict=True):
        assert {key for key in row if closed[key] != row[key]} == {"input", "tokens"}
        room = read_config(name)["generation_kwargs"]["max_gen_toks"]
        prompt = load("tiny")(f"{closed['input']} {closed['gen_prefix']}").input_ids
        assert closed["tokens"] == len(prompt) + room < row["tokens"]
        text, question = text_and_question(closed)
        assert question == text_and_question(row)[1]
        assert held(closed) == []
        before.add(text.partition(TASKS[name].head)[2] if TASKS[name].head else text)
    assert (len(before) > 1) == (name in STAY)


@pytest.mark.parametrize("control", [{"planted": False}, {"closed_book": True}])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_task_whose_answer_is_all_of_the_text_has_no_control(name, control):
    with pytest.raises(ValueError, match=f"{name} has no control"):
        build_rows(name, **control)


# --- Scores ---------------------------------------------------------------------------------------


@each_task
def test_the_reference_scores_one_and_answers_of_other_samples_do_not(name):
    docs = built(name)[:3]
    for doc in docs:
        for end in ("", "\n", "\n\nUser: more", "\n```"):
            if name != "rp_v2_mv_niah_medium" or "\n\n" not in end:  # its last paragraph counts
                assert score_of(name, doc, f" {doc['target']}{end}") == 1
        assert score_of(name, doc, "") == 0
        wrong = [other["target"] for other in docs if other["target"] != doc["target"]]
        if name != "rp_niah_multiquery":  # asks for the same values in another order
            assert all(score_of(name, doc, f" {target}") < 1 for target in wrong)


@each_task
def test_generation_that_stops_early_scores_as_all_of_it(name):
    """Right answers, and those of other samples, which are wrong."""
    config = tasks.config(name)
    docs = built(name)[: 6 if name in ALIKE else 3]
    rule, until = stop_rule(config["process_results"]), config["generation_kwargs"]["until"]
    ends = ("\n\nUser: and so on", ", and so on", "5 and so on", " and so on", "_and so on")
    stopped = set()
    for doc in docs:
        for whole in (f" {other['target']}{end}" for other in docs for end in ends):
            stops = (
                n for n in range(len(whole)) if rule(doc, settled_part(whole[:n], tuple(until)))
            )
            end = next(stops, len(whole))
            answers = [whole[:end], whole]
            for stop in until:
                answers = [text.split(stop)[0] for text in answers]
            scores = [score_of(name, doc, text) for text in answers]
            assert scores[0] == scores[1], answers
            if end < len(whole):
                stopped.add(scores[0] == 1)
    searched = name in {*tasks.groups()["rp_ruler"], "rp_nonliteral", "rp_json_kv", "rp_recall"}
    if name in RULER2:  # "Answer:" or another box may still come
        assert stopped == set()
    else:
        assert stopped >= ({True} if searched else {True, False})


# --- lm-eval --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model():
    return AutoModelForCausalLM.from_pretrained(TINY)


@cache
def manager(length):
    metadata = {"pretrained": str(TINY), "length": length, "samples": 2, "per_text": 2}
    return TaskManager(include_path=tasks.FOLDER, include_defaults=False, metadata=metadata)


@each_task
def test_plain_lm_eval_requests_the_built_samples(name):
    expected = brief(name)
    for ending in ("", "_ll"):
        task = manager(TASKS[name].length).load([name + ending])["tasks"][name + ending]
        assert list(task.test_docs()) == expected
        task.build_all_requests(rank=0, world_size=1)
        for instance, row in zip(task.instances, expected, strict=True):
            prompt, answer = instance.args
            assert prompt == f"{row['input']} {row['gen_prefix']}"
            if ending:
                assert answer == f" {row['target']}"
            else:
                assert answer.items() >= tasks.config(name)["generation_kwargs"].items()


@pytest.mark.parametrize("name", tasks.groups()["rp_choice"])
def test_plain_lm_eval_builds_the_same_choices(name):
    task = manager(1024).load([name])["tasks"][name]
    assert list(task.test_docs()) == rows(name, length=1024, samples=2, per_text=2)


def test_plain_lm_eval_runs_a_task_from_the_folder(tiny_model):
    lm = HFLM(pretrained=tiny_model, tokenizer=load("tiny"), max_length=512)
    task_dict = manager(512).load(["rp_niah_single_2"])["tasks"]
    results = evaluator.evaluate(lm, task_dict, bootstrap_iters=0, log_samples=True)
    # The tiny model knows no English, and lm-eval's own model reports no likelihood.
    assert results["results"]["rp_niah_single_2"]["score,none"] == 0
    assert len(results["samples"]["rp_niah_single_2"]) == 2
    for sample in results["samples"]["rp_niah_single_2"]:
        assert 512 - PROSE[0] <= sample["doc"]["tokens"] <= 512


@pytest.mark.parametrize(
    "name", ["rp_code", "rp_graph_bfs", "rp_graph_parents_ll", "rp_icl_mc", "rp_mrcr_2"]
)
def test_a_model_answers_and_chance_is_said(name, tiny_model):
    tokenizer = load("tiny")
    lm = LongContextLM(tiny_model, tokenizer, 1200, {})
    (task,) = lm_eval_tasks.build(name, tokenizer, [1200], 1, [50], per_text=1)
    (row,) = lm_eval_tasks.scores(lm_eval_tasks.evaluate(lm, [task]), lm.failures)
    assert not lm.failures
    assert 0 <= row["score"] <= 1
    assert row["log_likelihood"] < 0
    if "graph" in name and name.endswith("_ll"):  # nobody guesses all of a list
        assert row.get("chance") is None
    else:
        assert 0 < row["chance"] < 1
