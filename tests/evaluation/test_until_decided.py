"""Runs that grow until their verdict is decided: looks, error rate, resumption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.evaluations import measured_numbers, request, run_until_killed

from rope_patch import statistics
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary import sentences

LENGTHS = (128, 320)
TRAINED = 256


def growing_request(folder, **changes):
    grows: dict[str, Any] = {"tasks": ("rp_recall_ll",), "lengths": LENGTHS, "per_text": None}
    grows |= {"methods": ("none", "nope", "linear"), "samples": 4, "max_samples": 40}
    return request(folder, until_decided=True, **grows | changes)


def rows_at(results, label, length):
    (entry,) = results["retrieval"]
    return [row for row in entry["samples"][label] if row["length"] == length]


@pytest.fixture(scope="module")
def decided_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(growing_request(folder))


def test_samples_are_doubled_until_the_corrected_test_decides(decided_run):
    """By the rule for texts, its p times the methods and j (j + 1) at look j.

    Four texts can show nothing of two methods, so the first look is at eight.
    """
    _, results = decided_run
    looks = results["run"]["looks"]
    assert looks == [8, 16, 32, 40][: len(looks)]
    assert looks
    losses = {
        label: np.array(
            [-row["log_likelihood"] / row["target_tokens"] for row in rows_at(results, label, 320)]
        )
        for label in ("none", "nope", "linear ×4")
    }
    assert {len(nats) for nats in losses.values()} == {looks[-1]}
    for look, count in enumerate(looks, start=1):
        p_values = {
            label: statistics.mean_test(
                (nats - losses["none"])[:count].tolist(), range(count)
            ).p_value
            for label, nats in losses.items()
            if label != "none"
        }
        best = min(p_values, key=lambda label: losses[label][:count].mean())
        rank = sorted(p_values.values()).index(p_values[best])
        corrected = max(sorted(p_values.values())[0] * 2, p_values[best] * (2 - rank))
        assert (corrected * look * (look + 1) < 0.05) == (look == len(looks))
    head = sentences(RunStatistics(results))[0]
    assert head.startswith("No method makes the right answers likelier than no patch at 320")
    assert f"after Holm over 2 methods and {len(looks)} look" in head


def test_only_the_longest_length_grows_and_samples_stay_the_same(decided_run):
    folder, results = decided_run
    fixed = evaluate(replace(growing_request(folder), until_decided=False))
    assert fixed["run"]["looks"] == []
    for label in ("none", "nope", "linear ×4"):
        assert rows_at(results, label, 128) == rows_at(fixed, label, 128)
        assert rows_at(results, label, 320)[:4] == rows_at(fixed, label, 320)


def test_a_killed_run_takes_the_same_looks(decided_run, tmp_path):
    _, results = decided_run
    killed = growing_request(tmp_path)
    run_until_killed(killed, answers=25)
    again = evaluate(killed)
    assert again["run"]["continued"]
    assert again["run"]["looks"] == results["run"]["looks"]
    assert measured_numbers(again) == measured_numbers(results)


def test_it_stops_at_the_most_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(RunStatistics, "is_decided", False)
    results = evaluate(growing_request(tmp_path, samples=4, max_samples=9, lengths=(320,)))
    assert results["run"]["looks"] == [8, 9]
    head = sentences(RunStatistics(results))[0]
    assert "and 2 looks at growing data" in head


def test_fewer_texts_than_decide_are_no_look(tmp_path):
    results = evaluate(growing_request(tmp_path, samples=2, max_samples=5, lengths=(320,)))
    assert results["run"]["looks"] == []
    assert "too few texts to say (7 decide)" in sentences(RunStatistics(results))[0]


def made_up(losses: dict[str, np.ndarray], looks: list[int]) -> RunStatistics:
    """Return the statistics of a run with these losses of texts, nats a token, by method."""
    results: Any = {
        "run": {"trained_length": TRAINED, "looks": looks},
        "methods": [{"label": m, "method": None if m == "none" else m} for m in losses],
        "retrieval": [
            {
                "task": "rp_recall_ll",
                "lengths": [512],
                "samples": {
                    label: [
                        {"id": str(i), "text": i, "length": 512, "depth": None, "score": 0.0}
                        | {"log_likelihood": -float(loss), "target_tokens": 1}
                        for i, loss in enumerate(nats)
                    ]
                    for label, nats in losses.items()
                },
            }
        ],
    }
    return RunStatistics(results)


def test_methods_without_an_effect_are_told_apart_in_one_run_of_twenty():
    generator, counts = np.random.default_rng(6), (9, 18, 36)
    labels, runs, false_calls = ("none", "a", "b"), 300, 0
    for _ in range(runs):
        text_level = generator.normal(3, 1, counts[-1])
        losses = {label: text_level + generator.normal(0, 1, counts[-1]) for label in labels}
        false_calls += any(
            made_up({m: nats[:n] for m, nats in losses.items()}, list(counts[:look])).is_decided
            for look, n in enumerate(counts, start=1)
        )
    assert false_calls / runs <= 0.05


def test_what_more_texts_cannot_change_is_decided():
    """Answers that are the plain model's to the bit, or that all failed."""
    nats = np.array([1.0, 2.0, 3.0])
    assert made_up({"none": nats, "yarn": nats}, [3]).is_decided
    assert not made_up({"none": nats, "yarn": nats + np.array([0.1, -0.1, 0])}, [3]).is_decided
    assert made_up({"none": nats, "yarn": np.array([])}, [3]).is_decided
    assert made_up({"none": nats, "yarn": nats + np.inf}, [3]).is_decided
