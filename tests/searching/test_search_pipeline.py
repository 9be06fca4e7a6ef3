"""Test searches on a tiny trained model: results, resumption, refusals, several processes."""

import json
import random

import pytest
import torch
from helpers.processes import run_forked
from helpers.search_fixtures import (
    LENGTH,
    TRAINED,
    arguments,
    journal_keys,
    load,
    make_walk,
    questions,
    run_until_killed,
    search_and_report,
    search_numbers,
    stretch_candidate,
)
from helpers.tiny_models import make_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch.searching import STRATEGIES, Candidate, Fitness

pytestmark = pytest.mark.usefixtures("walk_strategy")


@pytest.fixture(scope="module")
def finished_search(model, tmp_path_factory):
    """Return the result and the folder of an uninterrupted search."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(STRATEGIES, "walk", make_walk())
        return rope_patch.search(model, **arguments(folder=folder)), folder


def test_the_result_is_the_best_complete_candidate_and_saved(finished_search, model):
    result, folder = finished_search
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
    assert rope_patch.current(model) is None
    assert rope_patch.SearchResult.load(folder).arguments() == result.arguments()
    assert result.evaluations_per_minute > 0


def test_held_out_losses_are_those_of_patched_models(finished_search, model):
    result, _ = finished_search
    held_out = result.held_out
    labels = {"none", "yarn", "ntk", "linear"}
    assert set(held_out) == {"found", *labels, *(f"against {label}" for label in labels)}
    for label in ("found", "none"):
        handle = None if label == "none" else rope_patch.patch(model, "longrope", **result)
        losses, hits = [], 0
        for sample in questions(seed=2, count=4):
            ids = torch.tensor([sample.ids])
            with torch.no_grad():
                likely = model(ids, use_cache=False).logits[0].log_softmax(-1)
            losses += [-likely[p - 1, sample.ids[p]].item() for p in sample.positions]
            hits += sum(int(likely[p - 1].argmax() == sample.ids[p]) for p in sample.positions)
        if handle is not None:
            handle.undo()
        assert held_out[label]["nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert (held_out[label]["hits"], held_out[label]["answers"]) == (hits, 32)
    for label in labels:
        difference = held_out["found"]["nll"] - held_out[label]["nll"]
        assert held_out[f"against {label}"]["nll"] == pytest.approx(difference)
        low, high = held_out[f"against {label}"]["interval"]
        assert low <= difference <= high


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
        before = (tmp_path / "state.jsonl").read_bytes()
    resumed = rope_patch.search(model, **arguments(folder=tmp_path))
    assert search_numbers(resumed) == search_numbers(result)
    assert (tmp_path / "state.jsonl").read_bytes().startswith(before)
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
    before = (folder / "state.jsonl").read_bytes()
    monkeypatch.setitem(STRATEGIES, "walk", make_walk(resumable=False))
    with pytest.raises(ValueError, match="walk plans by its budget, which was 6"):
        rope_patch.search(model, **arguments(folder=folder, budget=8))
    assert (folder / "state.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"samples": questions(count=4, seed=9)}, "samples"),
        ({"seed": 43}, "seed .* 42 .* 43"),
        ({"method": "yarn-rcd"}, 'strategy .* "walk" .* "yarn-rcd"'),
        ({"length": LENGTH + 1}, "factor .* 2.0"),
        ({"trained_length": 255, "short": None}, "trained_length .* 256 .* 255"),
        ({"step": 0.5}, r'options .* \{\} .* \{"step": 0.5\}'),
    ],
)
def test_the_journal_of_another_search_is_refused(finished_search, model, changes, facts):
    _, folder = finished_search
    before = (folder / "state.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"another search.*{facts}"):
        rope_patch.search(model, **arguments(folder=folder, **changes))
    assert (folder / "state.jsonl").read_bytes() == before


def test_the_journal_of_another_model_is_refused(finished_search):
    _, folder = finished_search
    before = (folder / "state.jsonl").read_bytes()
    with pytest.raises(ValueError, match="another search: weights"):
        rope_patch.search(load("qwen3"), **arguments(folder=folder))
    assert (folder / "state.jsonl").read_bytes() == before


def test_the_journal_of_a_model_with_another_config_is_refused(finished_search, model, monkeypatch):
    _, folder = finished_search
    before = (folder / "state.jsonl").read_bytes()
    monkeypatch.setattr(model.config, "rms_norm_eps", 0.01)  # no saved tensor says so
    with pytest.raises(ValueError, match="another search: config"):
        rope_patch.search(model, **arguments(folder=folder))
    assert (folder / "state.jsonl").read_bytes() == before


def test_failing_and_repeated_candidates_do_not_end_the_search(model, monkeypatch, tmp_path):
    candidates = [
        Candidate("known", "yarn"),  # measured at the start of each search
        stretch_candidate(1.0),
        stretch_candidate(9.0),  # runs out of memory
        stretch_candidate(1.0),
        stretch_candidate(1.2),
    ]
    fitnesses, is_measured, reads = [], [], []

    def propose(space, budget, seed):
        for candidate in candidates:
            before = len(reads)
            fitnesses.append((yield candidate))
            is_measured.append(len(reads) > before)

    forward = model.model.layers[0].forward

    def fail(*args, **kwargs):
        handle = rope_patch.current(model)
        reads.append(handle)
        stretch = handle.method.options().get("long_factor") if handle else None
        if stretch == candidates[2].options["long_factor"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setitem(STRATEGIES, "walk", make_walk(propose))
    monkeypatch.setattr(model.model.layers[0], "forward", fail)
    result = rope_patch.search(model, **arguments(folder=tmp_path, short=None))
    assert [fitness == float("inf") for fitness in fitnesses] == [False, False, True, False, False]
    assert is_measured == [False, True, True, False, True]
    assert fitnesses[0] == result.history[0]["fitness"]
    assert fitnesses[1] == fitnesses[3]
    assert [entry["number"] for entry in result.history] == list(range(6))
    (failed,) = (each for each in result.history if each["fitness"] == float("inf"))
    assert failed["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "CUDA out of memory" in (tmp_path / "state.jsonl").read_text()


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
    samples = {"samples": questions(count=2), "held_out": questions(count=1, seed=2), "short": None}
    result = rope_patch.search(model, **arguments(method=method, budget=2, **samples))
    assert result.strategy == method
    assert 2 <= len(result.history) <= 3
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
        json.loads(line) for line in (tmp_path / "state.jsonl").read_text().splitlines()
    ][1]["value"]
    assert sanity_check["able"]
    assert sanity_check["nll"] < 0.8 < 2 < sanity_check["control"]


# -- refusals, before anything is written ----------------------------------------------------------


def require_refusal(folder, *words, error=ValueError, model, tokenizer=None, **changes):
    """Search into a new folder; assert that it is refused with these words, and not made."""
    with pytest.raises(error) as refusal:
        rope_patch.search(model, tokenizer, **arguments(folder=folder / "new", **changes))
    for word in words:
        assert word in str(refusal.value)
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"budget": 0}, "at least 1"),
        ({"length": None}, "exactly one"),
        ({"factor": 2}, "exactly one"),
        ({"method": "longrop"}, "did you mean 'longrope'"),
        ({"method": "curve", "steps": 3}, "expected none"),
        ({"method": "longrope", "steps": 3}, "expected start_tokens"),
        ({"fitness": "needle"}, "needles, documents, both"),
        ({"held_out": None}, "held_out"),
        ({"held_out": questions(count=4)[:2]}, "2 of the held-out samples"),
        ({"samples": None, "held_out": None}, "tokenizer"),
        ({"text": "emma"}, "samples or a text"),
        ({"samples": questions(TRAINED, 2)}, "longer than the trained length"),
        ({"samples": questions(600, 2)}, "600 tokens"),
        ({"short": questions(300, 2)}, "256 tokens"),
        ({"samples": []}, "expected samples"),
        ({"picture": "found.jpg"}, "found.jpg"),
        ({"length": TRAINED}, "linear ×1 would change nothing"),
    ],
)
def test_bad_arguments_are_refused(model, tmp_path, changes, fact):
    require_refusal(tmp_path, fact, model=model, **changes)
    assert rope_patch.current(model) is None


def test_a_budget_that_is_no_whole_number_is_refused(model, tmp_path):
    require_refusal(tmp_path, "whole number", error=TypeError, model=model, budget=2.5)


@pytest.mark.parametrize("fitness", ["needles", "documents", "both"])
def test_a_text_shorter_than_the_length_is_refused(model, tmp_path, fitness):
    path = tmp_path / "short.txt"
    path.write_text("A few words. " * 9)
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    samples = {"samples": None, "held_out": None, "short": None}
    require_refusal(
        tmp_path, "short.txt", "512", model=model, tokenizer=tokenizer, text=str(path),
        fitness=fitness, **samples
    )  # fmt: skip


def test_a_model_that_fails_its_task_is_refused(model, tmp_path):
    """Random weights, a trained length that is too large, and documents of which it knows none."""
    untrained = make_model(vocab_size=512, max_position_embeddings=TRAINED)
    require_refusal(tmp_path, "cannot find needles", "nats", model=untrained)
    require_refusal(
        tmp_path, "cannot find needles", model=model, trained_length=2048, length=2100,
        short=questions(2048, 2, seed=3), samples=questions(2100, 1),
        held_out=questions(2100, 1, seed=2),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    require_refusal(
        tmp_path, "cannot predict documents", model=model, tokenizer=tokenizer, samples=None,
        held_out=None, short=None, fitness="documents", count=1, text="persuasion",
    )  # fmt: skip


def test_a_patched_model_and_a_folder_with_a_model_are_refused(model, tmp_path):
    with rope_patch.patch(model, "yarn", factor=2):
        require_refusal(tmp_path, "unpatch(model)", model=model)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds a model"):
        rope_patch.search(model, **arguments(folder=tmp_path))
