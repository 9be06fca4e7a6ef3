"""`rope-patch`, as it is typed: in a process of its own, or in this one, which takes no seconds."""

import contextlib
import io
import logging
import os
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

from rope_patch.cli import main


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def typed(*words, cwd=None, **variables):
    """In a process of its own, with one thread and no GPU; `variables` are of its environment."""
    one = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", "from rope_patch.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **one, **variables},
        check=False,
    )


def here(*words):
    """In this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    status = 0
    messages = logging.StreamHandler(stderr)  # pytest has set logging up, so the command does not
    with (
        mock.patch.object(logging.root, "handlers", [*logging.root.handlers, messages]),
        mock.patch.object(sys, "argv", ["rope-patch", *map(str, words)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    return Done(status, stdout.getvalue(), stderr.getvalue())
