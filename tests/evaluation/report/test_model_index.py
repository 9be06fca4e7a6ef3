"""The evaluation block of model cards, read back by the hub's library, against the samples."""

import math
from statistics import fmean

import pytest
import yaml
from helpers.report_results import LABELS, LENGTHS, many, results
from huggingface_hub import ModelCard

from rope_patch.evaluation import Ranking, RunStatistics, evaluations, model_index


def entries_of(measured, title="Tiny"):
    """Return each entry's results as the hub's library reads them from a README, by name."""
    stats = RunStatistics(measured)
    text = model_index([(title, stats, Ranking(stats))])
    entries = yaml.safe_load(text)["model-index"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: read_back(entry) for entry in entries}


def read_back(entry):
    front = yaml.safe_dump({"model-index": [entry]}, allow_unicode=True)
    data = ModelCard(f"---\n{front}---\n# A model\n", ignore_metadata_errors=False).data
    assert data.model_name == entry["name"]
    return data.eval_results


def test_each_method_has_an_entry_best_first():
    assert list(entries_of(results())) == ["Tiny, yarn ×2", "Tiny, linear ×2", "Tiny, plain model"]
    names = list(entries_of(many(), "Tiny: #1\n---"))
    assert len(names) == 15
    assert "Tiny: #1\n---, plain model" in names


def test_numbers_are_those_of_the_samples():
    measured = results()
    read = entries_of(measured)["Tiny, linear ×2"]
    accuracies = {
        (each.dataset_args["task"], each.dataset_args["length"]): each
        for each in read
        if each.metric_type == "accuracy" and {"task", "length"} <= each.dataset_args.keys()
    }
    assert accuracies.keys() == {
        (task["task"], length) for task in measured["retrieval"] for length in LENGTHS
    }
    for task in measured["retrieval"]:
        for length in LENGTHS:
            scores = [s["score"] for s in task["samples"]["linear ×2"] if s["length"] == length]
            of = accuracies[task["task"], length]
            assert of.metric_value == pytest.approx(fmean(scores), abs=5e-5)
            assert of.metric_args["samples"] == len(scores) == 30
            assert of.metric_args["method"] == "linear ×2"
            assert 0 <= of.metric_args["low"] <= of.metric_value <= of.metric_args["high"] <= 1
            assert f"{length:,} tokens" in of.dataset_name
    loss = next(e for e in read if e.metric_type == "nats per token")
    nats = [
        -s["log_likelihood"] / s["target_tokens"]
        for task in measured["retrieval"]
        for s in task["samples"]["linear ×2"]
        if s["length"] == loss.dataset_args["length"]
    ]
    assert loss.metric_value == pytest.approx(fmean(nats), abs=5e-5)
    (near, far) = (e for e in read if e.metric_type == "perplexity")
    assert near.dataset_args["up_to"] == far.dataset_args["beyond"] == 4096
    blocks = [x for d in measured["perplexity"]["losses"]["linear ×2"] for x in d[64:]]
    assert far.metric_value == pytest.approx(math.exp(fmean(blocks)), abs=5e-5)
    assert {e.dataset_type for e in read} == {"rope_patch"}  # no data set of the hub


def test_results_of_several_methods_are_told_apart_after_they_were_merged():
    stats = RunStatistics(results())
    text = model_index([("Tiny", stats, Ranking(stats))])
    merged = ModelCard(f"---\n{text}---\n", ignore_metadata_errors=False)  # as the library does
    again = ModelCard(str(merged), ignore_metadata_errors=False).data.eval_results
    assert len(again) == sum(len(evaluations(stats, label)) for label in LABELS)
    assert {each.metric_args["method"] for each in again} == set(stats.names.values())
    keys = [(e.dataset_config, e.metric_type, e.metric_args["method"]) for e in again]
    assert len(set(keys)) == len(keys)


def test_what_is_unknown_or_impossible_is_left_out():
    measured = results()
    for rows in measured["retrieval"][1]["samples"].values():
        for sample in rows:
            sample["text"] = 0  # of a single text no interval is known
    measured["perplexity"]["losses"]["none"][0][-1] = math.inf
    measured["retrieval"] = measured["retrieval"][1:2]
    read = entries_of(measured)
    plain = read["Tiny, plain model"]
    assert [e.dataset_args for e in plain if e.metric_type == "perplexity"] == [
        {"documents": ["emma", "persuasion"], "up_to": 4096}
    ]
    losses = [e for of in read.values() for e in of if e.metric_type == "nats per token"]
    assert losses
    assert not any({"low", "high"} & e.metric_args.keys() for e in losses)
    nothing = {"run": measured["run"], "methods": measured["methods"]}
    stats = RunStatistics(nothing)
    assert model_index([("Tiny", stats, Ranking(stats))]) == ""
