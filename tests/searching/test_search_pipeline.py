"""Searches on a tiny trained model: results, kills, refusals, processes."""

import json
import random

import pytest
import torch
from helpers.processes import together
from helpers.search_fixtures import (
    LENGTH,
    arguments,
    killed,
    lines,
    load,
    numbers,
    one_of,
    questions,
    registered,
    stretched,
)

import rope_patch
from rope_patch.extension import Extension
from rope_patch.searching import pipeline
from rope_patch.searching.journal import JOURNAL_FILE
from rope_patch.searching.measure.fitness import Fitness
from rope_patch.searching.strategies.registry import STRATEGIES


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(autouse=True)
def walking(monkeypatch):
    monkeypatch.setattr(pipeline, "STRATEGIES", registered())


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A search that nobody disturbed, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    before, pipeline.STRATEGIES = pipeline.STRATEGIES, registered()
    found = rope_patch.search(model, **arguments(folder=folder))
    pipeline.STRATEGIES = before
    return found, folder


def test_the_best_complete_candidate_is_found(whole):
    found, _ = whole
    assert [entry["number"] for entry in found.history] == list(range(7))
    assert found.history[0]["method"] == "yarn"
    best = min((e for e in found.history if e["complete"]), key=lambda e: e["fitness"])
    assert vars(found.candidate) == {name: best[name] for name in ("origin", "method", "options")}
    assert found.fitness == best["fitness"]
    running_best = float("inf")
    for entry in found.history:
        if entry["complete"]:
            running_best = min(running_best, entry["fitness"])
        assert entry["best"] == running_best


def test_the_result_patches_and_gives_the_held_out_loss(whole, model):
    found, _ = whole
    held_out = questions(seed=2, count=4)
    with rope_patch.patch(model, "longrope", **found):
        losses = []
        for sample in held_out:
            ids = torch.tensor([sample.ids])
            with torch.no_grad():
                likely = model(ids, use_cache=False).logits[0].log_softmax(-1)
            losses += [-likely[p - 1, sample.ids[p]].item() for p in sample.positions]
    assert found.held_out["found"]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_held_out_numbers_compare_with_the_known_methods(whole, model):
    found, _ = whole
    told = found.held_out
    assert set(told) == {
        *("found", "none", "yarn", "ntk", "linear"),
        *("against none", "against yarn", "against ntk", "against linear"),
    }
    on = Fitness(model, questions(seed=2, count=4), Extension("longrope", length=LENGTH))
    plain = on.measure(None)
    assert told["none"]["nll"] == plain.fitness
    assert told["none"]["hits"] == sum(map(sum, plain.hits))
    assert told["none"]["answers"] == 32
    for label in ("none", "yarn", "ntk", "linear"):
        less = told["found"]["nll"] - told[label]["nll"]
        assert told[f"against {label}"]["nll"] == pytest.approx(less)
        low, high = told[f"against {label}"]["interval"]
        assert low <= less <= high


def test_the_model_is_as_before_and_the_result_is_saved(whole, model):
    found, folder = whole
    assert rope_patch.current(model) is None
    assert rope_patch.SearchResult.load(folder).arguments() == found.arguments()
    assert found.evaluations_per_minute > 0


def test_a_finished_search_measures_nothing_again(whole, model, monkeypatch):
    found, folder = whole
    monkeypatch.setattr(Fitness, "measure", None)
    again = rope_patch.search(model, **arguments(folder=folder))
    assert numbers(again) == numbers(found)


def test_a_killed_search_goes_on_where_it_was(whole, model, tmp_path):
    found, folder = whole
    rng = random.Random(7)
    after = sorted(rng.sample(range(1, 12), 2))
    written = 0
    for number, torn in zip(after, (True, False), strict=True):
        killed(number - written, torn, **arguments(folder=tmp_path))
        assert lines(tmp_path) == lines(folder)[:number]
        written = number
        before = (tmp_path / JOURNAL_FILE).read_bytes()
    again = rope_patch.search(model, **arguments(folder=tmp_path))
    assert numbers(again) == numbers(found)
    assert (tmp_path / JOURNAL_FILE).read_bytes().startswith(before)
    assert lines(tmp_path) == lines(folder)
    assert len(set(lines(tmp_path))) == len(lines(tmp_path))


def test_a_larger_budget_goes_on(whole, model, tmp_path):
    found, _ = whole
    rope_patch.search(model, **arguments(folder=tmp_path, budget=3))
    more = rope_patch.search(model, **arguments(folder=tmp_path))
    assert numbers(more) == numbers(found)
    assert sum(key.startswith("search/") for key in lines(tmp_path)) == 7


def test_a_larger_budget_is_refused_where_the_strategy_plans_by_it(whole, model, monkeypatch):
    _, folder = whole
    before = (folder / JOURNAL_FILE).read_bytes()
    monkeypatch.setattr(pipeline, "STRATEGIES", registered(resumable=False))
    with pytest.raises(ValueError, match="walk plans by its budget, which was 6 when"):
        rope_patch.search(model, **arguments(folder=folder, budget=8))
    assert (folder / JOURNAL_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples": questions(count=4, seed=9)}, "samples is"),
        ({"seed": 43}, "seed is 42 there and 43 here"),
        ({"method": "yarn-rcd"}, 'strategy is "walk" there and "yarn-rcd" here'),
        ({"length": LENGTH + 1}, "factor is 2.0 there"),
        ({"trained_length": 255, "short": None}, "trained_length is 256 there and 255 here"),
        ({"step": 0.5}, 'options is {} there and {"step": 0.5} here'),
    ],
)
def test_the_state_of_another_search_is_refused(whole, model, changes, said):
    _, folder = whole
    before = (folder / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match=f"the state of another search.*{said}"):
        rope_patch.search(model, **arguments(folder=folder, **changes))
    assert (folder / JOURNAL_FILE).read_bytes() == before


def test_the_state_of_another_model_is_refused(whole):
    _, folder = whole
    before = (folder / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match="the state of another search: weights is"):
        rope_patch.search(load("qwen3"), **arguments(folder=folder))
    assert (folder / JOURNAL_FILE).read_bytes() == before


def test_a_failing_candidate_is_recorded_and_the_search_goes_on(model, monkeypatch, tmp_path):
    def propose(space, budget, seed):
        told.append((yield stretched(1.0)))
        told.append((yield stretched(9.0)))
        told.append((yield stretched(1.2)))

    told, measured = [], []
    forward = model.model.layers[0].forward

    def fail(*args, **kwargs):
        handle = rope_patch.current(model)
        if handle and handle.method.options().get("long_factor") == list(
            stretched(9.0).options["long_factor"]
        ):
            measured.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(pipeline, "STRATEGIES", registered(propose))
    monkeypatch.setattr(model.model.layers[0], "forward", fail)
    found = rope_patch.search(model, **arguments(folder=tmp_path))
    assert measured
    assert [entry["number"] for entry in found.history] == [0, 1, 2, 3]
    assert found.history[2]["fitness"] == told[1] == float("inf")
    assert found.history[2]["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert told[0] < float("inf")
    assert told[2] < float("inf")
    kept = [json.loads(line) for line in (tmp_path / JOURNAL_FILE).read_text().splitlines()]
    assert any("CUDA out of memory" in json.dumps(line) for line in kept)


def test_what_was_measured_is_not_measured_again(model, monkeypatch):
    def propose(space, budget, seed):
        told.append((yield rope_patch.searching.Candidate("known", "yarn")))
        told.append((yield stretched(1.0)))
        told.append((yield stretched(1.0)))

    told, measured = [], []
    measure = Fitness.measure
    monkeypatch.setattr(pipeline, "STRATEGIES", registered(propose))
    monkeypatch.setattr(
        Fitness, "measure", lambda *a, **k: measured.append(a[1]) or measure(*a, **k)
    )
    found = rope_patch.search(model, **arguments(short=None))
    assert told[0] == found.history[0]["fitness"]
    assert told[1] == told[2]
    assert [candidate.method for candidate in measured[:2]] == ["yarn", "longrope"]
    final = 4 if found.candidate.method == "yarn" else 5  # on held-out samples
    assert len(measured) == 2 + final


# -- more than one process, real strategies --------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes are forked, which CUDA forbids")
def test_two_processes_find_what_one_finds(whole, model, tmp_path):
    found, folder = whole
    for one in together(lambda: one_of(**arguments(folder=tmp_path))):
        assert one == numbers(found)
    assert lines(tmp_path) == lines(folder)
    assert numbers(rope_patch.SearchResult.load(tmp_path))[:2] == numbers(found)[:2]


@pytest.mark.parametrize("method", STRATEGIES)
def test_every_strategy_runs_and_is_no_worse_than_yarn(model, method):
    found = rope_patch.search(model, **arguments(method=method, budget=3, short=None))
    assert found.strategy == method
    assert 2 <= len(found.history) <= 4
    assert found.fitness <= found.history[0]["fitness"]


@pytest.mark.slow
def test_a_real_language_model_is_searched_by_needles(tmp_path):
    pytest.importorskip("platformdirs")
    found = rope_patch.search(
        "demo",
        trained_length=512,
        length=1024,
        budget=2,
        count=1,
        held_out=2,
        folder=tmp_path,
        progress=False,
    )
    assert found.trained_length == 512
    assert found.asked == {"trained_length": 512}
    assert found.held_out["found"]["answers"] == 8
    # It finds seven digits in a text, and cannot guess them.
    assert found.held_out["found"]["nll"] < 1.5
    able = [json.loads(line) for line in (tmp_path / JOURNAL_FILE).read_text().splitlines()][1][
        "value"
    ]
    assert able["able"]
    assert able["nll"] < 0.8 < 2 < able["control"]
