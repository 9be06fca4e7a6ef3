"""Test training within an extension: what fits, what is left out, and runs to the end."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from extensions import LENGTH, TINY, extend_tiny, extend_until_killed, step_result
from safetensors.torch import load_file

import rope_patch
from rope_patch.extending import (
    Candidate,
    ExtendRequest,
    decide,
    measured_texts,
    plan_training,
    train,
    training_data,
)

QUICK = {"max_steps": "4", "gradient_accumulation_steps": "1", "learning_rate": "1e-3"}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Return a file of random documents, which teach nothing."""
    random = Random(0)
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    rows = [[random.randrange(10, 400) for _ in range(2000)] for _ in range(12)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def request_(documents, tmp_path):
    return ExtendRequest(
        model=TINY,
        to="2x",
        out=tmp_path,
        budget=100.0,
        train=True,
        data=(documents,),
        recipe=QUICK,
    )


def plan_within(request_, seconds):
    return plan_training(request_, Candidate("yarn"), 512, request_.out / "timing", seconds)


def test_steps_follow_from_timed_ones(request_):
    planned = plan_within(request_, 10_000)
    assert planned["mode"] == "all weights"
    assert planned["steps"] == 4  # the recipe's
    assert 0 < planned["step_seconds"] < 100
    assert not (request_.out / "timing").exists()
    unlimited = replace(
        request_, recipe={name: v for name, v in QUICK.items() if name != "max_steps"}
    )
    assert plan_within(unlimited, 1e6)["steps"] == 400


def test_a_budget_without_time_for_training_leaves_it_out(request_):
    planned = plan_within(request_, 0.001)
    assert set(planned) == {"left_out"}
    assert "so 0 steps fit into the 0 s that the budget leaves for it" in planned["left_out"]
    assert "4 are the fewest that are worth it" in planned["left_out"]


def test_lora_is_trained_where_all_weights_do_not_fit_and_nothing_where_neither_does(
    request_, monkeypatch
):
    def set_memory(size):
        monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(size)}.get)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    set_memory(10_000)
    left_out = plan_within(request_, 10_000)["left_out"]
    assert left_out.startswith("training: neither all weights nor LoRA fit into memory")
    assert "a step needs" in left_out
    set_memory(10.5e6)  # of which 8% stay free: all weights take 11.2 MB, LoRA takes 8.2
    planned = plan_within(request_, 10_000)
    assert planned["mode"] == "LoRA of rank 8"
    assert planned["changes"] == {"lora_rank": 8}


def test_novels_that_are_trained_on_are_not_measured_on(request_):
    own = replace(request_, data=())
    trained = {name.removeprefix("novels:") for name in training_data(own)}
    assert len(trained) >= 3
    assert not trained & set(measured_texts(own))
    assert training_data(request_) == request_.data
    assert measured_texts(request_) == ()
    assert measured_texts(replace(own, texts=("emma",))) == ("emma",)


def test_a_run_that_diverges_is_left_out(request_):
    """Set a limit below which no loss can stay, once five steps gave a mean."""
    wild = replace(
        request_, recipe=QUICK | {"max_steps": "8", "learning_rate": "10", "max_loss_rise": "0.001"}
    )
    training_plan = {"mode": "all weights", "changes": {}, "step_seconds": 1.0, "steps": 8}
    folder = request_.out / "training"
    done = train(wild, Candidate("yarn"), 512, folder, training_plan)
    assert done["left_out"].startswith("training: step ")
    assert "was not taken" in done["left_out"]


@pytest.fixture(scope="module")
def trained(documents, tmp_path_factory):
    """Extend and train with one variant of the weights; return the result and the folder."""
    finished = {}

    def run(**recipe):
        key = json.dumps(recipe)
        if key not in finished:
            out = tmp_path_factory.mktemp("trained") / "out"
            arguments = {"train": True, "data": [documents], "recipe": QUICK | recipe}
            finished[key] = extend_tiny(out, **arguments), out, arguments
        return finished[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{}, {"lora_rank": "4"}], ids=["full", "lora"])
def test_training_runs_to_the_end_and_is_compared(trained, recipe):
    result, out, _ = trained(**recipe)
    done = step_result(out, "train")
    label = f"{done['label']}, fine-tuned"
    report = json.loads((out / "work" / "report" / "report.json").read_text())
    assert label in [method["label"] for method in report["methods"]]
    assert done["steps"] == 4
    assert done["tokens"] == 4 * LENGTH
    assert result.outcome == "published"
    assert label in result.sentence
    # Random documents teach nothing, so the rotation alone is published.
    assert not step_result(out, "compare")["tuned"]
    weights, before = (
        load_file(folder / "model.safetensors")
        for folder in (out / "work/training/model", Path(TINY))
    )
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_trained_model_that_wins_is_published(trained, tmp_path, monkeypatch):
    _, whole, arguments = trained()
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for name in ("compare", "publish"):
        (out / "work" / f"{name}.json").unlink()

    def choose_trained(results, length, tuned_label):
        # Random documents cannot teach what would be shown to be better.
        return replace(decide(results, length, tuned_label), label=tuned_label)

    monkeypatch.setattr("rope_patch.extending.proof.decide", choose_trained)
    result = extend_tiny(out, **arguments)
    assert result.method.endswith(", fine-tuned")
    card = (result.folder / "README.md").read_text()
    assert "fine-tuned: all weights, 4 steps, 4,096 tokens" in card
    published = load_file(result.folder / "model.safetensors")
    own = load_file(out / "work" / "training" / "model" / "model.safetensors")
    assert all(torch.equal(published[name], own[name]) for name in own)
    assert rope_patch.current(rope_patch.load(result.folder)).length == LENGTH


@pytest.mark.slow
def test_training_that_is_killed_at_each_step_gives_the_same(trained, tmp_path):
    result, whole, arguments = trained()
    out = tmp_path / "out"
    for _ in range(7):  # with the plans of training and samples
        extend_until_killed(out, 1, **arguments)
    # The plan times steps, so only its number of steps is the same.
    continued = extend_tiny(out, **arguments)
    assert continued.method == result.method
    assert continued.sentence == result.sentence
    one, other = (
        load_file(each / "work" / "training" / "model" / "model.safetensors")
        for each in (out, whole)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
