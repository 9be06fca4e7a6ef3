"""Run `rope-patch` commands: in a new process, or faster in this one."""

import contextlib
import io
import logging
import os
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

from rope_patch.cli import main


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_in_new_process(*words, cwd=None, **variables):
    """Run a command in a new process, with one thread and no GPU.

    `variables` are added to the process's environment.
    """
    one_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", "from rope_patch.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **one_cpu, **variables},
        check=False,
    )


def run_in_this_process(*words):
    """Run a command in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    status = 0
    messages = logging.StreamHandler(stderr)  # under pytest, the command adds no handler
    with (
        mock.patch.object(logging.root, "handlers", [*logging.root.handlers, messages]),
        mock.patch.object(sys, "argv", ["rope-patch", *map(str, words)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as error:
            status = error.code or 0
    return CommandResult(status, stdout.getvalue(), stderr.getvalue())
