"""Test that resumed runs equal uninterrupted ones, and that damaged checkpoints are skipped."""

import json
import logging
import os
import shutil

import pytest
import torch
import yaml
from training_runs import (
    ASSETS,
    BOTH,
    STEPS,
    VARIANTS,
    Child,
    copy_stopped_run,
    curve,
    equal_tensors,
    require_same,
    run,
    tensors,
)

from rope_patch.training import checkpoints

CONSTANT = {"lr_scheduler_type": "constant"}  # rates that do not depend on max_steps
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

pytestmark = pytest.mark.parametrize("recipe", BOTH)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _warnings(caplog):
    ours = [record for record in caplog.records if record.name == "rope_patch"]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("variant", "after"),
    [("plain", 2), ("lora", 4), ("packed", 2), ("best_fit", 4), ("woven", 4), ("distilled", 2)],
)
def test_resume_equals_uninterrupted(recipe, variant, after, reference_run, tmp_path):
    uninterrupted = reference_run(recipe, variant)
    folder = copy_stopped_run(uninterrupted, tmp_path / "run", after)
    run(recipe, folder, resume="auto", **VARIANTS[variant])
    require_same(folder, uninterrupted)


def test_resume_restores_the_random_numbers(recipe, reference_run, tmp_path):
    model = tmp_path / "dropout"
    shutil.copytree(ASSETS / "tiny-llama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    uninterrupted = reference_run(recipe, "dropout", model=model)
    assert curve(uninterrupted) != curve(reference_run(recipe))
    folder = copy_stopped_run(uninterrupted, tmp_path / "run", 2)
    run(recipe, folder, resume="auto", model=model)
    require_same(folder, uninterrupted)


def test_resume_restores_prefetched_rows(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", 4)
    run(recipe, folder, resume="auto", dataloader_num_workers=1)
    require_same(folder, reference_run(recipe))


def test_resume_from_a_path_ignores_later_checkpoints(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    run(recipe, folder, resume=folder / "checkpoint-2", save_steps=3, save_total_limit=1)
    require_same(folder, reference_run(recipe))
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-6"]


def test_resume_from_a_path_deletes_checkpoints_of_the_abandoned_continuation(
    recipe, reference_run, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe, "constant", **CONSTANT), folder)
    options = {"resume": folder / "checkpoint-2", "max_steps": 3, **CONSTANT}
    run(recipe, folder, save_total_limit=1, **options)
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-3"
    assert [step for step, *_ in curve(folder)] == [1, 2, 3]


def test_resume_of_a_finished_run_changes_nothing(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", STEPS)
    before = {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")}
    log = (folder / "log.jsonl").read_bytes()
    run(recipe, folder, resume="auto")
    require_same(folder, reference_run(recipe))
    assert (folder / "log.jsonl").read_bytes() == log
    assert {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")} == before


def test_resume_auto_without_checkpoints_starts_anew(recipe, reference_run, tmp_path):
    run(recipe, tmp_path / "run", resume="auto", max_steps=1, lr_scheduler_type="constant")
    assert curve(tmp_path / "run") == curve(reference_run(recipe))[:1]


def test_written_recipe_runs_to_the_same_curve(recipe, reference_run, tmp_path):
    uninterrupted = reference_run(recipe, "packed")
    recipe_keys = yaml.safe_load((uninterrupted / "recipe.yaml").read_text())
    assert recipe_keys["packing"] == "masked"
    child = Child(recipe, tmp_path / "run", config=uninterrupted / "recipe.yaml")
    assert child.wait()[0] == 0
    require_same(tmp_path / "run", uninterrupted)


def test_a_checkpoint_has_these_files(recipe, reference_run):
    names = {path.name for path in (reference_run(recipe) / "checkpoint-6").iterdir()}
    assert names == {*FILES[recipe], checkpoints.MANIFEST}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    recipe, damage, reference_run, tmp_path, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    last, before = folder / "checkpoint-6", folder / "checkpoint-4"
    for name in FILES[recipe]:
        content = (last / name).read_bytes()
        DAMAGES[damage](last / name)
        caplog.clear()
        assert checkpoints.latest_complete(folder) == before, name
        (warning,) = _warnings(caplog)
        reason = {
            "truncated": f"has {len(content) // 2:,} bytes instead of {len(content):,}",
            "flipped": "is not what was written",
            "deleted": "is missing",
        }[damage]
        assert str(last) in warning
        assert f"{name} {reason}" in warning
        with pytest.raises(ValueError, match=rf"checkpoint-6 is not whole: {name}.*--resume auto"):
            checkpoints.resume_checkpoint(folder, str(last))
        (last / name).write_bytes(content)
    assert checkpoints.latest_complete(folder) == last


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    shutil.rmtree(folder / "model")
    _flip(folder / "checkpoint-6" / "model.safetensors")
    run(recipe, folder, resume="auto")
    require_same(folder, reference_run(recipe))
    assert checkpoints.find_damage(folder / "checkpoint-6") is None


def test_a_damaged_checkpoint_does_not_count_towards_the_limit(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe, "constant", **CONSTANT), folder)
    (folder / "checkpoint-6" / "rows.json").unlink()
    run(recipe, folder, resume="auto", max_steps=5, save_total_limit=1, **CONSTANT)
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-5"]
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-5"


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_damaged_manifest_is_skipped_with_a_warning(
    recipe, manifest, reference_run, tmp_path, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    (folder / "checkpoint-6" / checkpoints.MANIFEST).write_text(MANIFESTS[manifest])
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-4"
    (warning,) = _warnings(caplog)
    assert checkpoints.MANIFEST in warning


def test_unusable_checkpoints_are_refused(recipe, reference_run):
    folder = reference_run(recipe)
    with pytest.raises(ValueError, match=r"checkpoint-6 of an earlier run: expected --resume auto"):
        run(recipe, folder)
    for path in (folder, folder / "model", folder / "checkpoint-5"):
        with pytest.raises(ValueError, match=r"no checkpoint .*: expected auto, no, or a folder"):
            run(recipe, folder, resume=path)
    assert len(curve(folder)) == STEPS


def test_resume_with_other_packing_is_refused(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", 4)
    with pytest.raises(ValueError, match=r"cannot resume .*: packing was single, got masked"):
        run(recipe, folder, resume="auto", packing="masked")


def test_checkpoint_holds_the_weights_of_its_step(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    run(recipe, folder, lr_scheduler_type="constant", max_steps=2)
    assert equal_tensors(folder / "model", folder / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in tensors(folder / "model").values())
