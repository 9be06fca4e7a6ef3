"""What goes wrong during a run costs the steps since the last checkpoint, and nothing else."""

import json
from random import Random

import pytest
import torch
from helpers.small_disk import disk as disk
from training_runs import (
    RECIPES,
    Child,
    Hang,
    Poison,
    curve,
    equal_tensors,
    require_same,
    run,
    tensors,
)
from training_runs import truth as truth

from rope_patch.training import checkpoints
from rope_patch.training.monitor import TrainingStopped

BEGUN = {".lock", "identity.json", "log.jsonl", "recipe.yaml"}  # what every run leaves
POISON = 500  # a token of one document only
ROW = 17  # that document, and the row that is made of it: in step 5

pytestmark = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture
def rows(tmp_path):
    """Write documents of a row each; if `dull`, the first ones repeat four tokens."""

    def write(dull=False):
        random = Random(0)
        path = tmp_path / "rows.jsonl"
        made = [[random.randrange(10, 400) for _ in range(256)] for _ in range(40)]
        made[ROW][100] = POISON
        if dull:
            made[:20] = [[20, 21, 22, 23] * 64] * 20
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in made))
        return path

    return write


def _finite(folder):
    return all(torch.isfinite(tensor).all() for tensor in tensors(folder).values())


def _error(said):
    (line,) = [line for line in said if line.startswith("error: ")]
    assert not any("Traceback" in line for line in said)
    return line


def test_kill_during_a_step(recipe, truth, tmp_path):
    folder = tmp_path / "run"
    log = folder / "log.jsonl"
    child = Child(recipe, folder)
    child.killed_when(lambda: log.is_file() and len(log.read_text().splitlines()) >= 3)
    run(recipe, folder, resume="auto")
    require_same(folder, truth(recipe))


@pytest.mark.parametrize("moment", Hang.MOMENTS)
def test_kill_while_a_checkpoint_is_written(recipe, moment, truth, tmp_path):
    folder, flag = tmp_path / "run", tmp_path / "flag"
    going = moment == "old ones go"  # checkpoint-4 is there then, and checkpoint-2 half gone
    limit = 1 if going else 3
    trap = Hang(moment, "checkpoint-4", flag)
    Child(recipe, folder, trap, save_total_limit=limit).killed_when(flag.exists)
    damaged = {p.name for p in folder.glob("checkpoint-*") if checkpoints.find_damage(p)}
    assert damaged == ({"checkpoint-2"} if going else set())
    assert checkpoints.latest_complete(folder) == folder / f"checkpoint-{4 if going else 2}"
    run(recipe, folder, resume="auto", save_total_limit=limit)
    require_same(folder, truth(recipe))
    assert not (folder / ".writing").exists()
    kept = {p.name for p in folder.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{step}" for step in ([6] if going else [2, 4, 6])}


@pytest.mark.parametrize(
    ("megabytes", "failing", "left"),
    [(3, 2, None), (5, 4, 2), pytest.param(6, 4, 2, marks=pytest.mark.slow)],
)
def test_full_disk_leaves_the_checkpoint_before(
    recipe, megabytes, failing, left, disk, truth, tmp_path
):
    folder = disk(megabytes)
    code, said = Child(recipe, folder).ended()
    assert code == 1
    line = _error(said)
    assert f"checkpoint-{failing} could not be written to {folder}, where" in line
    assert "MB are free" in line
    whole = "There is no whole checkpoint" if left is None else f"checkpoint-{left} is whole"
    assert f"{whole}: make room, and start again with --resume auto" in line
    there = {path.name for path in folder.iterdir()} - BEGUN
    assert there == (set() if left is None else {f"checkpoint-{left}"})
    disk(50)
    run(recipe, folder, resume="auto")
    require_same(folder, truth(recipe))


@pytest.mark.parametrize("method", ["yarn", "none"])
def test_full_disk_leaves_no_half_model(recipe, method, disk):
    changed = {"save_strategy": "no", "method": method, "max_steps": 1}
    if method == "none":
        changed |= {"factor": None}
    folder = disk(1)
    code, said = Child(recipe, folder, **changed).ended()
    assert code == 1
    assert f"the finished model could not be written to {folder}, where" in _error(said)
    assert {path.name for path in folder.iterdir()} == BEGUN


def test_loss_that_is_no_number_stops(recipe, rows, tmp_path):
    data, folder = rows(), tmp_path / "run"
    whole = tmp_path / "whole"
    run(recipe, whole, data=data)
    code, said = Child(recipe, folder, Poison(recipe, POISON), data=data).ended()
    assert code == 1
    line = _error(said)
    assert "step 5 was not taken: the loss is nan" in line
    assert f"row {ROW} of {data}:{ROW + 1}" in line
    assert f"{folder / 'checkpoint-4'} is whole" in line
    assert curve(folder) == curve(whole)[:4]
    assert checkpoints.latest_complete(folder) == folder / "checkpoint-4"
    assert equal_tensors(folder / "checkpoint-4", whole / "checkpoint-4")
    assert _finite(folder / "checkpoint-4")
    run(recipe, folder, data=data, resume="auto")  # without what was wrong
    require_same(folder, whole)


def test_learning_rate_too_high_stops(recipe, tmp_path):
    with pytest.raises(TrainingStopped, match=r"step 2 was not taken: the .*checkpoint-1 is whole"):
        run(recipe, tmp_path, learning_rate=1e30, save_steps=1)
    assert _finite(tmp_path / "checkpoint-1")
    assert len(curve(tmp_path)) == 1


def test_risen_loss_stops_and_does_after_resuming(recipe, rows, tmp_path):
    data = rows(dull=True)
    asked = {"data": data, "learning_rate": 1e-2, "max_loss_rise": 1}
    risen = r"step 6 was not taken: the loss rose to .* over the last 5 .*row 20 of .*jsonl:21;.*"
    with pytest.raises(TrainingStopped, match=risen + "checkpoint-4 is whole"):
        run(recipe, tmp_path, **asked)
    stopped_at = curve(tmp_path)
    with pytest.raises(TrainingStopped, match=risen):  # losses ahead of the checkpoint count
        run(recipe, tmp_path, resume="auto", **asked)
    assert curve(tmp_path) == stopped_at
    run(recipe, tmp_path, resume="auto", **asked | {"max_loss_rise": 100})
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]
