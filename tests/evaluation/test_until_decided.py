"""Runs that grow until their verdict is decided, and what a run says that it can decide."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.evaluations import measured_numbers, request
from helpers.report_results import statistics_of

from rope_patch import statistics
from rope_patch.evaluation import (
    ANSWER_DEVIATION,
    DEPTH_ANSWER_DEVIATION,
    PROFILES,
    TEXT_DEVIATION,
    EvalRequest,
    RunStatistics,
    evaluate,
    has_equal_depths,
    plan_sentences,
    summary_sentences,
    text_deviation,
)

pytestmark = pytest.mark.usefixtures("never_drawn")

ROOT = Path(__file__).parents[2]
LABELS = ("none", "nope", "linear ×4")


def growing_request(folder, **changes):
    grows = {"tasks": ("rp_recall_ll",), "lengths": (128, 320), "per_text": None}
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
        for label in LABELS
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
    head = summary_sentences(RunStatistics(results))[0]
    assert head.startswith("No method makes the right answers likelier")
    assert f"after Holm over 2 methods and {len(looks)} look" in head


def test_only_the_longest_length_grows_and_samples_stay_the_same(decided_run):
    folder, results = decided_run
    fixed = evaluate(replace(growing_request(folder), until_decided=False))
    assert fixed["run"]["looks"] == []
    for label in LABELS:
        assert rows_at(results, label, 128) == rows_at(fixed, label, 128)
        assert rows_at(results, label, 320)[:4] == rows_at(fixed, label, 320)


def test_a_run_that_was_cut_short_takes_the_same_looks(decided_run, tmp_path):
    folder, results = decided_run
    cut = shutil.copytree(folder, tmp_path / "out")
    answers = cut / "cache" / "answers-0.jsonl"
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:-10]))
    again = evaluate(growing_request(cut))
    assert again["run"]["continued"]
    assert again["run"]["looks"] == results["run"]["looks"]
    assert measured_numbers(again) == measured_numbers(results)


def test_it_stops_at_the_most_samples(decided_run, monkeypatch):
    folder, _ = decided_run
    monkeypatch.setattr(RunStatistics, "is_decided", False)
    results = evaluate(growing_request(folder, samples=4, max_samples=9, lengths=(320,)))
    assert results["run"]["looks"] == [8, 9]


def test_fewer_texts_than_decide_are_no_look(decided_run):
    folder, _ = decided_run
    results = evaluate(growing_request(folder, samples=2, max_samples=5, lengths=(320,)))
    assert results["run"]["looks"] == []
    assert "(7 decide)" in summary_sentences(RunStatistics(results))[0]


def made_up(losses, looks):
    """Return the statistics of a run with these losses of texts, nats a token, by method."""
    of = {
        label: [
            {"id": str(i), "text": i, "length": 512, "depth": None, "score": 0.0}
            | {"log_likelihood": -float(loss), "target_tokens": 1}
            for i, loss in enumerate(nats)
        ]
        for label, nats in losses.items()
    }
    return statistics_of({"rp_recall_ll": of}, 256, looks=looks)


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


# -- what a run says that it can decide ------------------------------------------------------------

LENGTHS, TRAINED = (1024, 2048), 1024
TASK = "rp_niah_multikey_1_ll"


def asked(**changes):
    methods = ("none", "yarn", "linear", "ntk", "dynamic-yarn")
    return EvalRequest(**{"model": "demo", "methods": methods, "lengths": LENGTHS} | changes)


def rows(count, per_text, length, **values):
    return [
        {"id": f"{length}/{i}", "text": i // per_text, "length": length, "depth": 10 * (i % 7)}
        | {"target_tokens": 4, "log_likelihood": None}
        | values
        for i in range(count)
    ]


def planned(count, per_text, tasks=(TASK,), lengths=LENGTHS, **values):
    return {
        (task, length): rows(count, per_text, length, **values)
        for task in tasks
        for length in lengths
    }


def plan(count, per_text, tasks=(TASK,), **changes):
    return "\n".join(plan_sentences(asked(**changes), planned(count, per_text, tasks), TRAINED))


def run(samples, tasks=(TASK,)):
    """Return the statistics of a run with these samples by method, the same of each task."""
    return statistics_of(dict.fromkeys(tasks, samples), TRAINED)


def smallest_change(text):
    return float(re.search(r"if it does by ([\d.]+) nats", text)[1])


def test_texts_asked_at_the_same_depths_vary_less():
    for depths, equal in (([10, 90], True), ([50, 50], True), ([None, 50], False)):
        samples = [row | {"depth": depths[i % 2]} for i, row in enumerate(rows(20, 2, 2048))]
        assert has_equal_depths(samples) is equal
        (text, *_) = plan_sentences(asked(), {(TASK, 2048): samples}, TRAINED)
        assert f"between texts by {text_deviation(2, equal):.1f} nats" in text
        assert (smallest_change(text) < smallest_change(plan(20, 2))) is equal
        assert not has_equal_depths(samples[:-1])
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
    for _ in range(150):
        by_method = {}
        for label, gain in {"none": 0.0, "yarn": 1.0, "a": 0.0, "b": 0.0, "c": 0.0}.items():
            answers = rows(int(samples), 2, 2048, score=0.0)
            noise = generator.normal(0, TEXT_DEVIATION, int(texts)).repeat(2)
            noise += generator.normal(0, ANSWER_DEVIATION, int(samples))
            for answer, varies in zip(answers, noise, strict=True):
                nats = 9 - gain + (0 if label == "none" else varies)
                answer["log_likelihood"] = -4 * nats
            by_method[label] = answers
        decided += run(by_method).verdicts_on_plain(2048)["yarn"].p_value < 0.05
    assert decided / 150 == pytest.approx(0.8, abs=0.1)  # three standard deviations


@pytest.mark.parametrize(("texts", "has"), [(1, "one text"), (2, "2 texts"), (7, "7 texts")])
def test_too_few_texts_are_said_to_decide_nothing(texts, has):
    text = plan(5 * texts, 5)
    assert f"{has} at 2,048 tokens, too few" in text.splitlines()[0]
    assert "(8 decide after Holm over 4 methods)" in text.splitlines()[0]
    assert "by 0.5 nats takes" in text
    assert "it does by" not in text


def test_twins_ask_the_same_questions():
    twins = (TASK, "rp_niah_multikey_1_mc", "rp_niah_multikey_1")
    assert plan(20, 2, twins).splitlines()[0] == plan(20, 2).splitlines()[0]
    other = plan(20, 2, (TASK, "rp_vt_ll"))
    assert other.startswith("40 questions about 20 texts at 2,048 tokens")
    assert smallest_change(other) < smallest_change(plan(20, 2))


def test_tasks_may_ask_about_the_same_texts():
    same = plan(20, 2, ("rp_oolong_count_ll", "rp_oolong_topic_ll"))
    assert same.startswith("40 questions about 10 texts at 2,048 tokens")
    needed = {int(n) for n in re.findall(r"takes (\d+) texts", same)}
    assert {int(n) for n in re.findall(r"--samples (\d+)", same)} == {2 * n for n in needed}


def test_looks_cost_and_need_no_number_of_samples():
    text = plan(20, 2, until_decided=True, max_samples=96)
    assert smallest_change(text) > smallest_change(plan(20, 2))
    assert "doubles its texts, to 96 samples a task at most" in text
    assert "--samples" not in text.splitlines()[0] + text.splitlines()[1]


@pytest.mark.parametrize("values", [{}, {"chance": 0.25}])
@pytest.mark.parametrize("tasks", [(TASK,), (TASK, "rp_vt_ll", "rp_cwe_ll")])
def test_samples_that_are_stated_to_call_a_length_usable_do(tasks, values):
    """By the report's usable length, where every answer is right."""
    text = "\n".join(plan_sentences(asked(), planned(6, 2, tasks, **values), TRAINED))
    assert "accuracies cannot call 2,048 tokens usable" in text
    needed = int(re.search(r"it takes (\d+) samples a task", text)[1])
    for count, is_usable in ((needed, True), (needed - 1, False)):
        samples = {"none": [r for n in LENGTHS for r in rows(count, 2, n, score=1.0, **values)]}
        assert run(samples, tasks).usable_length("none").is_beyond(TRAINED) == is_usable
    enough = plan_sentences(asked(), planned(needed, 2, tasks, **values), TRAINED)
    assert any("accuracies can call 2,048 tokens usable" in sentence for sentence in enough)


def test_without_a_comparison_it_says_why_or_nothing():
    assert plan(12, 2, methods=("yarn",)) == ""
    assert plan(12, 2, methods=("none",)).startswith("accuracies cannot call 2,048 tokens usable")
    assert plan_sentences(asked(), {}, TRAINED) == []
    assert "give --method none, too" in plan(12, 2, methods=("yarn", "linear"))
    (sentence,) = plan_sentences(asked(), planned(12, 2), 4096)
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
    profile = PROFILES["quick"]
    assert smallest_change(plan(profile.samples, profile.per_text)) < np.mean(means)
    assert text_deviation(1) == pytest.approx(np.std(gains, ddof=1), rel=0.5)
    assert text_deviation(len(gains) / len(texts)) > np.std(means, ddof=1) / 1.5
    by_depth = {}
    for gain, row in zip(gains, plain, strict=True):
        by_depth.setdefault(row["depth"], []).append(gain)
    at_one_depth = math.sqrt(np.mean([np.var(at, ddof=1) for at in by_depth.values()]))
    assert at_one_depth == pytest.approx(DEPTH_ANSWER_DEVIATION, rel=0.5)


def test_the_readme_shows_the_plan_of_a_quick_comparison():
    profile, lengths = PROFILES["quick"], (4096, 8192, 12288)
    samples = planned(profile.samples, profile.per_text, lengths=lengths)
    readme = " ".join((ROOT / "eval" / "README.md").read_text(encoding="utf-8").split())
    for sentence in plan_sentences(asked(lengths=lengths), samples, 8192):
        assert f"plan: {sentence}" in readme
    assert f"{ANSWER_DEVIATION} nats between answers and {TEXT_DEVIATION} between texts" in readme
    assert f"{DEPTH_ANSWER_DEVIATION} nats between answers at one depth" in readme
