"""Run several processes on this machine: forked ones, or scripts as torchrun starts them."""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from filelock import FileLock

TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS / "distributed"
FORK = multiprocessing.get_context("fork")  # a fresh interpreter takes seconds to import torch
SPAWN = multiprocessing.get_context("spawn")  # for those whose memory is measured


class _FrozenProcess(ForkServerProcess):
    """A process that leaves what was imported before out of garbage collection.

    accelerate collects garbage at each training, a quarter of a short run.
    """

    def run(self):
        gc.freeze()
        super().run()


class _FreshContext(ForkServerContext):
    Process = _FrozenProcess


# Forks from a process that has run nothing, so that no lock, thread or patch of ours goes along.
FRESH = _FreshContext()
FRESH.set_forkserver_preload(["rope_patch.training.trainer", "training_loop"])


_STARTING = threading.Lock()


def run_fresh(function, *arguments):
    """Run a function in a fresh process and return the exit code; several threads may do so.

    `Process.start` polls the processes of other threads, too, and takes their exit codes from them.
    """
    process = FRESH.Process(target=function, args=arguments)
    with _STARTING:
        process.start()
    connection.wait([process.sentinel])
    with _STARTING:
        process.join()
    return process.exitcode


def run_code(code):
    """Run Python in a fresh process that has imported the package; fail where it fails."""
    assert run_fresh(exec, code) == 0


def run_forked(job, size=2, patience=300):
    """Run a job in several forked processes of one process group.

    Args:
        job: Called without arguments in each process.
        size: Number of processes.
        patience: Seconds to wait for each result.

    Returns:
        The job's results by rank.

    Raises:
        BaseException: The job raised it in one of the processes.
    """
    port, queue = free_port(), FORK.Queue()
    members = [
        FORK.Process(target=_member, args=(job, port, rank, size, queue)) for rank in range(size)
    ]
    try:
        for process in members:
            process.start()
        results = dict(queue.get(timeout=patience) for _ in members)
        for process in members:
            process.join(10)
    finally:
        for process in members:
            process.kill()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)]


def _member(job, port, rank, size, queue):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    PartialState._reset_state()  # the parent's state
    try:
        queue.put((rank, job()))
    except BaseException as error:
        queue.put((rank, error))


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def launch(script, folder, *arguments, processes=2, patience=300, context=FRESH, **variables):
    """Run a script of tests/distributed in processes that can meet in `FOLDER/rendezvous`.

    If a process fails, or after `patience` seconds, end all of them and fail with their output
    (`FOLDER/RANK.log`).
    """
    failure_file = folder / "failed"  # shared, so that later tests fail at once
    if failure_file.exists():
        pytest.fail(failure_file.read_text(), pytrace=False)
    (folder / "rendezvous").unlink(missing_ok=True)
    logs = [folder / f"{rank}.log" for rank in range(processes)]
    running = []
    try:
        for rank, log in enumerate(logs):
            words = (SCRIPTS / script, folder, *arguments)
            own = environment(rank, processes) | variables
            running.append(context.Process(target=_run_script, args=(words, own, log)))
            running[-1].start()
        deadline = time.monotonic() + patience
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.exitcode for process in running]
    finally:
        for process in running:
            process.kill()
            process.join()
    if any(code != 0 for code in codes):
        output = "\n".join(f"-- process {log.stem} --\n{log.read_text()}" for log in logs)
        failure_file.write_text(f"exit codes {codes} (None: killed by the test)\n{output}")
        pytest.fail(failure_file.read_text(), pytrace=False)


def _run_script(words, variables, log):
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ |= variables
    torch.set_num_threads(1)
    sys.argv = [str(word) for word in words]
    sys.path[:0] = [str(words[0].parent), str(TESTS)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def environment(rank, processes):
    """Return the environment that torchrun would set for a process, without a GPU."""
    single = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
    if processes == 1:
        return single
    return single | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }


def python_path():
    """Return PYTHONPATH with the tests' own packages in front."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def leave_process_group():
    """Wait for the other processes, destroy the process group, and exit with code 0.

    The interpreter is not torn down. A device mesh can keep a gloo group alive after its
    destruction, and gloo's threads abort a process that is torn down while they run ("terminate
    called without an active exception", https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def shared_folder(tmp_path_factory, name):
    """Lock a folder that pytest-xdist's workers share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / name
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        yield folder
