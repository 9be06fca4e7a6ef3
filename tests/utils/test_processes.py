"""Several processes on one evaluation: the same results as one, and nothing done twice."""

import json
from types import SimpleNamespace

import accelerate
import pytest
import torch
from helpers.evaluations import lines, numbers, request
from helpers.processes import together

from rope_patch.evaluation.pipeline import evaluate
from rope_patch.utils.processes import Processes


def parts(items, cost, size):
    """What each of so many processes takes of a list."""
    found = []
    for rank in range(size):
        one = Processes(alone=True)
        one.rank, one.size = rank, size
        found.append(one.own_share(items, cost))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "costs", [[], [5], [1] * 7, [1, 1, 1, 100], [100, 1, 1, 1], list(range(1, 40))], ids=str
)
def test_every_item_is_one_processs_and_neighbours_stay_together(size, costs):
    items = list(enumerate(costs))
    found = parts(items, lambda item: item[1], size)
    assert [item for part in found for item in part] == items
    if costs:  # nobody has more than a fair share and one item
        fair = sum(costs) / size
        assert max(sum(c for _, c in part) for part in found) <= fair + max(costs)


def test_alone_is_alone_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    one = Processes(alone=True)
    assert (one.rank, one.size, one.is_main, one.device) == (0, 1, True, None)
    one.wait()
    assert one.broadcast([1]) == [1]
    assert one.own_share([1, 2, 3], lambda _: 1) == [1, 2, 3]


def test_processes_that_cannot_meet_are_refused(monkeypatch):
    """Each would do its part, and nobody the rest."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(
        ValueError, match=r"expected 2 processes \(WORLD_SIZE\), accelerate found 1"
    ):
        Processes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes are forked, which CUDA forbids")
def test_two_processes_find_what_one_finds(tmp_path):
    asked = request(tmp_path / "two", controls=True)
    expected = evaluate(request(tmp_path / "one", controls=True))
    found = together(lambda: evaluate(asked))
    for results in found:
        assert results["perplexity"] == expected["perplexity"]
    assert numbers(found[0]) == numbers(expected)  # lm-eval gives scores to the main process alone
    written = {path.name for path in (tmp_path / "two" / "cache").glob("answers-*")}
    assert written == {"answers-0.jsonl", "answers-1.jsonl"}  # both took part
    keys = [key for key, _ in lines(tmp_path / "two")]
    assert len(keys) == len(set(keys))
    assert set(keys) == {key for key, _ in lines(tmp_path / "one")}
    pieces = [{p.name for p in (tmp_path / n / "cache").glob("piece-*")} for n in ("one", "two")]
    assert pieces[0] == pieces[1]
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    assert report["run"]["processes"] == 2
    assert report["retrieval"] == expected["retrieval"]  # the main process wrote it
    # What two began, one can finish, and the other way round.
    again = evaluate(request(tmp_path / "two", controls=True))
    assert numbers(again) == numbers(expected)
    assert [key for key, _ in lines(tmp_path / "two")] == keys
