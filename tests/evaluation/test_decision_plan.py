"""What a run says that it can decide, against simulated runs and the report's own verdicts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_patch import statistics
from rope_patch.evaluation import profiles
from rope_patch.evaluation.decision_plan import (
    ANSWER_DEVIATION,
    DEPTH_ANSWER_DEVIATION,
    TEXT_DEVIATION,
    has_equal_depths,
    sentences,
    text_deviation,
)
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.request import EvalRequest

ROOT = Path(__file__).parents[2]
LENGTHS, TRAINED = (1024, 2048), 1024
TASK = "rp_niah_multikey_1_ll"


def request(**changes: Any) -> EvalRequest:
    methods = ("none", "yarn", "linear", "ntk", "dynamic-yarn")
    return EvalRequest(**{"model": "demo", "methods": methods, "lengths": LENGTHS} | changes)


def rows(count: int, per_text: int, length: int, **values: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"{length}/{i}", "text": i // per_text, "length": length, "depth": 10 * (i % 7)}
        | {"target_tokens": 4, "log_likelihood": None}
        | values
        for i in range(count)
    ]


def planned(
    count: int,
    per_text: int,
    tasks: tuple[str, ...] = (TASK,),
    lengths: tuple[int, ...] = LENGTHS,
    **values: Any,
) -> Any:
    return {
        (task, length): rows(count, per_text, length, **values)
        for task in tasks
        for length in lengths
    }


def plan(count: int, per_text: int, tasks: tuple[str, ...] = (TASK,), **changes: Any) -> str:
    return "\n".join(sentences(request(**changes), planned(count, per_text, tasks), TRAINED))


def run(samples: dict[str, list[dict[str, Any]]], tasks: tuple[str, ...] = (TASK,)) -> Any:
    """Return the statistics of a run with these samples by method, the same of each task."""
    results: Any = {
        "run": {"trained_length": TRAINED},
        "methods": [{"label": m, "method": None if m == "none" else m} for m in samples],
        "retrieval": [{"task": t, "lengths": LENGTHS, "samples": samples} for t in tasks],
    }
    return RunStatistics(results)


def smallest_change(text: str) -> float:
    return float(re.search(r"if it does by ([\d.]+) nats", text)[1])


def test_texts_asked_at_the_same_depths_vary_less():
    for depths, equal in (([10, 90], True), ([50, 50], True), ([None, 50], False)):
        asked = [row | {"depth": depths[i % 2]} for i, row in enumerate(rows(20, 2, 2048))]
        assert has_equal_depths(asked) is equal
        (text, *_) = sentences(request(), {(TASK, 2048): asked}, TRAINED)
        assert f"between texts by {text_deviation(2, equal):.1f} nats" in text
        assert (smallest_change(text) < smallest_change(plan(20, 2))) is equal
        assert not has_equal_depths(asked[:-1])
    assert not has_equal_depths(rows(12, 2, 2048))
    assert not has_equal_depths(rows(2, 2, 2048))


@pytest.mark.parametrize(("count", "per_text"), [(20, 2), (8, 1), (52, 4)])
def test_the_change_that_is_stated_is_shown_in_four_runs_of_five(count, per_text):
    """At Holm's first level over four methods, in simulated runs."""
    change, texts = smallest_change(plan(count, per_text)), math.ceil(count / per_text)
    gains = np.random.default_rng(2).normal(change, text_deviation(per_text), (400, texts))
    shown = [statistics.mean_test(g.tolist(), range(texts)).p_value < 0.05 / 4 for g in gains]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.08)


def test_as_many_texts_as_are_stated_decide_four_runs_of_five():
    """In the report's own verdict, where one method of four gains one nat."""
    text = plan(2, 2)
    texts, samples = re.search(r"by 1.0 nats takes (\d+) texts \(--samples (\d+)\)", text).groups()
    assert int(samples) == 2 * int(texts)
    generator, decided = np.random.default_rng(5), 0
    for _ in range(300):
        by_method = {}
        for label, gain in {"none": 0.0, "yarn": 1.0, "a": 0.0, "b": 0.0, "c": 0.0}.items():
            answers = rows(int(samples), 2, 2048, score=0.0)
            noise = generator.normal(0, TEXT_DEVIATION, int(texts)).repeat(2)
            noise += generator.normal(0, ANSWER_DEVIATION, int(samples))
            for answer, varies in zip(answers, noise, strict=True):
                nats = 9 - gain + (0 if label == "none" else varies)
                answer["log_likelihood"] = -4 * nats
            by_method[label] = answers
        decided += run(by_method).comparisons_with_plain(2048)["yarn"][1] < 0.05
    assert decided / 300 == pytest.approx(0.8, abs=0.07)  # three standard deviations


@pytest.mark.parametrize(("texts", "has"), [(1, "one text"), (2, "2 texts"), (7, "7 texts")])
def test_too_few_texts_are_said_to_decide_nothing(texts, has):
    text = plan(5 * texts, 5)
    assert text.startswith(
        f"this run cannot decide which method is better: it has {has} at 2,048 tokens, too few "
        "texts to say (8 decide after Holm over 4 methods)"
    )
    assert "by 0.5 nats takes" in text
    assert "it does by" not in text


def test_twins_ask_the_same_questions():
    twins = (TASK, "rp_niah_multikey_1_mc", "rp_niah_multikey_1")
    assert plan(20, 2, twins).splitlines()[0] == plan(20, 2).splitlines()[0]
    other = plan(20, 2, (TASK, "rp_vt_ll"))
    assert other.startswith("40 questions about 20 texts at 2,048 tokens")
    assert smallest_change(other) < smallest_change(plan(20, 2))


def test_looks_cost_and_need_no_number_of_samples():
    text = plan(20, 2, until_decided=True, max_samples=96)
    assert smallest_change(text) > smallest_change(plan(20, 2))
    assert "doubles its texts, to 96 samples a task at most" in text
    assert "--samples" not in text.splitlines()[0] + text.splitlines()[1]


@pytest.mark.parametrize("values", [{}, {"chance": 0.25}])
@pytest.mark.parametrize("tasks", [(TASK,), (TASK, "rp_vt_ll", "rp_cwe_ll")])
def test_samples_that_are_stated_to_call_a_length_usable_do(tasks, values):
    """By the report's effective length, where every answer is right."""
    text = "\n".join(sentences(request(), planned(6, 2, tasks, **values), TRAINED))
    assert "accuracies cannot call 2,048 tokens usable" in text
    needed = int(re.search(r"it takes (\d+) samples a task", text)[1])
    for count, usable in ((needed, 2048), (needed - 1, None)):
        samples = {"none": [r for n in LENGTHS for r in rows(count, 2, n, score=1.0, **values)]}
        assert run(samples, tasks).effective_length("none")[0] == usable
    enough = sentences(request(), planned(needed, 2, tasks, **values), TRAINED)
    assert any("accuracies can call 2,048 tokens usable" in sentence for sentence in enough)


def test_without_a_comparison_it_says_why_or_nothing():
    assert plan(12, 2, methods=("yarn",)) == ""
    assert plan(12, 2, methods=("none",)).startswith("accuracies cannot call 2,048 tokens usable")
    assert sentences(request(), {}, TRAINED) == []
    assert "give --method none, too" in plan(12, 2, methods=("yarn", "linear"))
    (sentence,) = sentences(request(), planned(12, 2), 4096)
    assert "no length is beyond the trained 4,096 tokens" in sentence


def test_quick_can_decide_what_was_measured_and_assumes_its_deviations():
    """So few texts leave deviations in doubt by about what this allows."""
    report = json.loads((ROOT / "eval/results/smollm2/report.json").read_text(encoding="utf-8"))
    (entry,) = (entry for entry in report["retrieval"] if entry["task"] == TASK)
    plain, yarn = (
        [row for row in entry["samples"][label] if row["length"] == max(entry["lengths"])]
        for label in ("none", "yarn ×2")
    )
    gains = [
        (b["log_likelihood"] - a["log_likelihood"]) / a["target_tokens"]
        for a, b in zip(plain, yarn, strict=True)
    ]
    texts = {row["text"] for row in plain}
    means = [
        np.mean([gain for gain, row in zip(gains, plain, strict=True) if row["text"] == text])
        for text in texts
    ]
    profile = profiles.PROFILES["quick"]
    assert smallest_change(plan(profile.samples, profile.per_text)) < np.mean(means)
    assert text_deviation(1) == pytest.approx(np.std(gains, ddof=1), rel=0.5)
    assert text_deviation(len(gains) / len(texts)) > np.std(means, ddof=1) / 1.5
    by_depth: dict[int, list[float]] = {}
    for gain, row in zip(gains, plain, strict=True):
        by_depth.setdefault(row["depth"], []).append(gain)
    at_one_depth = math.sqrt(np.mean([np.var(at, ddof=1) for at in by_depth.values()]))
    assert at_one_depth == pytest.approx(DEPTH_ANSWER_DEVIATION, rel=0.5)


def test_the_readme_shows_the_plan_of_a_quick_comparison():
    profile, lengths = profiles.PROFILES["quick"], (4096, 8192, 12288)
    samples = planned(profile.samples, profile.per_text, lengths=lengths)
    readme = " ".join((ROOT / "eval" / "README.md").read_text(encoding="utf-8").split())
    for sentence in sentences(request(lengths=lengths), samples, 8192):
        assert f"plan: {sentence}" in readme
    assert f"{ANSWER_DEVIATION} nats between answers and {TEXT_DEVIATION} between texts" in readme
    assert f"{DEPTH_ANSWER_DEVIATION} nats between answers at one depth" in readme
