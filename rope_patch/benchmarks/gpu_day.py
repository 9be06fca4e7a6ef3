"""Run steps in order of worth on a GPU that is there for some minutes: `make gpu`.

A step is commands that each resume on their own, or take a minute. It has a bound in seconds: one
that does not fit into the time left is not begun, and one that reaches its bound is ended. Its
folder has what the commands wrote and printed, and `step.jsonl`, a line for each command that ran:
the state, the seconds, the card, the versions, the date. The next run repeats no finished command.
`gpu_steps` lists the steps.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.runs.journal import check_lines
from rope_patch.runs.run_folder import RunFolder
from rope_patch.utils import atomic_files, checksums, provenance
from rope_patch.utils.errors import markdown_table
from rope_patch.utils.installation import version
from rope_patch.utils.terminal import format_duration

DONE, CUT, FAILED, TO_DO = "done", "cut at its bound", "failed", "to do"
_JOURNAL, _PAGE, _DAY = "step.jsonl", "README.md", "day.json"
_GRACE = 8.0  # seconds that an interrupted command has to write what it measured
_SHOWN_LINES = 12  # of a command's output

# Weights, checkpoints and stored answers are no results.
_IGNORED = "/work/\ncache/\nlm_eval/\n.lock\n"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the day.

    Attributes:
        name: The name, and its folder.
        about: What it decides, in a few words.
        seconds: The bound of one run of it.
        commands: Words after `python`, run in order.
        needs: Names of steps that are done before.
        environment: Variables of the commands.
        missing: What is not at hand, so that the step cannot run; empty if nothing.
    """

    name: str
    about: str
    seconds: float
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


class Day:
    """Steps in a folder, with what earlier runs did of them.

    Args:
        folder: Folder of the results; made by `run`.
        steps: All steps, in order of worth.
        card: Facts that all results share, such as the card; a folder has one such set.
    """

    def __init__(self, folder: Path, steps: Sequence[Step], card: Mapping[str, Any]) -> None:
        self.steps = {step.name: step for step in steps}
        self._folder = RunFolder(folder, card)
        self._path = folder

    def run(self, seconds: float, only: Sequence[str] = ()) -> None:
        """Run all steps that fit, those that failed before last.

        Args:
            seconds: The time; no step goes on after it.
            only: Names of steps, all if empty.

        Raises:
            ValueError: A name is unknown, the folder has results of another card, or another run
                works in it.
        """
        end = time.monotonic() + seconds
        steps = self._chosen(only)
        with self._folder.locked():
            self._require_same_card()
            atomic_files.atomic_write(self._path / ".gitignore", _IGNORED)
            pending = sorted(steps, key=lambda step: self.state(step) == FAILED)
            while step := self._next(pending, end):
                pending.remove(step)
                self._run_step(step)
            for step in pending:
                if self.state(step) != DONE and not self.obstacle(step):
                    print(f"{step.name}: not begun, its {step.seconds:g} s do not fit")

    def _next(self, pending: Sequence[Step], end: float) -> Step | None:
        """Return the first step that can run and fits, None if there is none."""
        for step in pending:
            can_run = self.state(step) != DONE and not self.obstacle(step)
            if can_run and step.seconds <= end - time.monotonic():
                return step
        return None

    def state(self, step: Step) -> str:
        """Return whether a step is done, was cut, failed, or has yet to begin."""
        states = [self._last(step, command).get("state", TO_DO) for command in step.commands]
        return next((state for state in states if state != DONE), DONE)

    def obstacle(self, step: Step) -> str:
        """Return what a step waits for or lacks; empty if it can run."""
        waits = [name for name in step.needs if self.state(self.steps[name]) != DONE]
        return step.missing or (f"waits for {', '.join(waits)}" if waits else "")

    def plan(self, only: Sequence[str] = ()) -> str:
        """Return all steps with their bounds and states, and the commands of what is left."""
        steps = self._chosen(only)
        left = [step for step in steps if self.state(step) != DONE]
        runnable = [step for step in left if not step.missing]
        lines = [self._table(steps), ""]
        if not runnable:
            return "\n".join([*lines, "Nothing is left that can run here."])
        bound = format_duration(sum(step.seconds for step in runnable))
        lines.append(f"Left, {bound} at most; all of them by the same command again:")
        for step in runnable:
            lines += [f"  {step.name}", *(f"    {line}" for line in self._commands_left(step))]
        return "\n".join(lines)

    def _chosen(self, names: Sequence[str]) -> list[Step]:
        if unknown := [name for name in names if name not in self.steps]:
            known = ", ".join(self.steps)
            raise ValueError(f"there is no step {unknown[0]!r}: expected some of {known}")
        return [step for step in self.steps.values() if not names or step.name in names]

    def _require_same_card(self) -> None:
        """Write the card, or raise if the folder has another one's results."""
        stored = self._folder.find(_DAY, again="written again")
        if stored is None:
            self._folder.write(_DAY, {"card": self._folder.identity})
        elif differences := self._folder.differences(stored["card"]):
            raise ValueError(
                f"{self._path} has results of another machine ({'; '.join(differences.values())}): "
                "expected the same one; give another --out"
            )

    def _run_step(self, step: Step) -> None:
        """Run the commands that are not done, up to the step's bound."""
        print(f"{step.name}: {step.about}, at most {step.seconds:g} s", flush=True)
        end = time.monotonic() + step.seconds
        (self._path / step.name).mkdir(parents=True, exist_ok=True)
        for number, command in enumerate(step.commands, start=1):
            if self._last(step, command).get("state") == DONE:
                continue
            output = self._path / step.name / f"output-{number}.txt"
            start = time.monotonic()
            state = CUT  # also where this process is interrupted
            try:
                code = _run(command, step.environment, output, end - start)
                state = CUT if code is None else FAILED if code else DONE
            finally:
                taken = time.monotonic() - start
                self._note(step, command, state=state, seconds=round(taken, 1))
            text = output.read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(f"  {line}" for line in text[-_SHOWN_LINES:]))
            print(f"{step.name}: {state} after {taken:.0f} s", flush=True)
            if state != DONE:
                break

    def _note(self, step: Step, command: tuple[str, ...], **result: Any) -> None:
        """Append a command's result to the step's journal, and write the page."""
        entry = {
            "command": list(command),
            **result,
            "date": provenance.now(),
            "versions": provenance.versions() | {"triton": version("triton")},
            "revision": provenance.git_revision(),
            **self._folder.identity,
        }
        self._folder.journal(f"{step.name}/{_JOURNAL}").append(checksums.seal(entry))
        page = f"# A day on {self._folder.identity['device']}\n\n{self._table(self.steps.values())}"
        atomic_files.atomic_write(self._path / _PAGE, f"{page}\n\n{self._details()}\n")

    def _last(self, step: Step, command: tuple[str, ...]) -> dict[str, Any]:
        """Return the last line of the journal about a command; empty if there is none."""
        lines = self._folder.journal(f"{step.name}/{_JOURNAL}").lines()
        entries = check_lines(lines, command=list(command)).entries
        return entries[-1] if entries else {}

    def _table(self, steps: Any) -> str:
        rows = [("step", "decides", "bound, s", "state")]
        for step in steps:
            state = self.state(step)
            shown = state if state == DONE else self.obstacle(step) or state
            rows.append((step.name, step.about, f"{step.seconds:g}", shown))
        return "\n".join(markdown_table(rows, "llrl"))

    def _details(self) -> str:
        """Return the commands that ran, with seconds, versions and dates."""
        lines = []
        for step in self.steps.values():
            for command in step.commands:
                if entry := self._last(step, command):
                    names = ", ".join(f"{k} {v}" for k, v in entry["versions"].items())
                    lines.append(
                        f"- {step.name}: {entry['state']} after {entry['seconds']} s, "
                        f"{entry['date']}, {names}: `{_shown(step, command)}`"
                    )
        return "\n".join(lines)

    def _commands_left(self, step: Step) -> list[str]:
        waiting = [c for c in step.commands if self._last(step, c).get("state") != DONE]
        return [_shown(step, command) for command in waiting]


def _shown(step: Step, command: tuple[str, ...]) -> str:
    variables = [f"{name}={value}" for name, value in step.environment.items()]
    return " ".join([*variables, "python", shlex.join(command)])


def _run(
    command: tuple[str, ...], environment: Mapping[str, str], output: Path, seconds: float
) -> int | None:
    """Run a command; return its exit code, None if it reached its bound."""
    grace = min(_GRACE, seconds / 5)
    variables = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **environment}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,  # so that its own processes end with it
            preexec_fn=_heed_interrupts,
        )
        with _ended(process, grace):
            try:
                return process.wait(max(seconds - grace, 0))
            except subprocess.TimeoutExpired:
                return None


def _heed_interrupts() -> None:
    """Undo that a shell's background jobs, and so their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes], grace: float) -> Iterator[None]:
    """Interrupt a process and all of its own at the end of the block, then kill them."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # commands write what they measured
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
