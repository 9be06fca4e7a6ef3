"""Test targets, durations, the shares of the wall clock, and the page that shows them."""

import contextlib
import json
import time

import pytest

from rope_patch.extending import (
    ExtendRequest,
    ProgressPage,
    WorkFolder,
    parse_duration,
    target_length,
)
from rope_patch.runs import WallClock
from rope_patch.utils import align, format_duration


@pytest.mark.parametrize(
    ("to", "length"),
    [
        *[("4x", 1024), ("4×", 1024), ("1.5X", 384), ("512", 512), ("32k", 32768), ("1,024", 1024)],
        # Without a unit: a factor up to 64, tokens beyond.
        *[("4", 1024), ("1.5", 384), ("64", 16384), ("300", 300)],
    ],
)
def test_targets(to, length):
    assert target_length(to, 256) == length


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("0.5h", 1800), ("1h1m1s", 3661)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["8", "h", "8d", "m30", "-1h", "1m1h", "inf", "nan"])
def test_bad_durations_are_refused(text):
    with pytest.raises(ValueError, match="budget"):
        parse_duration(text)


def test_durations_are_written_to_read():
    assert [format_duration(s) for s in (12.4, 200, 7500)] == ["12 s", "3 min 20 s", "2 h 05 min"]


def test_rows_are_aligned():
    rows = [["", "n"], ["one", "5"], ["three", "10"]]
    assert align(rows) == ["       n", "one    5", "three  10"]
    assert align(rows, right=True) == ["        n", "one     5", "three  10"]


@pytest.fixture
def now(monkeypatch):
    """Return a clock that tests set."""
    moment = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: moment[0])
    return moment


def test_shares_are_of_the_time_left_and_stay_when_a_run_continues(tmp_path, now):
    path, weights = tmp_path / "clock.json", {"a": 1, "b": 2, "c": 1}
    clock = WallClock(path, 100, weights)
    assert clock.allot("a", 0) == 25
    with clock.running("a", lambda: None):
        now[0] += 10
    assert clock.allot("b", 10) == pytest.approx(90 * 2 / 3)
    with contextlib.suppress(KeyboardInterrupt), clock.running("b", lambda: None):
        now[0] += 70
        raise KeyboardInterrupt
    continued = WallClock(path, 100, weights)
    assert continued.spent() == 80
    assert continued.allot("b", 10) == 60  # as it was when it began first
    with continued.running("b", lambda: None):
        now[0] += 30
    assert continued.spent("b") == 100
    # Of the 100 s of b, 40 were lost by the kill: what follows has the share that it would have.
    assert continued.allot("c", 10 + 60) == 30
    assert json.loads(path.read_text())["spent"] == {"a": 10, "b": 100}


def test_a_damaged_clock_starts_anew(tmp_path):
    (tmp_path / "clock.json").write_text("{")
    assert WallClock(tmp_path / "clock.json", 10, {"a": 1}).allot("a", 0) == 10


def test_the_budget_may_grow_until_something_is_measured(tmp_path):
    work = WorkFolder(tmp_path)
    work.require_same_request({"budget": 1.0, "seed": 1})
    work.write("diagnose", {}, 1.0, 1.0)
    work.require_same_request({"budget": 2.0, "seed": 1})
    with pytest.raises(ValueError, match=r"budget .* 2\.0, got 3\.0; seed .* 1, got 2"):
        work.require_same_request({"budget": 3.0, "seed": 2})
    work.write("recommend", {}, 1.0, 1.0)
    work.require_same_request({"budget": 2.0, "seed": 1})
    with pytest.raises(ValueError, match=r"budget .* 2\.0, got 3\.0"):
        work.require_same_request({"budget": 3.0, "seed": 1})


def test_a_damaged_request_is_an_error(tmp_path):
    work = WorkFolder(tmp_path)
    work.require_same_request({"budget": 1.0})
    (tmp_path / "work" / "request.json").write_text("{}")
    with pytest.raises(ValueError, match="digest"):
        work.require_same_request({"budget": 1.0})


def test_files_that_keep_their_name_and_size_are_others_by_their_contents(tmp_path):
    model, text, data = tmp_path / "model", tmp_path / "text.txt", tmp_path / "data.txt"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(2**21))

    def identity():
        request = ExtendRequest(
            model=str(model),
            to="4x",
            out=tmp_path / "out",
            budget=60.0,
            train=True,
            data=(str(data),),
            texts=(str(text),),
        )
        return json.dumps(request.identity())

    text.write_text("a text")
    data.write_text("a document")
    found = {identity()}
    assert found == {identity()}
    weights.write_bytes(bytes(2**20) + b"trained on" + bytes(2**20 - 10))
    found.add(identity())
    text.write_text("b text")
    found.add(identity())
    data.write_text("b document")
    found.add(identity())
    assert len(found) == 4


# -- the page of all steps -------------------------------------------------------------------------


def test_the_page_shows_how_long_a_step_has_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_patch.runs.run_folder._HEARTBEAT", 0.05)
    clock = WallClock(tmp_path / "clock.json", 600.0, {"measure": 1.0, "publish": 1.0})
    page = ProgressPage(tmp_path, "a model", ["measure", "publish"], clock, "a command")
    page.begin("measure", clock.allot("measure", 0))
    assert "running</span>" in page.path.read_text()
    with clock.running("measure", page.refresh):
        end, text = time.monotonic() + 30, ""
        while "running, 1 s of up to 5 min" not in text:
            assert time.monotonic() < end
            time.sleep(0.05)
            text = page.path.read_text()
    assert "1 s of 10 min" in text
    assert 'http-equiv="refresh"' in text
    page.add_left_out(["time: `rope-patch compare <MODEL>` measures it"])
    page.end("measure", "5 < 6 & `7`")
    text = page.path.read_text()
    assert "of up to" not in text
    assert "<li>time: <code>rope-patch compare &lt;MODEL&gt;</code> measures it</li>" in text
    assert "<p>5 &lt; 6 &amp; <code>7</code></p>" in text
