"""Test processes that share an evaluation: the results of one process, and no repeated work."""

import json
from types import SimpleNamespace

import accelerate
import pytest
import torch
from helpers.evaluations import answer_lines, measured_numbers, request
from helpers.processes import run_forked

from rope_patch.evaluation.pipeline import evaluate
from rope_patch.utils.processes import Processes


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
def test_two_processes_give_the_results_of_one(tmp_path):
    eval_request = request(tmp_path / "two", controls=True)
    expected = evaluate(request(tmp_path / "one", controls=True))
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
    repeated = evaluate(request(tmp_path / "two", controls=True))
    assert measured_numbers(repeated) == measured_numbers(expected)
    assert [key for key, _ in answer_lines(tmp_path / "two")] == keys
