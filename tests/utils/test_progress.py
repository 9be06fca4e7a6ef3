"""Test progress: bars on a terminal, a line a minute in a log, nothing if the logger is quiet."""

import io
import logging

import pytest

from rope_patch.utils import progress
from rope_patch.utils.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    """Replace stderr by a file, and forget when the last line was written."""

    def replace(stream):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(progress.LogLines, "_latest", 0.0)
        return stream

    return replace


@pytest.fixture
def clock(monkeypatch):
    """Stop the time; add seconds to the first element to let it go on."""
    seconds = [1000.0]
    monkeypatch.setattr("rope_patch.utils.progress.time.monotonic", lambda: seconds[0])
    return seconds


def test_a_log_gets_a_line_a_minute_over_all_bars(stderr, clock):
    log = stderr(io.StringIO())
    for name in ("first", "second"):
        for _ in progress_bar(range(90), desc=name, unit="step", mininterval=0):
            clock[0] += 1
    lines = log.getvalue().split("\n")
    assert lines.pop() == ""
    assert [line.split(":")[0] for line in lines] == ["first", "first", "second"]
    assert "1/90" in lines[0]
    assert "61/90" in lines[1]
    assert "31/90" in lines[2]
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


def test_a_terminal_gets_a_bar(stderr):
    terminal = stderr(Terminal())
    assert list(progress_bar(range(3), desc="steps")) == [0, 1, 2]
    assert terminal.getvalue().count("\r") > 1
    assert not isinstance(progress_bar([]), progress.LogLines)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_disabled_bars_and_quiet_loggers_write_nothing(stderr, stream, caplog):
    output = stderr(stream())
    assert list(progress_bar(range(3), disable=True)) == [0, 1, 2]
    with caplog.at_level(logging.ERROR, "rope_patch"):
        assert list(progress_bar(range(3))) == [0, 1, 2]
    assert output.getvalue() == ""
