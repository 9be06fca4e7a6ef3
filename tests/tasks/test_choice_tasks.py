"""Test choice tasks: their choices, lm-eval's requests and the scores."""

import random

import pytest
import torch
from helpers import built_tasks
from helpers.tokenizers import TINY, load
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from rope_patch import tasks
from rope_patch.evaluation import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks

NAMES = tasks.groups()["rp_choice"]
LENGTH = 1536


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    return load("tiny")


def rows(name, samples=4):
    return built_tasks.rows(name, length=LENGTH, samples=samples, per_text=4)


def build(name, length=LENGTH):
    (task,) = lm_eval_tasks.build(name, load("tiny"), [length], 4, [10, 50, 90], per_text=4)
    return task


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_answers_in_the_text_and_one_is_right(name):
    built, likelihood = rows(name), rows(name.replace("_mc", "_ll"))
    assert len(built) == 4
    for row, likelihood_row in zip(built, likelihood, strict=True):
        assert (row["input"], row["target"]) == (likelihood_row["input"], likelihood_row["target"])
        assert row["choices"][row["gold"]] == row["target"]
        assert len(set(row["choices"])) == len(row["choices"]) >= 4
        assert all(choice in row["input"] for choice in row["choices"])
    assert len({row["target"] for row in built}) == 4  # each question has a different answer


@pytest.mark.parametrize("name", NAMES)
def test_requests_for_choices_include_those_for_the_target(name):
    requests = []
    for task in (build(name), build(name.replace("_mc", "_ll"))):
        task.build_all_requests(rank=0, world_size=1)
        requests.append([instance.args for instance in task.instances])
    choices, targets = requests
    assert len(targets) == 4
    assert set(targets) <= set(choices)  # identical to the blank, so that stored answers serve both


def test_the_right_choice_is_equally_often_in_every_place():
    """The choices are sorted, and each answer of a text is right once."""
    golds = [row["gold"] for row in rows("rp_niah_multikey_1_mc", samples=40)]
    assert [golds.count(place) for place in range(4)] == [10, 10, 10, 10]


def test_a_single_question_a_text_is_refused():
    with pytest.raises(ValueError, match="per_text of at least 2"):
        built_tasks.build_rows("rp_json_kv_mc", per_text=1)


score_choice = tasks.config("rp_recall_mc")["process_results"]


@pytest.mark.parametrize(
    ("likelihoods", "priors", "score"),
    [
        ((-3.0, -1.0, -2.0), (-4.0, -4.0, -4.0), 1.0),
        ((-1.0, -3.0, -2.0), (-4.0, -4.0, -4.0), 0.0),
        ((-1.0, -1.0, -2.0), (-4.0, -4.0, -4.0), 0.0),  # a tie
        ((-1.0, -3.0, -2.0), (-1.5, -9.0, -4.0), 1.0),  # the text says so, though it is unusual
        ((-3.0, -1.0, -2.0), (-9.0, -1.0, -4.0), 0.0),  # it is as usual without the text
    ],
)
def test_the_choice_that_the_prompt_makes_likelier_scores(likelihoods, priors, score):
    results = [(log_likelihood, False) for log_likelihood in (*likelihoods, *priors)]
    scored = score_choice({"gold": 1, "choices": ["a", "b", "c"]}, results)
    assert scored == {"score": score, "target_log_likelihood": likelihoods[1]}


def test_a_model_that_prefers_short_choices_only_guesses():
    # Its log-likelihood is -1 a character, with some noise of the prompt, and no more.
    rng, scores, likeliest = random.Random(0), [], []
    for _ in range(2000):
        lengths = rng.sample(range(4, 40), 4)
        prior = [-float(length) for length in lengths]
        after = [value + rng.gauss(0, 0.5) for value in prior]
        for gold in range(4):  # each answer of a text is right once
            doc = {"gold": gold, "choices": lengths}
            results = [(value, False) for value in (*after, *prior)]
            scores.append(score_choice(doc, results)["score"])
            likeliest.append((max(after) == after[gold], min(lengths) == lengths[gold]))
    assert sum(scores) / len(scores) == 1 / 4  # of four gains, one is the greatest
    shortest = [score for score, (_, short) in zip(scores, likeliest, strict=True) if short]
    assert sum(shortest) / len(shortest) == pytest.approx(1 / 4, abs=0.03)
    # By plain likelihood the shortest would nearly always be chosen.
    chosen = [first for first, short in likeliest if short]
    assert sum(chosen) / len(chosen) > 0.95


def test_plain_lm_eval_scores_choices_alike(model, tokenizer):
    task = build("rp_recall_mc", length=160)
    ours = LongContextLM(model, tokenizer, LENGTH, {})
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=LENGTH)
    runs = [lm_eval_tasks.evaluate(lm, [task])["samples"] for lm in (ours, theirs)]
    ours_scores, theirs_scores = (
        [sample["score"] for sample in samples[task.config.task]] for samples in runs
    )
    assert ours_scores == theirs_scores
    docs = task.dataset["test"].to_list()
    for doc, score in zip(docs, ours_scores, strict=True):
        gains = [
            likelihood_of(model, tokenizer, f"{doc['input']} {doc['gen_prefix']}", f" {choice}")
            - likelihood_of(model, tokenizer, "", f" {choice}")
            for choice in doc["choices"]
        ]
        assert score == float(gains.index(max(gains)) == doc["gold"])


@torch.no_grad()
def likelihood_of(model, tokenizer, prompt, continuation):
    """Return a continuation's log-likelihood after a prompt, or after the end token alone."""
    start = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]
    ids = [*start, *tokenizer(continuation, add_special_tokens=False).input_ids]
    logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(logits[i - 1, ids[i]].item() for i in range(len(start), len(ids)))


def test_a_choice_task_reads_a_prompt_once_and_reports_likelihood_and_chance(model, tokenizer):
    answers = {}
    for name in ("rp_niah_multikey_1_mc", "rp_niah_multikey_1_ll"):
        lm, task = LongContextLM(model, tokenizer, LENGTH, {}), build(name)
        results = lm_eval_tasks.evaluate(lm, [task])
        scores = lm_eval_tasks.scores(results, lm.failures)
        answers[name] = [row["log_likelihood"] for row in scores]
        assert {row.get("chance") for row in scores} == {1 / 4 if name.endswith("_mc") else None}
        assert lm.computed_tokens < 2 * LENGTH  # of four prompts, and four choices each
        prompts = {instance.args[0] for instance in task.instances} - {""}
        assert lm.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in prompts)
    choice_likelihoods, target_likelihoods = answers.values()
    assert choice_likelihoods == pytest.approx(target_likelihoods, abs=1e-3)
