"""Run `rope-patch` commands: in a new interpreter, faster in a forked process, or in this one."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from helpers.processes import run_fresh
from rope_patch.cli import main


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


_ONE_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_in_new_interpreter(*words, cwd=None):
    """Run a command as a user does, imports included; with one thread and no GPU."""
    return subprocess.run(
        [sys.executable, "-c", "from rope_patch.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **_ONE_CPU},
        check=False,
    )


def run_in_new_process(*words, cwd=None, before=None, **variables):
    """Run a command in a new process, with one thread and no GPU.

    The process is forked from one that has imported the package and run nothing of it. `variables`
    are added to its environment; `before` is called in it first.
    """
    own = {**os.environ, **_ONE_CPU, **variables}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        status = run_fresh(_run_command, [*map(str, words)], cwd, before, own, outputs)
        return CommandResult(status, *(path.read_text() for path in outputs))


def _run_command(words, folder, before, variables, outputs):
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    if folder is not None:
        os.chdir(folder)
    os.environ.clear()
    os.environ |= variables
    torch.set_num_threads(1)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["rope-patch", *words]
    if before is not None:
        before()
    main()


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
