"""Test recipes with stages: each goes on from the weights before, and a kill changes no bit."""

import json
import shutil

import pytest
import torch
import yaml
from training_runs import (
    RECIPES,
    TINY,
    Child,
    curve,
    documents,
    equal_tensors,
    run,
)

import rope_patch
from rope_patch.training import checkpoints

TRAINED = 256  # tokens; of tiny-llama
# YaRN in both stages, as DeepSeek-V3, but at another factor, rate, row length and batch.
STAGES = [
    {"factor": 2, "max_steps": 2},
    {"factor": 4, "max_steps": 3, "learning_rate": 5e-4, "train_length": 320, "save_steps": 1},
]
SHORT = {"gradient_accumulation_steps": 1}
LORA = {"lora_rank": 4, "lora_trains": ["norms", "embeddings"]}

both = pytest.mark.parametrize("recipe", RECIPES)


def recipe_file(folder, stages=STAGES, **changes):
    """Write a recipe with stages; return its file."""
    keys = TINY | {"data": str(documents(folder)), "model": str(TINY["model"])} | SHORT | changes
    for key in ("factor", "max_steps"):
        if all(isinstance(stage, dict) and key in stage for stage in stages or [{}]):
            del keys[key]
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({**keys, "stages": stages}))
    return path


def run_stages(recipe, folder, stages=STAGES, resume="no", **changes):
    config = recipe_file(folder.parent, stages, **changes)
    return run(recipe, folder, config=config, resume=resume)


def require_same(folder, reference):
    """Fail unless two runs of two stages have the same losses, norms and finished weights."""
    for stage in ("stage-1", "stage-2"):
        assert curve(folder / stage) == curve(reference / stage)
        assert equal_tensors(folder / stage / "model", reference / stage / "model")
    assert equal_tensors(folder / "model", reference / "model")


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Run two stages without interruption, once a recipe and kind; return their folder."""
    folders = {}

    def run_once(recipe, **changes):
        key = (recipe, *changes)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{recipe}-stages") / "run"
            run_stages(recipe, folders[key], **changes)
        return folders[key]

    return run_once


def stopped_copy(reference, folder, stage, after):
    """Copy a run as if it was killed in a stage, some steps after a checkpoint."""
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "model")
    for later in range(stage + 1, 3):
        shutil.rmtree(folder / f"stage-{later}")
    stopped = folder / f"stage-{stage}"
    shutil.rmtree(stopped / "model")
    (stopped / "finished.json").unlink()
    for checkpoint in stopped.glob("checkpoint-*"):
        if checkpoints.step_of(checkpoint) > after:
            shutil.rmtree(checkpoint)
    return folder


@both
def test_two_stages_equal_two_runs_by_hand(recipe, staged, tmp_path):
    folder = staged(recipe)
    data = {"data": documents(folder.parent), **SHORT}
    first = run(recipe, tmp_path / "first", **data, **STAGES[0])
    run(recipe, tmp_path / "second", model=first, **data, **STAGES[1])
    for stage, by_hand in (("stage-1", "first"), ("stage-2", "second")):
        assert curve(folder / stage) == curve(tmp_path / by_hand)
        assert equal_tensors(folder / stage / "model", tmp_path / by_hand / "model")
    assert equal_tensors(folder / "model", tmp_path / "second" / "model")


def test_the_rotation_is_that_of_the_original_model_extended_once(staged):
    folder = staged("finetune")
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 4
    assert config["rope_parameters"]["original_max_position_embeddings"] == TRAINED
    assert config["max_position_embeddings"] == 4 * TRAINED
    plain = rope_patch.load(TINY["model"], "yarn", factor=4)
    for model in (rope_patch.load(folder / "model"), rope_patch.load(folder / "stage-2" / "model")):
        assert rope_patch.current(model).trained_length == TRAINED
        ours, expected = (
            rope_patch.current(m).frequencies_at(TRAINED)[None] for m in (model, plain)
        )
        assert torch.equal(ours.inv_freq, expected.inv_freq)
        assert ours.attention_factor == expected.attention_factor


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"method": "dynamic-yarn"}, {"method": "yarn", "factor": 2}, "yarn"),
        ({"method": "linear", "factor": 2}, {"method": "abf", "factor": 4}, "default"),
    ],
)
def test_methods_of_stages_replace_one_another(first, second, expected, tmp_path):
    steps = {"max_steps": 1, "train_length": 128}
    stages = [first | steps, second | steps]
    model = run_stages("finetune", tmp_path / "run", stages, factor=None, save_strategy="no")
    parameters = json.loads((model / "config.json").read_text())["rope_parameters"]
    assert parameters["rope_type"] == expected
    original = json.loads((model / "rope_patch.json").read_text())["original"]
    assert original["rope_parameters"]["rope_type"] == "default"
    assert original["max_position_embeddings"] == TRAINED


@both
@pytest.mark.parametrize(("stage", "after"), [(1, 0), (2, 0), (2, 1)])
def test_a_run_stopped_in_a_stage_resumes_there(recipe, stage, after, staged, tmp_path):
    folder = stopped_copy(staged(recipe), tmp_path / "run", stage, after)
    first = folder / "stage-1" / "model" / "model.safetensors"
    written = first.stat().st_mtime_ns if stage == 2 else None
    run_stages(recipe, folder, resume="auto", data=str(documents(staged(recipe).parent)))
    require_same(folder, staged(recipe))
    if stage == 2:
        assert first.stat().st_mtime_ns == written


@both
def test_a_killed_run_resumes_in_its_stage(recipe, staged, tmp_path):
    folder = tmp_path / "run"
    config = recipe_file(tmp_path, data=str(documents(staged(recipe).parent)))
    child = Child(recipe, folder, config=config)
    child.kill_when((folder / "stage-2" / "checkpoint-1").exists)
    assert not (folder / "stage-2" / "model").exists()
    run(recipe, folder, config=config, resume="auto")
    require_same(folder, staged(recipe))
