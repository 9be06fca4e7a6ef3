"""Test processes that share an evaluation, and the lock of its folder."""

import errno
import json
import time
from types import SimpleNamespace

import accelerate
import pytest
import torch
from helpers.evaluations import answer_lines, measured_numbers, request
from helpers.processes import FORK, run_forked

from rope_patch.evaluation import evaluate
from rope_patch.runs import RunFolder
from rope_patch.utils import Processes


def small(folder):
    return request(folder, controls=True, lengths=(336,))


def shares_of_processes(items, cost, size):
    """Return the share of a list that each of `size` processes takes."""
    shares = []
    for rank in range(size):
        process = Processes(alone=True)
        process.rank, process.size = rank, size
        shares.append(process.own_share(items, cost))
    return shares


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "costs", [[], [5], [1] * 7, [1, 1, 1, 100], [100, 1, 1, 1], list(range(1, 40))], ids=str
)
def test_every_item_has_one_process_and_shares_are_contiguous(size, costs):
    items = list(enumerate(costs))
    shares = shares_of_processes(items, lambda item: item[1], size)
    assert [item for share in shares for item in share] == items
    if costs:  # no process has more than a fair share and one item
        fair = sum(costs) / size
        assert max(sum(c for _, c in share) for share in shares) <= fair + max(costs)


def test_a_process_that_is_alone_ignores_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    process = Processes(alone=True)
    assert (process.rank, process.size, process.is_main, process.device) == (0, 1, True, None)
    process.wait()
    assert process.broadcast([1]) == [1]
    assert process.own_share([1, 2, 3], lambda _: 1) == [1, 2, 3]


def test_processes_that_cannot_meet_are_refused(monkeypatch):
    """Each would compute its own share only, and the others' would be missing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(
        ValueError, match=r"expected 2 processes \(WORLD_SIZE\), accelerate found 1"
    ):
        Processes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes are forked, which CUDA forbids")
@pytest.mark.usefixtures("never_drawn")
def test_two_processes_give_the_results_of_one(tmp_path):
    eval_request = small(tmp_path / "two")
    expected = evaluate(small(tmp_path / "one"))
    results_by_rank = run_forked(lambda: evaluate(eval_request))
    for results in results_by_rank:
        assert results["perplexity"] == expected["perplexity"]
    assert measured_numbers(results_by_rank[0]) == measured_numbers(
        expected
    )  # lm-eval gives scores to the main process alone
    names = {path.name for path in (tmp_path / "two" / "cache").glob("answers-*")}
    assert names == {"answers-0.jsonl", "answers-1.jsonl"}  # both took part
    keys = [key for key, _ in answer_lines(tmp_path / "two")]
    assert len(keys) == len(set(keys))
    assert set(keys) == {key for key, _ in answer_lines(tmp_path / "one")}
    pieces = [{p.name for p in (tmp_path / n / "cache").glob("piece-*")} for n in ("one", "two")]
    assert pieces[0] == pieces[1]
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    assert report["run"]["processes"] == 2
    assert report["retrieval"] == expected["retrieval"]  # the main process wrote it
    # One process can finish what two began.
    repeated = evaluate(small(tmp_path / "two"))
    assert measured_numbers(repeated) == measured_numbers(expected)
    assert [key for key, _ in answer_lines(tmp_path / "two")] == keys


# --- The lock of a folder: one run at a time, and no lock after a kill or an error ----------------


def _hold(folder, ready):
    with RunFolder(folder).locked():
        ready.set()
        time.sleep(600)  # until it is killed


def test_a_killed_process_leaves_no_lock(tmp_path):
    ready = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    refused = pytest.raises(ValueError, match=f"another process works in {tmp_path}: wait for it")
    with refused, RunFolder(tmp_path).locked():
        pass
    holder.kill()
    holder.join()
    with RunFolder(tmp_path).locked(Processes()):
        pass


def test_a_second_evaluation_is_refused_before_it_writes(tmp_path):
    with RunFolder(tmp_path).locked(Processes()):
        with pytest.raises(ValueError, match="another process works in"):
            evaluate(request(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_all_processes_of_a_run_get_the_lock_or_none(tmp_path):
    def try_lock():
        try:
            with RunFolder(tmp_path).locked(Processes()):
                return "works"
        except ValueError as error:
            return str(error)

    with RunFolder(tmp_path).locked(Processes()):
        first, second = run_forked(try_lock)
    assert "another process works in" in first
    assert second == first
    assert run_forked(try_lock) == ["works", "works"]


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyError), RunFolder(tmp_path).locked(Processes()):
        raise KeyError
    with RunFolder(tmp_path).locked():
        pass


def test_a_folder_that_cannot_be_locked_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(OSError, match=r"file cannot be locked .*give another folder")
    with refused, RunFolder(tmp_path / "file").locked():
        pass

    def no_locks(*_):  # as on some network file systems
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    refused = pytest.raises(OSError, match=r"cannot be locked .*No locks available.*another folder")
    with refused, RunFolder(tmp_path).locked():
        pass
