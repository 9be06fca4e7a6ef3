"""Test progress bars and lines of a log, and figures."""

import base64
import io
import logging
import re
import time

import numpy
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rope_patch.utils import PALETTE, never_silent, progress_bar, render_figure


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """Replace stderr by a file, and forget when the last line was written."""

    def replace(stream):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("rope_patch.utils.terminal.LogLines._latest", 0.0)
        return stream

    return replace


@pytest.fixture
def clock(monkeypatch):
    """Stop the time; add seconds to the first element to let it go on."""
    seconds = [1000.0]
    monkeypatch.setattr("rope_patch.utils.terminal.time.monotonic", lambda: seconds[0])
    return seconds


def test_a_log_gets_a_line_in_15_seconds_over_all_bars(stderr, clock):
    log = stderr(io.StringIO())
    for name in ("first", "second"):
        for _ in progress_bar(range(20), desc=name, unit="step", mininterval=0):
            clock[0] += 1
    lines = log.getvalue().split("\n")
    assert lines.pop() == ""
    assert [line.split(":")[0] for line in lines] == ["first", "first", "second"]
    assert "1/20" in lines[0]
    assert "16/20" in lines[1]
    assert "11/20" in lines[2]
    assert "\r" not in log.getvalue()


def test_a_bar_that_is_refreshed_by_hand_becomes_a_line(stderr, clock):
    log = stderr(io.StringIO())
    bar = progress_bar(total=10, bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}")
    bar.set_description_str("measuring", refresh=False)
    bar.set_postfix_str("2 min left", refresh=False)
    bar.n = 5
    bar.refresh()
    bar.write("said above the bar", file=log)
    bar.close()
    first, second, rest = log.getvalue().split("\n")
    assert first == "measuring  50%, 2 min left"
    assert (second, rest) == ("said above the bar", "")


def test_long_work_without_a_word_is_told_from_a_thread(stderr, monkeypatch):
    log = stderr(io.StringIO())
    monkeypatch.setattr("rope_patch.utils.terminal._INTERVAL", 0.2)
    monkeypatch.setattr("rope_patch.utils.terminal._LOOK", 0.02)
    with never_silent():
        time.sleep(0.6)  # such as reading weights
        assert "working, " in log.getvalue()
        with progress_bar(total=2, desc="a step") as bar:
            bar.refresh()
            time.sleep(0.6)  # within one long step
        assert log.getvalue().count("a step:   0%") >= 2
        said = log.getvalue()
    time.sleep(0.3)
    assert log.getvalue() == said


def test_a_terminal_gets_a_bar(stderr):
    terminal = stderr(Terminal())
    assert list(progress_bar(range(3), desc="steps")) == [0, 1, 2]
    assert terminal.getvalue().count("\r") > 1


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_disabled_bars_and_quiet_loggers_write_nothing(stderr, stream, caplog):
    output = stderr(stream())
    assert list(progress_bar(range(3), disable=True)) == [0, 1, 2]
    with caplog.at_level(logging.ERROR, "rope_patch"):
        assert list(progress_bar(range(3))) == [0, 1, 2]
    assert output.getvalue() == ""


def figure(values):
    drawing = Figure(figsize=(2, 2))
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.imshow(values, interpolation="none")
    axes.plot([0, 1], [0, 1], color=PALETTE["m0"][0])
    axes.text(0, 0, "words", color=PALETTE["ink"][0])
    return drawing


def test_each_colour_has_a_rule_for_dark_screens():
    svg = render_figure(figure(numpy.zeros((2, 2))), "svg").decode()
    (rules,) = re.findall(r"<style>@media \(prefers-color-scheme:dark\)\{(.*?)\}</style>", svg)
    assert f'[style*="stroke: {PALETTE["m0"][0]}"]{{stroke:{PALETTE["m0"][1]} ' in rules
    assert f'[style*="fill: {PALETTE["ink"][0]}"]{{fill:{PALETTE["ink"][1]} ' in rules
    assert f'[style*="fill: #ffffff"]{{fill:{PALETTE["paper"][1]} ' in rules
    assert PALETTE["m1"][0] not in rules  # nothing has it
    drawing = svg.partition("</style>")[2]
    assert f"stroke: {PALETTE['m0'][0]}" in drawing  # viewers without rules see the light one
    assert PALETTE["m0"][1] not in drawing


@pytest.mark.parametrize(("colours", "mode"), [(200, "P"), (2000, "RGBA")])
def test_images_keep_their_pixels(colours, mode):
    values = numpy.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=numpy.uint8)
    values = values.reshape(-1, 3)[numpy.arange(2000) % colours].reshape(50, 40, 3)
    svg = render_figure(figure(values), "svg").decode()
    (encoded,) = re.findall(r"data:image/png;base64,([^\"]+)\"", svg)
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert image.mode == mode
    pixels = numpy.asarray(image.convert("RGBA"))[..., :3]
    assert any(numpy.array_equal(each, values) for each in (pixels, pixels[::-1]))
