"""Several processes on this machine, as torchrun would start them, forked from this one."""

import multiprocessing
import os
import socket

from accelerate import PartialState

FORK = multiprocessing.get_context("fork")  # a fresh interpreter takes seconds to import torch


def together(job, size=2, patience=120):
    """Runs a job in several processes that know each other.

    Args:
        job: Called without arguments in each process.
        size: How many.
        patience: Seconds to wait for each result.

    Returns:
        What the job returned in each, by rank.

    Raises:
        BaseException: What the job raised in one of them.
    """
    port, queue = _free_port(), FORK.Queue()
    members = [
        FORK.Process(target=_member, args=(job, port, rank, size, queue)) for rank in range(size)
    ]
    try:
        for process in members:
            process.start()
        found = dict(queue.get(timeout=patience) for _ in members)
        for process in members:
            process.join(10)
    finally:
        for process in members:
            process.kill()
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[rank] for rank in range(size)]


def _member(job, port, rank, size, queue):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    PartialState._reset_state()  # of the process that this one was forked from
    try:
        queue.put((rank, job()))
    except BaseException as error:
        queue.put((rank, error))


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
