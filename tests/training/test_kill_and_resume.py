"""Test that kills, full disks and bad losses cost only the steps since the last checkpoint."""

import json
from random import Random

import pytest
import torch
from helpers.small_disk import disk as disk
from training_runs import (
    BOTH,
    VARIANTS,
    Child,
    Hang,
    Poison,
    curve,
    equal_tensors,
    require_same,
    run,
    tensors,
)

from rope_patch.training import checkpoints
from rope_patch.training.monitor import TrainingStopped

STARTED_FILES = {".lock", "identity.json", "log.jsonl", "recipe.yaml"}  # files of every run
POISON = 500  # a token of one document only
ROW = 17  # the index of that document and of its row, which is in step 5

pytestmark = pytest.mark.parametrize("recipe", BOTH)


@pytest.fixture
def rows(tmp_path):
    """Write documents of a row each; with `repetitive`, the first ones repeat four tokens."""

    def write(repetitive=False):
        random = Random(0)
        path = tmp_path / "rows.jsonl"
        token_rows = [[random.randrange(10, 400) for _ in range(256)] for _ in range(40)]
        token_rows[ROW][100] = POISON
        if repetitive:
            token_rows[:20] = [[20, 21, 22, 23] * 64] * 20
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
    ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("best_fit", "woven"))],
)
def test_a_run_killed_during_a_step_resumes_exactly(recipe, variant, reference_run, tmp_path):
    folder = tmp_path / "run"
    log = folder / "log.jsonl"
    child = Child(recipe, folder, **VARIANTS[variant])
    child.kill_when(lambda: log.is_file() and len(log.read_text().splitlines()) >= 3)
    run(recipe, folder, resume="auto", **VARIANTS[variant])
    require_same(folder, reference_run(recipe, variant))


@pytest.mark.parametrize("moment", Hang.MOMENTS)
def test_a_run_killed_while_writing_a_checkpoint_resumes_exactly(
    recipe, moment, reference_run, tmp_path
):
    folder, flag = tmp_path / "run", tmp_path / "flag"
    is_deletion = (
        moment == "old ones go"
    )  # checkpoint-4 is complete then, and checkpoint-2 half deleted
    limit = 1 if is_deletion else 3
    trap = Hang(moment, "checkpoint-4", flag)
    Child(recipe, folder, trap, save_total_limit=limit).kill_when(flag.exists)
    damaged = {p.name for p in folder.glob("checkpoint-*") if checkpoints.find_damage(p)}
    assert damaged == ({"checkpoint-2"} if is_deletion else set())
    assert checkpoints.latest_complete(folder) == folder / f"checkpoint-{4 if is_deletion else 2}"
    run(recipe, folder, resume="auto", save_total_limit=limit)
    require_same(folder, reference_run(recipe))
    assert not (folder / ".writing").exists()
    names = {p.name for p in folder.glob("checkpoint-*")}
    assert names == {f"checkpoint-{step}" for step in ([6] if is_deletion else [2, 4, 6])}


@pytest.mark.parametrize(
    ("megabytes", "failed_step", "last_step"),
    [(3, 2, None), (5, 4, 2), pytest.param(6, 4, 2, marks=pytest.mark.slow)],
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
    data, folder = rows(), tmp_path / "run"
    uninterrupted = tmp_path / "whole"
    run(recipe, uninterrupted, data=data)
    code, lines = Child(recipe, folder, Poison(recipe, POISON), data=data).wait()
    assert code == 1
    line = _error(lines)
    assert "step 5 was not taken: the loss is nan" in line
    assert f"row {ROW} of {data}:{ROW + 1}" in line
    assert f"{folder / 'checkpoint-4'} is whole" in line
    assert curve(folder) == curve(uninterrupted)[:4]
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-4"
    assert equal_tensors(folder / "checkpoint-4", uninterrupted / "checkpoint-4")
    assert _finite(folder / "checkpoint-4")
    run(recipe, folder, data=data, resume="auto")  # without the NaN
    require_same(folder, uninterrupted)


def test_a_learning_rate_that_diverges_stops_the_run(recipe, tmp_path):
    with pytest.raises(TrainingStopped, match=r"step 2 was not taken: the .*checkpoint-1 is whole"):
        run(recipe, tmp_path, learning_rate=1e30, save_steps=1)
    assert _finite(tmp_path / "checkpoint-1")
    assert len(curve(tmp_path)) == 1


def test_a_risen_loss_stops_the_run_again_after_resuming(recipe, rows, tmp_path):
    data = rows(repetitive=True)
    options = {"data": data, "learning_rate": 1e-2, "max_loss_rise": 1}
    message = r"step 6 was not taken: the loss rose to .* over the last 5 .*row 20 of .*jsonl:21;.*"
    with pytest.raises(TrainingStopped, match=message + "checkpoint-4 is whole"):
        run(recipe, tmp_path, **options)
    stopped_curve = curve(tmp_path)
    with pytest.raises(TrainingStopped, match=message):  # losses before the checkpoint count
        run(recipe, tmp_path, resume="auto", **options)
    assert curve(tmp_path) == stopped_curve
    run(recipe, tmp_path, resume="auto", **options | {"max_loss_rise": 100})
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]
