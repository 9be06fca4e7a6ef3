"""Test a run's log and the guard that stops diverging runs."""

import json
import math

import pytest
from training_runs import BOTH, LENGTH

from rope_patch.training import DivergenceGuard, TrainingProgress, TrainingStopped, read_log

ROWS = [{"index": 8, "documents": ["a.txt", "b.txt"]}, {"index": 9, "documents": ["c.txt"]}]


@pytest.fixture
def guard(tmp_path):
    return DivergenceGuard(1.0, tmp_path)


def _make_progress(folder, done=0, **changes):
    return TrainingProgress(
        folder, **{"steps": 9, "steps_done": done, "tokens": 1024, "main": True, **changes}
    )


def _write_log(folder, *steps, rest=""):
    lines = [json.dumps({"step": step, "loss": float(step)}) + "\n" for step in steps]
    (folder / "log.jsonl").write_text("".join(lines) + rest)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_guard_stops_at_a_nan_or_infinite_loss(guard, loss):
    with pytest.raises(TrainingStopped, match=f"step 3 .* the loss is {loss}") as error:
        guard.check(3, loss, 1.0, ROWS)
    assert "row 8 of a.txt, b.txt; row 9 of c.txt" in str(error.value)
    assert "no checkpoint yet" in str(error.value)
    assert not guard.recent_losses


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_guard_stops_at_nan_or_infinite_gradients(guard, norm):
    with pytest.raises(TrainingStopped, match=rf"norm is {norm} \(the loss 2\.5\)"):
        guard.check(1, 2.5, norm, [])


def test_guard_stops_at_a_risen_loss(guard):
    for step in range(1, 6):
        guard.check(step, 2.0, 1.0, ROWS)
    guard.check(6, 2.99, 1.0, ROWS)
    with pytest.raises(TrainingStopped, match=r"rose to 3\.5, from 2\.165 over the last 6"):
        guard.check(7, 3.5, 1.0, ROWS)
    guard.check(7, 2.0, 1.0, ROWS)  # the mean excludes the refused loss


def test_guard_ignores_the_first_losses(guard):
    for step, loss in enumerate([12.0, 2.0, 9.0, 2.0], start=1):
        guard.check(step, loss, 1.0, ROWS)


def test_guard_compares_with_the_last_losses_only(guard):
    for step in range(1, 101):
        guard.check(step, 100.0 - step, 1.0, ROWS)
    with pytest.raises(TrainingStopped, match=r"from 9\.5 over the last 20 steps"):
        guard.check(101, 10.6, 1.0, ROWS)


def test_every_step_is_logged(tmp_path):
    progress = _make_progress(tmp_path)
    for step in (1, 2):
        record = progress.record_step(step, loss=1 / 3, grad_norm=0.1, learning_rate=1e-5)
    progress.close()
    assert read_log(tmp_path)[-1] == record
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    assert record["loss"] == 1 / 3
    assert record["tokens"] == 2048
    assert record["tokens_per_second"] > 0
    assert record["memory_gb"] > 0


def test_lines_after_the_resumed_step_are_dropped(tmp_path):
    _write_log(tmp_path, 1, 2, 3, 4, 5)
    progress = _make_progress(tmp_path, done=3)
    assert progress.bar.n == 3
    progress.record_step(4, loss=0.5)
    progress.close()
    assert [(line["step"], line["loss"]) for line in read_log(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 0.5),
    ]


def test_a_new_run_starts_an_empty_log(tmp_path):
    _write_log(tmp_path, 1, 2)
    _make_progress(tmp_path).close()
    assert read_log(tmp_path) == []


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0', "\x00\x00"])
def test_a_partial_last_line_is_dropped(tmp_path, rest):
    _write_log(tmp_path, 1, 2, rest=rest)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    progress = _make_progress(tmp_path, done=2)
    progress.record_step(3, loss=0.5)
    progress.close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]


def test_only_the_main_process_logs(tmp_path):
    progress = _make_progress(tmp_path, main=False)
    progress.record_step(1, loss=0.5)
    progress.close()
    assert not list(tmp_path.iterdir())


def test_pauses_do_not_count_towards_the_speed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = _make_progress(tmp_path)
    now[0] = 100.0
    progress.pause()
    now[0] = 102.0
    assert progress.record_step(1)["tokens_per_second"] == 512.0


def test_a_log_that_cannot_be_written_is_an_error_with_advice(tmp_path):
    progress = _make_progress(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    try:
        (tmp_path / "log.jsonl").symlink_to("/dev/full")
        (tmp_path / "log.jsonl").open("a").close()
    except OSError:
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match=r"log.jsonl could not be .* MB are free .*No space"):
        progress.record_step(1, loss=0.5)
    progress.close()


@pytest.mark.parametrize("recipe", BOTH)
def test_a_run_logs_tokens_memory_and_losses(recipe, reference_run):
    log = read_log(reference_run(recipe))
    assert [line["tokens"] for line in log] == [4 * LENGTH, 8 * LENGTH, 12 * LENGTH]
    for line in log:
        assert line["tokens_per_second"] > 0
        assert line["memory_gb"] > 0.05
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
    assert [line["learning_rate"] for line in log] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


def test_rows_without_a_label_are_named_as_the_reason(guard):
    rows = [{**row, "targets": 0} for row in ROWS]
    with pytest.raises(TrainingStopped, match="all labels are -100") as error:
        guard.check(3, math.nan, 1.0, rows)
    assert "learning rate" not in str(error.value)
    with pytest.raises(TrainingStopped, match="lower the learning rate"):
        guard.check(3, math.nan, 1.0, [{**rows[0], "targets": 3}, rows[1]])
