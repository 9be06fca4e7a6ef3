"""Test that damage, kills, full disks and bad losses cost only the steps since a checkpoint."""

import json
import logging
import os
import shutil
from random import Random

import pytest
import torch
import yaml
from helpers.small_disk import disk as disk
from training_runs import (
    ASSETS,
    BOTH,
    LENGTH,
    STEPS,
    VARIANTS,
    Child,
    Hang,
    Poison,
    copy_stopped_run,
    curve,
    equal_tensors,
    require_same,
    run,
    tensors,
)

from rope_patch.training import TrainingStopped, find_damage, latest_complete, resume_checkpoint

STARTED_FILES = {".lock", "identity.json", "log.jsonl", "recipe.yaml"}  # files of every run
POISON = 500  # a token of one document only
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


@pytest.mark.parametrize(("variant", "after"), [("plain", 1), ("distilled", 1), ("woven", 2)])
def test_resume_equals_uninterrupted(recipe, variant, after, reference_run, tmp_path):
    uninterrupted = reference_run(recipe, variant)
    folder = copy_stopped_run(uninterrupted, tmp_path / "run", after)
    run(recipe, folder, resume="auto", **VARIANTS[variant])
    require_same(folder, uninterrupted)


def test_the_written_recipe_is_that_of_the_run(recipe, reference_run, tmp_path):
    uninterrupted = reference_run(recipe, "distilled")
    config = uninterrupted / "recipe.yaml"
    assert yaml.safe_load(config.read_text())["packing"] == "masked"
    folder = copy_stopped_run(uninterrupted, tmp_path / "run", 2)
    run(recipe, folder, resume="auto", config=config)  # with another key it would be refused
    require_same(folder, uninterrupted)


def test_resume_restores_the_random_numbers(recipe, reference_run, tmp_path):
    model = tmp_path / "dropout"
    shutil.copytree(ASSETS / "tiny-llama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.2}))
    uninterrupted = reference_run(recipe, "dropout", model=model)
    assert curve(uninterrupted) != curve(reference_run(recipe))
    folder = copy_stopped_run(uninterrupted, tmp_path / "run", 1)
    run(recipe, folder, resume="auto", model=model)
    require_same(folder, uninterrupted)


def test_resume_restores_prefetched_rows(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", 2)
    run(recipe, folder, resume="auto", dataloader_num_workers=1)
    require_same(folder, reference_run(recipe))


def test_resume_from_a_path_ignores_later_checkpoints(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    run(recipe, folder, resume=folder / "checkpoint-1", save_steps=3, save_total_limit=1)
    require_same(folder, reference_run(recipe))
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-3"]


def test_resume_from_a_path_deletes_checkpoints_of_the_abandoned_continuation(
    recipe, reference_run, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe, "constant"), folder)
    options = {"resume": folder / "checkpoint-1", "max_steps": 2, **VARIANTS["constant"]}
    run(recipe, folder, save_total_limit=1, **options)
    assert latest_complete(folder) == folder / "checkpoint-2"
    assert [step for step, *_ in curve(folder)] == [1, 2]


def test_resume_of_a_finished_run_changes_nothing(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", STEPS)
    before = {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")}
    log = (folder / "log.jsonl").read_bytes()
    run(recipe, folder, resume="auto")
    require_same(folder, reference_run(recipe))
    assert (folder / "log.jsonl").read_bytes() == log
    assert {p: p.stat().st_mtime_ns for p in folder.glob("checkpoint-*/*")} == before


def test_resume_auto_without_checkpoints_starts_anew(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    run(recipe, folder, resume="auto", max_steps=1, lr_scheduler_type="constant")
    assert curve(folder) == curve(reference_run(recipe))[:1]
    assert equal_tensors(folder / "model", folder / "checkpoint-1")  # the weights of its step
    assert _finite(folder / "model")


def test_a_checkpoint_has_these_files(recipe, reference_run):
    names = {path.name for path in (reference_run(recipe) / "checkpoint-3").iterdir()}
    assert names == {*FILES[recipe], "whole.json"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    recipe, damage, reference_run, tmp_path, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    last, before = folder / "checkpoint-3", folder / "checkpoint-2"
    for name in FILES[recipe]:
        content = (last / name).read_bytes()
        DAMAGES[damage](last / name)
        caplog.clear()
        assert latest_complete(folder) == before, name
        (warning,) = _warnings(caplog)
        reason = {
            "truncated": f"has {len(content) // 2:,} bytes instead of {len(content):,}",
            "flipped": "is not what was written",
            "deleted": "is missing",
        }[damage]
        assert str(last) in warning
        assert f"{name} {reason}" in warning
        with pytest.raises(ValueError, match=rf"checkpoint-3 .*{name}.*--resume auto"):
            resume_checkpoint(folder, str(last))
        (last / name).write_bytes(content)
    assert latest_complete(folder) == last


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    shutil.rmtree(folder / "model")
    _flip(folder / "checkpoint-3" / "model.safetensors")
    run(recipe, folder, resume="auto")
    require_same(folder, reference_run(recipe))
    assert find_damage(folder / "checkpoint-3") is None


def test_a_damaged_checkpoint_does_not_count_towards_the_limit(recipe, reference_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe, "constant"), folder)
    shutil.rmtree(folder / "checkpoint-2")
    (folder / "checkpoint-3" / "rows.json").unlink()
    options = {"max_steps": 2, "save_total_limit": 1, **VARIANTS["constant"]}
    run(recipe, folder, resume="auto", **options)
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert latest_complete(folder) == folder / "checkpoint-2"


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_damaged_manifest_is_skipped_with_a_warning(
    recipe, manifest, reference_run, tmp_path, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run(recipe), folder)
    (folder / "checkpoint-3" / "whole.json").write_text(MANIFESTS[manifest])
    assert latest_complete(folder) == folder / "checkpoint-2"
    (warning,) = _warnings(caplog)
    assert "whole.json" in warning


def test_unusable_checkpoints_are_refused(recipe, reference_run):
    folder = reference_run(recipe)
    with pytest.raises(ValueError, match=r"checkpoint-3 .*--resume auto"):
        run(recipe, folder)
    for path in (folder, folder / "model", folder / "checkpoint-5"):
        with pytest.raises(ValueError, match=f"{path}: expected auto"):
            run(recipe, folder, resume=path)
    assert len(curve(folder)) == STEPS


def test_resume_with_other_packing_is_refused(recipe, reference_run, tmp_path):
    folder = copy_stopped_run(reference_run(recipe), tmp_path / "run", 2)
    with pytest.raises(ValueError, match=r"packing was single, got masked"):
        run(recipe, folder, resume="auto", packing="masked")


# Kills, full disks and bad losses.


@pytest.fixture
def rows(tmp_path):
    """Write documents of a row each; with `repetitive`, the first ones repeat four tokens."""

    def write(poisoned, repetitive=False):
        random = Random(0)
        path = tmp_path / "rows.jsonl"
        token_rows = [[random.randrange(10, 400) for _ in range(LENGTH)] for _ in range(40)]
        token_rows[poisoned][50] = POISON
        if repetitive:
            token_rows[:20] = [[20, 21, 22, 23] * (LENGTH // 4)] * 20
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in token_rows))
        return path

    return write


def _finite(folder):
    return all(torch.isfinite(tensor).all() for tensor in tensors(folder).values())


def _error(lines):
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert not any("Traceback" in line for line in lines)
    return line


@pytest.mark.parametrize(
    "variant",
    ["plain", pytest.param("woven", marks=pytest.mark.slow)],
)
def test_a_run_killed_during_a_step_resumes_exactly(recipe, variant, reference_run, tmp_path):
    folder = tmp_path / "run"
    log = folder / "log.jsonl"
    child = Child(recipe, folder, **VARIANTS[variant])
    child.kill_when(lambda: log.is_file() and len(log.read_text().splitlines()) >= 2)
    run(recipe, folder, resume="auto", **VARIANTS[variant])
    require_same(folder, reference_run(recipe, variant))


@pytest.mark.parametrize(
    "moment",
    [
        "weights",
        pytest.param("optimizer", marks=pytest.mark.slow),
        pytest.param("before the manifest", marks=pytest.mark.slow),
        "before the move",
        "old ones go",
    ],
)
def test_a_run_killed_while_writing_a_checkpoint_resumes_exactly(
    recipe, moment, reference_run, tmp_path
):
    folder, flag = tmp_path / "run", tmp_path / "flag"
    # checkpoint-2 is complete then, and checkpoint-1 half deleted
    is_deletion = moment == "old ones go"
    limit = 1 if is_deletion else 3
    trap = Hang(moment, "checkpoint-2", flag)
    Child(recipe, folder, trap, save_total_limit=limit).kill_when(flag.exists)
    damaged = {p.name for p in folder.glob("checkpoint-*") if find_damage(p)}
    assert damaged == ({"checkpoint-1"} if is_deletion else set())
    assert latest_complete(folder) == folder / f"checkpoint-{2 if is_deletion else 1}"
    run(recipe, folder, resume="auto", save_total_limit=limit)
    require_same(folder, reference_run(recipe))
    assert not (folder / ".writing").exists()
    names = {p.name for p in folder.glob("checkpoint-*")}
    assert names == {f"checkpoint-{step}" for step in ([3] if is_deletion else [1, 2, 3])}


@pytest.mark.parametrize(
    ("megabytes", "failed_step", "last_step"),
    [(3, 1, None), (5, 2, 1), pytest.param(6, 2, 1, marks=pytest.mark.slow)],
)
def test_a_full_disk_leaves_the_previous_checkpoint(
    recipe, megabytes, failed_step, last_step, disk, reference_run, tmp_path
):
    folder = disk(megabytes)
    code, lines = Child(recipe, folder).wait()
    assert code == 1
    line = _error(lines)
    assert f"checkpoint-{failed_step} could not be written to {folder}, where" in line
    assert "MB are free" in line
    advice = (
        "There is no whole checkpoint" if last_step is None else f"checkpoint-{last_step} is whole"
    )
    assert f"{advice}: make room, and start again with --resume auto" in line
    names = {path.name for path in folder.iterdir()} - STARTED_FILES
    assert names == (set() if last_step is None else {f"checkpoint-{last_step}"})
    disk(50)
    run(recipe, folder, resume="auto")
    require_same(folder, reference_run(recipe))


@pytest.mark.parametrize("method", ["yarn", "none"])
def test_a_full_disk_leaves_no_partial_model(recipe, method, disk):
    changes = {"save_strategy": "no", "method": method, "max_steps": 1}
    if method == "none":
        changes |= {"factor": None}
    folder = disk(1)
    code, lines = Child(recipe, folder, **changes).wait()
    assert code == 1
    assert f"the finished model could not be written to {folder}, where" in _error(lines)
    assert {path.name for path in folder.iterdir()} == STARTED_FILES


def test_a_nan_loss_stops_the_run(recipe, rows, tmp_path):
    data, folder = rows(poisoned=9), tmp_path / "run"  # a row of the third step
    uninterrupted = tmp_path / "whole"
    run(recipe, uninterrupted, data=data)
    code, lines = Child(recipe, folder, Poison(recipe, POISON), data=data).wait()
    assert code == 1
    line = _error(lines)
    assert "step 3 was not taken: the loss is nan" in line
    assert f"row 9 of {data}:10" in line
    assert f"{folder / 'checkpoint-2'} is whole" in line
    assert curve(folder) == curve(uninterrupted)[:2]
    assert latest_complete(folder) == folder / "checkpoint-2"
    assert equal_tensors(folder / "checkpoint-2", uninterrupted / "checkpoint-2")
    assert _finite(folder / "checkpoint-2")
    run(recipe, folder, data=data, resume="auto")  # without the NaN
    require_same(folder, uninterrupted)


def test_a_learning_rate_that_diverges_stops_the_run(recipe, tmp_path):
    with pytest.raises(TrainingStopped, match=r"step 2 was not taken: the .*checkpoint-1 is whole"):
        run(recipe, tmp_path, learning_rate=1e30)
    assert _finite(tmp_path / "checkpoint-1")
    assert len(curve(tmp_path)) == 1


def test_a_risen_loss_stops_the_run_again_after_resuming(recipe, rows, tmp_path):
    data = rows(poisoned=17, repetitive=True)
    options = {"data": data, "learning_rate": 1e-2, "max_loss_rise": 1}
    options |= {"max_steps": 6, "save_steps": 2}
    message = r"step 6 .*the loss rose to .* over the last 5 .*row 20 of .*jsonl:21;.*"
    with pytest.raises(TrainingStopped, match=message + "checkpoint-4 is whole"):
        run(recipe, tmp_path, **options)
    stopped_curve = curve(tmp_path)
    with pytest.raises(TrainingStopped, match=message):  # losses before the checkpoint count
        run(recipe, tmp_path, resume="auto", **options)
    assert curve(tmp_path) == stopped_curve
    run(recipe, tmp_path, resume="auto", **options | {"max_loss_rise": 100})
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]
