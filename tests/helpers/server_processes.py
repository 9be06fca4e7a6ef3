"""Run a server in a process of its own, and wait until it answers."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

_PATIENCE = 300  # seconds until a server answers


@contextlib.contextmanager
def running_server(command, port, log, environment=None):
    """Start a server; yield its address once `/health` answers, and end it.

    Args:
        command: The words that start it.
        port: Where it listens.
        log: Where its output goes.
        environment: Variables beside this process's.
    """
    with Path(log).open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/health", log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _wait(process, url, log):
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(Path(log).read_text()[-3000:])
