"""Test that training is the same after interruptions, and that losses fall."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
from helpers.processes import FRESH

from rope_patch.lab import (
    Cell,
    CellJournal,
    LabSettings,
    RecallTask,
    Trainer,
    build_model,
    run_cell,
    run_lab,
)


class Interrupted(Exception):
    pass


def make_trainer():
    return Trainer(build_model("learned", 48, 32, 0), RecallTask(32, 6, 2), 6, 0, {"steps": 6})


def without_times(results):
    for record in results["cells"]:
        del record["cpu_seconds"]
    return results["cells"]


def test_training_after_an_interruption_ends_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_patch.lab.cell_run.CHECKPOINT_STEPS", 2)
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    whole.train(tmp_path / "whole.pt", lambda tokens: None)
    steps = iter(range(3))

    def interrupt_after_three(tokens):
        if next(steps, None) is None:
            raise Interrupted

    with pytest.raises(Interrupted):
        first.train(tmp_path / "cell.pt", interrupt_after_three)
    seen = []
    second.train(tmp_path / "cell.pt", seen.append)
    assert seen[0] == 2 * 48 * 32  # two steps come from the checkpoint
    assert second.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_a_checkpoint_that_is_damaged_or_of_other_settings_is_passed_over(tmp_path, content):
    path = tmp_path / "cell.pt"
    if content is None:
        torch.save({"identity": {"steps": 7}, "step": 3}, path)
    else:
        path.write_bytes(content)
    seen = []
    make_trainer().train(path, seen.append)
    assert seen[0] == 0
    assert len(seen) == 7


@pytest.mark.parametrize(
    "encoding",
    ["alibi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sinusoidal", "none"))],
)
def test_losses_fall_on_text(tmp_path, encoding):
    short = {"tasks": ("text",), "length": 32, "tests": (32,), "text_steps": 25}
    settings = LabSettings(encodings=(encoding,), **short)
    cell = Cell("text", 0, encoding)
    record = run_cell(cell, settings, tmp_path / "cell.pt", lambda tokens: None)
    first, *_, last = record["training_loss"]
    assert first > 3.5
    assert last < first - 0.6
    (score,) = record["scores"]
    assert sum(score["loss"]) / 16 < first - 0.6  # held-out text, too


def _run_with_early_checkpoints(settings, folder):
    mock.patch("rope_patch.lab.cell_run.CHECKPOINT_STEPS", 5).start()
    run_lab(settings, folder)


def test_a_killed_run_continues_to_the_same_results(tmp_path):
    settings = LabSettings(
        encodings=("none",), tasks=("text",), length=32, tests=(32, 64), text_steps=24, excerpts=2
    )
    process = FRESH.Process(
        target=_run_with_early_checkpoints, args=(settings, tmp_path / "killed")
    )
    process.start()
    (cell,) = settings.cells()
    journal = CellJournal(tmp_path / "killed")
    deadline = time.monotonic() + 300
    while not journal.checkpoint(cell).exists():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not journal.read(settings)
    resumed = without_times(run_lab(settings, tmp_path / "killed"))
    assert resumed == without_times(run_lab(settings, tmp_path / "whole"))
    assert not journal.checkpoint(cell).exists()


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(tmp_path):
    short = {"length": 32, "tests": (32, 64), "text_steps": 4, "recall_steps": 4}
    settings = LabSettings(encodings=("rope", "t5"), excerpts=2, sequences=2, **short)
    one, two = (without_times(run_lab(settings, tmp_path / str(n), n)) for n in (1, 2))
    assert one == two
