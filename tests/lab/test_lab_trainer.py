"""Test that training is the same after interruptions, and that losses fall."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from rope_patch.lab import trainer as trainer_module
from rope_patch.lab.cell_journal import CellJournal
from rope_patch.lab.cell_run import run_cell
from rope_patch.lab.model import build_model
from rope_patch.lab.pipeline import run_lab
from rope_patch.lab.recall_task import RecallTask
from rope_patch.lab.settings import Cell, LabSettings
from rope_patch.lab.trainer import Trainer


class Interrupted(Exception):
    pass


def interrupt_after(steps):
    calls = 0

    def report(tokens):
        nonlocal calls
        calls += 1
        if calls > steps:
            raise Interrupted

    return report


def make_trainer(encoding="learned"):
    return Trainer(build_model(encoding, 48, 32, 0), RecallTask(32, 6, 2), 6, 0, {"steps": 6})


def test_training_after_an_interruption_ends_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "CHECKPOINT_STEPS", 2)
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    whole.train(tmp_path / "whole.pt", lambda tokens: None)
    with pytest.raises(Interrupted):
        first.train(tmp_path / "cell.pt", interrupt_after(3))
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


@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "none"])
def test_losses_fall_on_text(tmp_path, encoding):
    settings = LabSettings(
        encodings=(encoding,), tasks=("text",), length=32, tests=(32,), text_steps=25
    )
    record = run_cell(
        Cell("text", 0, encoding), settings, tmp_path / "cell.pt", lambda tokens: None
    )
    first, *_, last = record["training_loss"]
    assert first > 3.5
    assert last < first - 0.6
    (score,) = record["scores"]
    assert sum(score["loss"]) / 16 < first - 0.6  # held-out text, too


def test_a_killed_run_continues_to_the_same_results(tmp_path):
    settings = LabSettings(
        encodings=("none",), tasks=("text",), length=32, tests=(32, 64), text_steps=90, excerpts=2
    )
    code = (
        "from pathlib import Path\n"
        "from rope_patch.lab.pipeline import run_lab\n"
        "from rope_patch.lab.settings import LabSettings\n"
        f"run_lab({settings!r}, Path({str(tmp_path / 'killed')!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    (cell,) = settings.cells()
    journal = CellJournal(tmp_path / "killed")
    deadline = time.monotonic() + 300
    while not journal.checkpoint(cell).exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not journal.read(settings)
    resumed = run_lab(settings, tmp_path / "killed")["cells"]
    whole = run_lab(settings, tmp_path / "whole")["cells"]
    for record in [*resumed, *whole]:
        del record["cpu_seconds"]
    assert resumed == whole
    assert not journal.checkpoint(cell).exists()


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(tmp_path):
    settings = LabSettings(
        encodings=("rope", "t5"),
        length=32,
        tests=(32, 64),
        text_steps=4,
        recall_steps=4,
        excerpts=2,
        sequences=2,
    )
    one, two = (run_lab(settings, tmp_path / str(n), n)["cells"] for n in (1, 2))
    for record in [*one, *two]:
        del record["cpu_seconds"]
    assert one == two
