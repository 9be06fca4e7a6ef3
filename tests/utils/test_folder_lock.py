"""Test the folder lock: one run at a time, and no lock after a kill or an error."""

import errno
import time

import pytest
from helpers.evaluations import request
from helpers.processes import FORK, run_forked

from rope_patch.evaluation.pipeline import evaluate
from rope_patch.utils.folder_lock import FolderLock, lock_folder
from rope_patch.utils.processes import Processes


def _hold(folder, ready):
    lock = FolderLock(folder)
    lock.acquire()
    ready.set()
    time.sleep(600)  # until it is killed


def test_a_killed_process_leaves_no_lock(tmp_path):
    ready = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match=f"another process works in {tmp_path}: wait for it"):
        FolderLock(tmp_path).acquire()
    holder.kill()
    holder.join()
    with lock_folder(tmp_path, Processes()):
        pass


def test_a_second_evaluation_is_refused_before_it_writes(tmp_path):
    with lock_folder(tmp_path, Processes()):
        with pytest.raises(ValueError, match="another process works in"):
            evaluate(request(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_all_processes_of_a_run_get_the_lock_or_none(tmp_path):
    def try_lock():
        try:
            with lock_folder(tmp_path, Processes()):
                return "works"
        except ValueError as error:
            return str(error)

    with lock_folder(tmp_path, Processes()):
        first, second = run_forked(try_lock)
    assert "another process works in" in first
    assert second == first
    assert run_forked(try_lock) == ["works", "works"]


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), lock_folder(tmp_path, Processes()):
        raise KeyError
    FolderLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_locked_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file cannot be locked .*give another folder"):
        FolderLock(tmp_path / "file").acquire()

    def no_locks(*_):  # as on some network file systems
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match=r"cannot be locked .*No locks available.*another folder"):
        FolderLock(tmp_path).acquire()
