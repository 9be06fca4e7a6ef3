"""What all tasks of rp_reasoning have in common, and one run of each by a model."""

from functools import partial

import pytest
from helpers.tokenizers import TINY, load
from transformers import AutoModelForCausalLM

from rope_patch import tasks
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.question import Question
from rope_patch.tasks import settled

NAMES = tasks.groups()["rp_reasoning"]
LENGTH = 3072


def docs(name, **kwargs):
    build = tasks.config(name)["custom_dataset"]
    given = {"samples": 3, "length": LENGTH, "per_text": 3, **kwargs}
    return build(tokenizer=load("tiny"), **given)["test"].to_list()


def test_the_groups_hold_the_tasks_both_ways_and_every_task_says_its_source():
    assert tasks.groups()["rp_reasoning_ll"] == [f"{name}_ll" for name in NAMES]
    for name in NAMES:
        head = (tasks.FOLDER / f"{name}.yaml").read_text().split("\ninclude")[0]
        assert "arXiv:" in head or "https://" in head


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_scores_one_and_answers_of_other_samples_do_not(name):
    score = tasks.config(name)["process_results"]
    built = docs(name)
    for doc in built:
        for end in ("", "\n", "\n\nUser: more", "\n```"):
            assert score(doc, [f" {doc['target']}{end}"])["score"] == 1
        wrong = [other["target"] for other in built if other["target"] != doc["target"]]
        assert all(score(doc, [f" {target}"])["score"] < 1 for target in wrong)
        assert score(doc, [""])["score"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_generation_that_stops_early_scores_as_all_of_it(name):
    """Right answers, and those of other samples, which are wrong."""
    config, built = tasks.config(name), docs(name)
    score, until = config["process_results"], tuple(config["generation_kwargs"]["until"])
    ends = ("\n\nUser: and so on", ", and so on", "5 and so on", " and so on", "_and so on")
    stopped = set()
    for doc in built:
        rule = partial(settled.rule_of(score), doc)
        question = Question("", [], [], 0, until, rule)
        for whole in (f" {other['target']}{end}" for other in built for end in ends):
            stops = (n for n in range(len(whole)) if question.is_settled_by(whole[:n]))
            end = next(stops, len(whole))
            answers = [whole[:end], whole]
            for stop in until:
                answers = [text.split(stop)[0] for text in answers]
            scores = [score(doc, [text])["score"] for text in answers]
            assert scores[0] == scores[1], answers
            if end < len(whole):
                stopped.add(scores[0] == 1)
    assert stopped == {True, False}


def test_a_model_runs_every_task_both_ways_and_chance_is_said():
    tokenizer, model = load("tiny"), AutoModelForCausalLM.from_pretrained(TINY)
    for name in [*NAMES, "rp_graph_bfs_ll", "rp_mrcr_2_ll", "rp_icl_mc"]:
        length = LENGTH if "mrcr" in name else LENGTH // 2
        lm = LongContextLM(model, tokenizer, length, {})
        built = lm_eval_tasks.build(name, tokenizer, [length], 1, [50], per_text=1)
        rows = lm_eval_tasks.scores(lm_eval_tasks.evaluate(lm, built), lm.failures)
        assert len(rows) == 1
        assert lm.failures == {}
        assert all(0 <= row["score"] <= 1 for row in rows)
        assert all(row["log_likelihood"] < 0 for row in rows)
        assert all(0 < row.get("chance", 0.1) < 1 for row in rows)
        if "mrcr" in name or "icl" in name or "code" in name or name == "rp_graph_bfs":
            assert all("chance" in row for row in rows)
