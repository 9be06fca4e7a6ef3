"""Processes on the CPU that talk to each other as under torchrun."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

HERE = Path(__file__).parent


def launch(script, folder, *arguments, processes=2, patience=120, **variables):
    """Runs a script of this folder in processes that can meet in `FOLDER/rendezvous`.

    Ends them all, and fails with what they said (`FOLDER/RANK.log`), when one of them fails or
    they take longer than `patience` seconds.
    """
    failed = folder / "failed"  # once for all tests that ask, which would each wait for it
    if failed.exists():
        pytest.fail(failed.read_text(), pytrace=False)
    (folder / "rendezvous").unlink(missing_ok=True)
    logs = [folder / f"{rank}.log" for rank in range(processes)]
    running = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, HERE / script, folder, *arguments]
            given = environment(rank, processes) | variables
            with log.open("w") as output:
                running.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=given)
                )
        deadline = time.monotonic() + patience
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(code != 0 for code in codes):
        said = "\n".join(f"-- process {log.stem} --\n{log.read_text()}" for log in logs)
        failed.write_text(f"exit codes {codes} (None: ended from here)\n{said}")
        pytest.fail(failed.read_text(), pytrace=False)


def environment(rank, processes):
    """What torchrun would set where there are several processes, and nothing of a GPU."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    alone = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if processes == 1:
        return alone
    return alone | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }


@contextmanager
def shared_folder(tmp_path_factory, name):
    """A folder that pytest-xdist's workers have in common, and one at a time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / name
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        yield folder
