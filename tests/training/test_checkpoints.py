"""A run that goes on from a checkpoint is the run that was never interrupted."""

import json
import logging
import os
import shutil

import pytest
import torch
import yaml
from training_runs import (
    ASSETS,
    RECIPES,
    STEPS,
    VARIANTS,
    Child,
    curve,
    equal_tensors,
    require_same,
    run,
    stopped,
    tensors,
)
from training_runs import truth as truth

from rope_patch.training import checkpoints

CONSTANT = {"lr_scheduler_type": "constant"}  # whose rates do not follow from the steps
DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: _flip(path),
    "deleted": lambda path: path.unlink(),
}
FILES = {
    "finetune": [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "rows.json",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    ],
    "loop": [
        "custom_checkpoint_0.pkl",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "rows.json",
    ],
}
MANIFESTS = {
    "half": '{"model.saf',
    "empty": "",
    "a list": "[]",
    "none": "{}",
    "odd": '{"a":1}',
    "deep": "[" * 200_000,
}

pytestmark = pytest.mark.parametrize("recipe", RECIPES)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _said(caplog):
    ours = [record for record in caplog.records if record.name == "rope_patch"]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("variant", "after"), [("plain", 2), ("lora", 4), ("packed", 2)])
def test_resume_equals_uninterrupted(recipe, variant, after, truth, tmp_path):
    whole = truth(recipe, variant)
    folder = stopped(whole, tmp_path / "run", after)
    run(recipe, folder, resume="auto", **VARIANTS[variant])
    require_same(folder, whole)


def test_random_numbers_go_on(recipe, truth, tmp_path):
    model = tmp_path / "dropout"
    shutil.copytree(ASSETS / "tiny-llama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    whole = truth(recipe, "dropout", model=model)
    assert curve(whole) != curve(truth(recipe))
    folder = stopped(whole, tmp_path / "run", 2)
    run(recipe, folder, resume="auto", model=model)
    require_same(folder, whole)


def test_rows_read_ahead_go_on(recipe, truth, tmp_path):
    folder = stopped(truth(recipe), tmp_path / "run", 4)
    run(recipe, folder, resume="auto", dataloader_num_workers=1)
    require_same(folder, truth(recipe))


def test_resume_from_a_path_leaves_later_ones(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe), folder)
    run(recipe, folder, resume=folder / "checkpoint-2", save_steps=3, save_total_limit=1)
    require_same(folder, truth(recipe))
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-6"]


def test_checkpoint_of_a_left_course_is_not_gone_on_from(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe, "constant", **CONSTANT), folder)
    other = {"resume": folder / "checkpoint-2", "max_steps": 3, **CONSTANT}
    run(recipe, folder, save_total_limit=1, **other)
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-3"
    assert [step for step, *_ in curve(folder)] == [1, 2, 3]


def test_resume_of_a_finished_run_changes_nothing(recipe, truth, tmp_path):
    folder = stopped(truth(recipe), tmp_path / "run", STEPS)
    before = {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")}
    log = (folder / "log.jsonl").read_bytes()
    run(recipe, folder, resume="auto")
    require_same(folder, truth(recipe))
    assert (folder / "log.jsonl").read_bytes() == log
    assert {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")} == before


def test_resume_auto_without_checkpoints_starts(recipe, truth, tmp_path):
    run(recipe, tmp_path / "run", resume="auto", max_steps=1, lr_scheduler_type="constant")
    assert curve(tmp_path / "run") == curve(truth(recipe))[:1]


def test_written_recipe_runs_to_the_same_curve(recipe, truth, tmp_path):
    whole = truth(recipe, "packed")
    written = yaml.safe_load((whole / "recipe.yaml").read_text())
    assert written["packing"] == "masked"
    child = Child(recipe, tmp_path / "run", config=whole / "recipe.yaml")
    assert child.ended()[0] == 0
    require_same(tmp_path / "run", whole)


def test_these_are_a_checkpoints_files(recipe, truth):
    there = {path.name for path in (truth(recipe) / "checkpoint-6").iterdir()}
    assert there == {*FILES[recipe], checkpoints.MANIFEST}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over(recipe, damage, truth, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe), folder)
    last, before = folder / "checkpoint-6", folder / "checkpoint-4"
    for name in FILES[recipe]:
        content = (last / name).read_bytes()
        DAMAGES[damage](last / name)
        caplog.clear()
        assert checkpoints.latest_complete(folder) == before, name
        (said,) = _said(caplog)
        reason = {
            "truncated": f"has {len(content) // 2:,} bytes instead of {len(content):,}",
            "flipped": "is not what was written",
            "deleted": "is missing",
        }[damage]
        assert str(last) in said
        assert f"{name} {reason}" in said
        with pytest.raises(ValueError, match=rf"checkpoint-6 is not whole: {name}.*--resume auto"):
            checkpoints.resume_checkpoint(folder, str(last))
        (last / name).write_bytes(content)
    assert checkpoints.latest_complete(folder) == last


def test_run_goes_on_from_before_a_damaged_one(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe), folder)
    shutil.rmtree(folder / "model")
    _flip(folder / "checkpoint-6" / "model.safetensors")
    run(recipe, folder, resume="auto")
    require_same(folder, truth(recipe))
    assert checkpoints.find_damage(folder / "checkpoint-6") is None


def test_damaged_later_one_does_not_push_out_whole_ones(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe, "constant", **CONSTANT), folder)
    (folder / "checkpoint-6" / "rows.json").unlink()
    run(recipe, folder, resume="auto", max_steps=5, save_total_limit=1, **CONSTANT)
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-5"]
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-5"


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_damaged_manifest_is_passed_over(recipe, manifest, truth, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(truth(recipe), folder)
    (folder / "checkpoint-6" / checkpoints.MANIFEST).write_text(MANIFESTS[manifest])
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-4"
    (said,) = _said(caplog)
    assert checkpoints.MANIFEST in said


def test_unwanted_checkpoints_are_refused(recipe, truth):
    folder = truth(recipe)
    with pytest.raises(ValueError, match=r"checkpoint-6 of an earlier run: expected --resume auto"):
        run(recipe, folder)
    for wrong in (folder, folder / "model", folder / "checkpoint-5"):
        with pytest.raises(ValueError, match=r"no checkpoint .*: expected auto, no, or a folder"):
            run(recipe, folder, resume=wrong)
    assert len(curve(folder)) == STEPS


def test_other_data_is_refused(recipe, truth, tmp_path):
    folder = stopped(truth(recipe), tmp_path / "run", 4)
    with pytest.raises(ValueError, match=r"cannot resume .*: packing was single, got masked"):
        run(recipe, folder, resume="auto", packing="masked")


def test_checkpoint_holds_the_weights_of_its_step(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    run(recipe, folder, lr_scheduler_type="constant", max_steps=2)
    assert equal_tensors(folder / "model", folder / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in tensors(folder / "model").values())
