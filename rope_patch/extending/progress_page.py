"""The progress page: a static page of the steps, written again and again while one runs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from rope_patch.evaluation.report.writer import render
from rope_patch.runs.run_folder import WallClock
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import printable
from rope_patch.utils.provenance import now
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

PAGE = "progress.html"
DONE, RUNNING, WAITING, LEFT_OUT = "done", "running", "waiting", "left out"
_MARKS = {DONE: "✓", RUNNING: "▸", WAITING: "·", LEFT_OUT: "–"}
_TEMPLATE = Path(__file__).parent / "templates" / PAGE


class ProgressPage:
    """The steps of an extension and what came out of each, as a page and in the terminal.

    Args:
        folder: The folder of the page.
        title: The extension in words.
        steps: The names of the steps, in order.
        clock: The time of the steps.
        command: The command line.
    """

    def __init__(
        self, folder: Path, title: str, steps: list[str], clock: WallClock, command: str
    ) -> None:
        self.path = folder / PAGE
        self._title, self._clock, self._command = title, clock, command
        self._steps: dict[str, tuple[str, str]] = dict.fromkeys(steps, (WAITING, ""))
        self._left_out: list[str] = []
        self._links: list[tuple[str, str]] = []

    def begin(self, step: str, seconds: float) -> None:
        """Note that a step runs.

        Args:
            step: Its name.
            seconds: Its share of the budget.
        """
        number = list(self._steps).index(step) + 1
        share = f" (up to {format_duration(seconds)})" if seconds else ""
        _say(f"step {number} of {len(self._steps)}: {step}{share}")
        self._steps[step] = (RUNNING, "")
        self._write(running=True)

    def refresh(self) -> None:
        """Write the page again, with the time that has passed."""
        self._write(running=True)

    def end(self, step: str, text: str, *, left_out: bool = False) -> None:
        """Note what came out of a step."""
        self._steps[step] = (LEFT_OUT if left_out else DONE, text)
        if text:
            _say(f"  {step}: {text}")
        self._write(running=True)

    def add_left_out(self, lines: list[str]) -> None:
        """Add what was left out or not measured."""
        self._left_out += [line for line in lines if line not in self._left_out]

    def add_link(self, path: str, words: str) -> None:
        """Add a link to a file beside the page."""
        self._links.append((path, words))

    def fail(self, error: str) -> None:
        """Note that the run stopped."""
        self._write(running=False, error=error)

    def finish(self, outcome: str) -> None:
        """Note the outcome; what did not run any more is left out."""
        for step, (state, text) in self._steps.items():
            if state == WAITING:
                self._steps[step] = (LEFT_OUT, text)
        self._write(running=False, outcome=outcome)

    def _write(self, *, running: bool, error: str = "", outcome: str = "") -> None:
        spent = self._clock.spent()
        page: dict[str, Any] = {
            "title": self._title,
            "running": running,
            "error": error,
            "outcome": outcome,
            "spent": format_duration(spent),
            "budget": format_duration(self._clock.budget),
            "percent": min(100, round(100 * spent / self._clock.budget)),
            "steps": [
                {
                    "name": name,
                    "state": state,
                    "mark": _MARKS[state],
                    "text": text,
                    "time": self._time(name, state),
                }
                for name, (state, text) in self._steps.items()
            ],
            "left_out": self._left_out,
            "links": self._links,
            "command": self._command,
            "date": now(),
        }
        atomic_files.atomic_write(self.path, render(_TEMPLATE, page))

    def _time(self, step: str, state: str) -> str:
        """Return a step's time in words; empty if it took none."""
        spent, most = self._clock.spent(step), self._clock.allotted(step)
        if not spent:
            return ""
        share = f" of up to {format_duration(most)}" if state == RUNNING and most else ""
        return f"{format_duration(spent)}{share}"


def _say(line: str) -> None:
    """Print a line on stderr, where `-q` does not hide it; patches log at the level of infos."""
    if logger.isEnabledFor(logging.WARNING):
        print(printable(line), file=sys.stderr, flush=True)
