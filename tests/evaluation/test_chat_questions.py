"""Test evaluations of a model whose tokenizer has a chat template."""

import copy
import json
import shlex
import shutil

import pytest
import torch
from helpers.evaluations import TINY, request
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation import vllm_commands
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.merging import add_other_weights
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.tasks import chat_template

TEMPLATE = (
    "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)
LENGTH = 320


@pytest.fixture(scope="module")
def instruct_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instruct") / "tiny-instruct"
    shutil.copytree(TINY, folder)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def recall_request(folder, model, **changes):
    return request(
        folder,
        model=model,
        methods=("none",),
        factor=None,
        lengths=(LENGTH,),
        tasks=("rp_recall_ll", "perplexity"),
        **changes,
    )


def test_questions_stand_in_the_template_and_nothing_else_does(instruct_folder, tmp_path, caplog):
    caplog.set_level("INFO", "rope_patch")
    runs = {
        choice: evaluate(recall_request(tmp_path / choice, instruct_folder, chat_template=choice))
        for choice in ("auto", "off")
    }
    assert "questions stand in the tokenizer's chat template" in caplog.text
    tokenizer = AutoTokenizer.from_pretrained(instruct_folder)
    model = AutoModelForCausalLM.from_pretrained(instruct_folder)
    assert runs["auto"]["run"]["chat_template"] == chat_template.fingerprint(tokenizer)
    assert runs["off"]["run"]["chat_template"] is None
    assert runs["auto"]["perplexity"] == runs["off"]["perplexity"]
    (task,) = lm_eval_tasks.build(
        "rp_recall_ll", tokenizer, [LENGTH], 2, [20, 80], seed=42, per_text=2, chat=True
    )
    rows = runs["auto"]["retrieval"][0]["samples"]["none"]
    for doc, row in zip(task.dataset["test"], rows, strict=True):
        assert row["id"] == doc["id"]
        text = f"(user) {doc['input']}\n(assistant) {doc['gen_prefix']}"
        prompt = tokenizer(text).input_ids
        both = tokenizer(f"{text} {doc['target']}").input_ids
        assert len(prompt) < LENGTH
        with torch.no_grad():
            scores = model(torch.tensor([both])).logits[0].log_softmax(-1)
        total = sum(scores[i - 1, both[i]].item() for i in range(len(prompt), len(both)))
        assert row["log_likelihood"] == pytest.approx(total, abs=1e-3)
    plain_rows = runs["off"]["retrieval"][0]["samples"]["none"]
    assert [row["log_likelihood"] for row in rows] != [row["log_likelihood"] for row in plain_rows]


def test_a_model_without_a_template_is_asked_in_plain_text_or_refused(tmp_path, caplog):
    caplog.set_level("INFO", "rope_patch")
    result = evaluate(recall_request(tmp_path / "out", TINY))
    assert result["run"]["chat_template"] is None
    assert "chat template" not in caplog.text
    with pytest.raises(ValueError, match="give --chat-template off"):
        evaluate(recall_request(tmp_path / "out", TINY, chat_template="on"))


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_commands_for_vllm_apply_the_template(instruct_folder, tmp_path, choice):
    asked = recall_request(tmp_path, instruct_folder, chat_template=choice)
    (line,) = (line for line in vllm_commands.commands("vllm", asked) if not line.startswith("#"))
    words = shlex.split(line)
    assert ("--apply_chat_template" in words) == (choice != "off")
    metadata = json.loads(words[words.index("--metadata") + 1])
    assert metadata["chat"] == (choice != "off")


def test_questions_of_other_prompts_are_not_paired(instruct_folder, tmp_path):
    run = evaluate(recall_request(tmp_path, instruct_folder))
    rows = run["retrieval"][0]["samples"]["none"]
    assert len({row["prompt"] for row in rows}) == len(rows)
    other = copy.deepcopy(run)
    labels = {"none": "trained"}
    both = add_other_weights(run, other, labels)
    assert set(both["retrieval"][0]["samples"]) == {"none", "trained"}
    other["retrieval"][0]["samples"]["none"][0]["prompt"] = "0" * 64
    with pytest.raises(ValueError, match=r"differ in prompts .*a chat template with a clock"):
        add_other_weights(run, other, labels)
    for results in (run, other):
        for row in results["retrieval"][0]["samples"]["none"]:
            del row["prompt"]  # as an older version left it out
    with pytest.raises(ValueError, match="results of an older version in a chat template"):
        add_other_weights(run, other, labels)
    for results in (run, other):
        results["run"]["chat_template"] = None
    assert add_other_weights(run, other, labels)


def test_a_finished_run_is_not_measured_again_on_another_day(instruct_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(instruct_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # A clock of microseconds: each rendering would be another prompt.
    tokenizer.chat_template = "{{ strftime_now('%f') }}" + TEMPLATE
    tokenizer.save_pretrained(folder)
    runs = [evaluate(recall_request(tmp_path / "out", str(folder))) for _ in range(2)]
    assert [run["run"]["continued"] for run in runs] == [False, True]
    assert runs[0]["retrieval"] == runs[1]["retrieval"]
