"""One run at a time works in a folder, and a run that was killed is none."""

import errno
import time

import pytest
from helpers.evaluations import request
from helpers.processes import FORK, together

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


def test_all_processes_of_a_second_run_end_and_all_of_a_single_one_work(tmp_path):
    def work():
        try:
            with lock_folder(tmp_path, Processes()):
                return "works"
        except ValueError as error:
            return str(error)

    with lock_folder(tmp_path, Processes()):
        first, second = together(work)
    assert "another process works in" in first
    assert second == first
    assert together(work) == ["works", "works"]


def test_the_lock_is_let_go_after_an_error(tmp_path):
    with pytest.raises(KeyError), lock_folder(tmp_path, Processes()):
        raise KeyError
    FolderLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_locked_is_an_error_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file cannot be locked .*give another folder"):
        FolderLock(tmp_path / "file").acquire()

    def no_locks(*_):  # as network file systems have it
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match=r"cannot be locked .*No locks available.*another folder"):
        FolderLock(tmp_path).acquire()
