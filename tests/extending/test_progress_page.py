"""Test the page of an extension's steps."""

import time

from rope_patch.extending import wall_clock
from rope_patch.extending.progress_page import ProgressPage
from rope_patch.extending.wall_clock import WallClock


def test_the_page_shows_how_long_a_step_has_run(tmp_path, monkeypatch):
    monkeypatch.setattr(wall_clock, "_HEARTBEAT", 0.05)
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
    page.end("measure", "measured")
    assert "of up to" not in page.path.read_text()


def test_code_in_the_words_of_a_step_is_shown_as_code(tmp_path):
    clock = WallClock(tmp_path / "clock.json", 600.0, {"measure": 1.0})
    page = ProgressPage(tmp_path, "a model", ["measure"], clock, "a command")
    page.add_left_out(["time: `rope-patch compare <MODEL>` measures it"])
    page.end("measure", "5 < 6 & `7`")
    text = page.path.read_text()
    assert "<li>time: <code>rope-patch compare &lt;MODEL&gt;</code> measures it</li>" in text
    assert "<p>5 &lt; 6 &amp; <code>7</code></p>" in text
