"""Tiny extensions, in this process or in one that is killed after a number of results."""

import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.processes import FRESH
from helpers.undrawn import leave_undrawn

import rope_patch
from rope_patch.extending import WorkFolder

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
TRAINED, LENGTH = 256, 1024


def extend_tiny(out, **changes):
    """Extend the tiny model, without ordinary short tasks, which take most of the time.

    Four times its trained length is where the plain model is known to fail
    (`test_plain_recall_collapses_at_four_times_the_trained_length`), so a few texts decide.
    """
    arguments = {
        "to": "4x",
        "budget": "3h",
        "search": False,
        "samples": 12,
        "command": "made by a test",
    }
    short = mock.patch.multiple("rope_patch.extending.proof", _MAX_SHORT=0, _PILOT_SHORT=1)
    with short, pytest.MonkeyPatch.context() as undrawn:
        leave_undrawn(undrawn)
        return rope_patch.extend(TINY, out=out, **(arguments | changes))


def extend_until_killed(out, writes, **changes):
    """Run an extension that is killed once it has written a number of results."""
    process = FRESH.Process(target=_extend_until, args=(out, writes, changes))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def _extend_until(out, writes, changes):
    torch.set_num_threads(1)
    write, calls = WorkFolder.write, []

    def write_and_count(*arguments):
        stored = write(*arguments)
        calls.append(arguments)
        if len(calls) == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        return stored

    WorkFolder.write = write_and_count
    extend_tiny(out, **changes)


def step_result(out, step):
    """Return a step's stored result without times, which differ between runs."""
    result = json.loads((out / "work" / f"{step}.json").read_text())["result"]
    recommendation = result.get("recommendation", {})
    for name in ("seconds", "budget"):
        recommendation.pop(name, None)
    return result


def files(folder):
    """Return the paths of all files in a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
