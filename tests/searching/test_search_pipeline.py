"""Test searches on a tiny trained model: results, resumption, refusals, several processes."""

import json
import random

import pytest
import torch
from helpers.processes import run_forked
from helpers.search_fixtures import (
    LENGTH,
    arguments,
    journal_keys,
    load,
    questions,
    run_until_killed,
    search_and_report,
    search_numbers,
    strategies_with_walk,
    stretch_candidate,
)

import rope_patch
from rope_patch.extension import Extension
from rope_patch.searching import pipeline
from rope_patch.searching.journal import JOURNAL_FILE
from rope_patch.searching.measure.fitness import Fitness
from rope_patch.searching.strategies.registry import STRATEGIES

pytestmark = pytest.mark.usefixtures("walk_strategy")


@pytest.fixture(scope="module")
def finished_search(model, tmp_path_factory):
    """Return the result and the folder of an uninterrupted search."""
    folder = tmp_path_factory.mktemp("whole")
    before, pipeline.STRATEGIES = pipeline.STRATEGIES, strategies_with_walk()
    result = rope_patch.search(model, **arguments(folder=folder))
    pipeline.STRATEGIES = before
    return result, folder


def test_the_result_is_the_best_complete_candidate(finished_search):
    result, _ = finished_search
    assert [entry["number"] for entry in result.history] == list(range(7))
    assert result.history[0]["method"] == "yarn"
    best = min((e for e in result.history if e["complete"]), key=lambda e: e["fitness"])
    assert vars(result.candidate) == {name: best[name] for name in ("origin", "method", "options")}
    assert result.fitness == best["fitness"]
    running_best = float("inf")
    for entry in result.history:
        if entry["complete"]:
            running_best = min(running_best, entry["fitness"])
        assert entry["best"] == running_best


def test_a_model_patched_with_the_result_has_the_held_out_loss(finished_search, model):
    result, _ = finished_search
    held_out = questions(seed=2, count=4)
    with rope_patch.patch(model, "longrope", **result):
        losses = []
        for sample in held_out:
            ids = torch.tensor([sample.ids])
            with torch.no_grad():
                likely = model(ids, use_cache=False).logits[0].log_softmax(-1)
            losses += [-likely[p - 1, sample.ids[p]].item() for p in sample.positions]
    assert result.held_out["found"]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_held_out_results_compare_with_known_methods(finished_search, model):
    result, _ = finished_search
    held_out = result.held_out
    assert set(held_out) == {
        *("found", "none", "yarn", "ntk", "linear"),
        *("against none", "against yarn", "against ntk", "against linear"),
    }
    fitness = Fitness(model, questions(seed=2, count=4), Extension("longrope", length=LENGTH))
    plain = fitness.measure(None)
    assert held_out["none"]["nll"] == plain.fitness
    assert held_out["none"]["hits"] == sum(map(sum, plain.hits))
    assert held_out["none"]["answers"] == 32
    for label in ("none", "yarn", "ntk", "linear"):
        difference = held_out["found"]["nll"] - held_out[label]["nll"]
        assert held_out[f"against {label}"]["nll"] == pytest.approx(difference)
        low, high = held_out[f"against {label}"]["interval"]
        assert low <= difference <= high


def test_the_model_is_unpatched_afterwards_and_the_result_is_saved(finished_search, model):
    result, folder = finished_search
    assert rope_patch.current(model) is None
    assert rope_patch.SearchResult.load(folder).arguments() == result.arguments()
    assert result.evaluations_per_minute > 0


def test_a_finished_search_measures_nothing_again(finished_search, model, monkeypatch):
    result, folder = finished_search
    monkeypatch.setattr(Fitness, "measure", None)
    repeated = rope_patch.search(model, **arguments(folder=folder))
    assert search_numbers(repeated) == search_numbers(result)


def test_a_killed_search_resumes_where_it_stopped(finished_search, model, tmp_path):
    result, folder = finished_search
    rng = random.Random(7)
    kill_points = sorted(rng.sample(range(1, 12), 2))
    written = 0
    for number, torn in zip(kill_points, (True, False), strict=True):
        run_until_killed(number - written, torn, **arguments(folder=tmp_path))
        assert journal_keys(tmp_path) == journal_keys(folder)[:number]
        written = number
        before = (tmp_path / JOURNAL_FILE).read_bytes()
    resumed = rope_patch.search(model, **arguments(folder=tmp_path))
    assert search_numbers(resumed) == search_numbers(result)
    assert (tmp_path / JOURNAL_FILE).read_bytes().startswith(before)
    assert journal_keys(tmp_path) == journal_keys(folder)
    assert len(set(journal_keys(tmp_path))) == len(journal_keys(tmp_path))


def test_a_larger_budget_continues_the_search(finished_search, model, tmp_path):
    result, _ = finished_search
    rope_patch.search(model, **arguments(folder=tmp_path, budget=3))
    continued = rope_patch.search(model, **arguments(folder=tmp_path))
    assert search_numbers(continued) == search_numbers(result)
    assert sum(key.startswith("search/") for key in journal_keys(tmp_path)) == 7


def test_a_larger_budget_is_refused_if_the_strategy_plans_by_it(
    finished_search, model, monkeypatch
):
    _, folder = finished_search
    before = (folder / JOURNAL_FILE).read_bytes()
    monkeypatch.setattr(pipeline, "STRATEGIES", strategies_with_walk(resumable=False))
    with pytest.raises(ValueError, match="walk plans by its budget, which was 6 when"):
        rope_patch.search(model, **arguments(folder=folder, budget=8))
    assert (folder / JOURNAL_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": questions(count=4, seed=9)}, "samples is"),
        ({"seed": 43}, "seed is 42 there and 43 here"),
        ({"method": "yarn-rcd"}, 'strategy is "walk" there and "yarn-rcd" here'),
        ({"length": LENGTH + 1}, "factor is 2.0 there"),
        ({"trained_length": 255, "short": None}, "trained_length is 256 there and 255 here"),
        ({"step": 0.5}, 'options is {} there and {"step": 0.5} here'),
    ],
)
def test_the_journal_of_another_search_is_refused(finished_search, model, changes, message):
    _, folder = finished_search
    before = (folder / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match=f"the state of another search.*{message}"):
        rope_patch.search(model, **arguments(folder=folder, **changes))
    assert (folder / JOURNAL_FILE).read_bytes() == before


def test_the_journal_of_another_model_is_refused(finished_search):
    _, folder = finished_search
    before = (folder / JOURNAL_FILE).read_bytes()
    with pytest.raises(ValueError, match="the state of another search: weights is"):
        rope_patch.search(load("qwen3"), **arguments(folder=folder))
    assert (folder / JOURNAL_FILE).read_bytes() == before


def test_the_journal_of_a_model_with_another_config_is_refused(finished_search, model, monkeypatch):
    _, folder = finished_search
    before = (folder / JOURNAL_FILE).read_bytes()
    monkeypatch.setattr(model.config, "rms_norm_eps", 0.01)  # no saved tensor says so
    with pytest.raises(ValueError, match="the state of another search: config is"):
        rope_patch.search(model, **arguments(folder=folder))
    assert (folder / JOURNAL_FILE).read_bytes() == before


def test_a_failing_candidate_is_recorded_and_the_search_continues(model, monkeypatch, tmp_path):
    def propose(space, budget, seed):
        fitnesses.append((yield stretch_candidate(1.0)))
        fitnesses.append((yield stretch_candidate(9.0)))
        fitnesses.append((yield stretch_candidate(1.2)))

    fitnesses, failures = [], []
    forward = model.model.layers[0].forward

    def fail(*args, **kwargs):
        handle = rope_patch.current(model)
        if handle and handle.method.options().get("long_factor") == list(
            stretch_candidate(9.0).options["long_factor"]
        ):
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(pipeline, "STRATEGIES", strategies_with_walk(propose))
    monkeypatch.setattr(model.model.layers[0], "forward", fail)
    result = rope_patch.search(model, **arguments(folder=tmp_path))
    assert failures
    assert [entry["number"] for entry in result.history] == [0, 1, 2, 3]
    assert result.history[2]["fitness"] == fitnesses[1] == float("inf")
    assert result.history[2]["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert fitnesses[0] < float("inf")
    assert fitnesses[2] < float("inf")
    entries = [json.loads(line) for line in (tmp_path / JOURNAL_FILE).read_text().splitlines()]
    assert any("CUDA out of memory" in json.dumps(line) for line in entries)


def test_a_repeated_candidate_is_not_measured_again(model, monkeypatch):
    def propose(space, budget, seed):
        fitnesses.append((yield rope_patch.searching.Candidate("known", "yarn")))
        fitnesses.append((yield stretch_candidate(1.0)))
        fitnesses.append((yield stretch_candidate(1.0)))

    fitnesses, candidates = [], []
    measure = Fitness.measure
    monkeypatch.setattr(pipeline, "STRATEGIES", strategies_with_walk(propose))
    monkeypatch.setattr(
        Fitness, "measure", lambda *a, **k: candidates.append(a[1]) or measure(*a, **k)
    )
    result = rope_patch.search(model, **arguments(short=None))
    assert fitnesses[0] == result.history[0]["fitness"]
    assert fitnesses[1] == fitnesses[2]
    assert [candidate.method for candidate in candidates[:2]] == ["yarn", "longrope"]
    held_out_count = 4 if result.candidate.method == "yarn" else 5  # on held-out samples
    assert len(candidates) == 2 + held_out_count


# -- more than one process, real strategies --------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes are forked, which CUDA forbids")
def test_two_processes_find_what_one_finds(finished_search, model, tmp_path):
    result, folder = finished_search
    for process_numbers in run_forked(lambda: search_and_report(**arguments(folder=tmp_path))):
        assert process_numbers == search_numbers(result)
    assert journal_keys(tmp_path) == journal_keys(folder)
    assert search_numbers(rope_patch.SearchResult.load(tmp_path))[:2] == search_numbers(result)[:2]


@pytest.mark.parametrize("method", STRATEGIES)
def test_every_strategy_runs_and_is_no_worse_than_yarn(model, method):
    result = rope_patch.search(model, **arguments(method=method, budget=3, short=None))
    assert result.strategy == method
    assert 2 <= len(result.history) <= 4
    assert result.fitness <= result.history[0]["fitness"]


@pytest.mark.slow
def test_a_search_on_a_real_language_model_uses_needles(tmp_path):
    pytest.importorskip("platformdirs")
    result = rope_patch.search(
        "demo",
        trained_length=512,
        length=1024,
        budget=2,
        count=1,
        held_out=2,
        folder=tmp_path,
        progress=False,
    )
    assert result.trained_length == 512
    assert result.asked == {"trained_length": 512}
    assert result.held_out["found"]["answers"] == 8
    # The model finds seven digits in a text, and cannot guess them.
    assert result.held_out["found"]["nll"] < 1.5
    sanity_check = [
        json.loads(line) for line in (tmp_path / JOURNAL_FILE).read_text().splitlines()
    ][1]["value"]
    assert sanity_check["able"]
    assert sanity_check["nll"] < 0.8 < 2 < sanity_check["control"]
