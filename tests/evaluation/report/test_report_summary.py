"""Test the summary: usable length, best method, price, and no unproven claims."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from report_results import results, retrieval, samples

from rope_patch.evaluation.report import summary
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary_table import summary_table
from rope_patch.evaluation.report.table import Table


def sentences_of(measured: dict[str, Any]) -> list[str]:
    return summary.sentences(RunStatistics(measured))


def table_of(*runs: tuple[str, dict[str, Any]]) -> Table:
    all_stats = [(title, RunStatistics(measured)) for title, measured in runs]
    table, _ = summary_table([(title, stats, Ranking(stats)) for title, stats in all_stats])
    assert table is not None
    return table


def make_results(labels: dict[str, tuple[float, float]], count: int = 100) -> dict[str, Any]:
    """Return results of one task that each method solves with a chance within and beyond."""
    measured = results() | {"perplexity": None, "short": [], "control": [], "cost": {}}
    measured["methods"] = [m for m in measured["methods"] if m["label"] in labels]
    samples_by_label = {
        label: samples("rp_niah_single_1", chances, count=count)
        for label, chances in labels.items()
    }
    for rows in samples_by_label.values():
        for sample in rows:
            sample["text"] = sample["id"]
    task = {
        "task": "rp_niah_single_1",
        "lengths": [2048, 4096, 6144, 8192],
        "samples": samples_by_label,
    }
    return measured | {"retrieval": [task]}


def test_headline_names_length_method_and_retention() -> None:
    head = sentences_of(make_results({"none": (1, 0), "yarn ×2": (1, 1), "linear ×2": (1, 0.5)}))[0]
    assert head.startswith(
        "With yarn ×2, the best of 2 methods, the model is usable up to 8,192 tokens, 2 times its "
        "trained 4,096: it keeps 100% (95% interval "
    )
    assert "n = 100" in head


def test_a_method_that_fails_is_not_called_usable() -> None:
    head, *others = sentences_of(make_results({"none": (1, 0), "yarn ×2": (1, 0)}))
    assert head.startswith("At 8,192 tokens yarn ×2 changes the likelihood of no right answer: ")
    assert others[0].startswith(
        "With yarn ×2 the model is not shown to be usable beyond its trained 4,096 tokens: at 6,144"
        " it keeps 0% (95% interval "
    )
    assert "too small" not in others[0]


def test_too_few_samples_are_reported() -> None:
    by_likelihood, by_accuracy, *_ = sentences_of(
        make_results({"none": (1, 0), "yarn ×2": (1, 1)}, count=5)
    )
    assert by_likelihood.startswith("This run has too few texts to say (6 decide) whether yarn ×2")
    assert "is not shown to be usable" in by_accuracy
    assert "n at 6,144 (n = 5) is too small to tell how much of the plain" in by_accuracy


def test_other_methods_are_reported() -> None:
    sentences = sentences_of(make_results({"none": (1, 0), "yarn ×2": (1, 1), "linear ×2": (1, 0)}))
    others = next(s for s in sentences if s.startswith("In texts beyond 4,096 tokens"))
    assert "the plain model gets 0% (" in others
    assert "linear ×2 gets 0% (" in others


def test_a_sentence_names_few_of_many_methods() -> None:
    measured = make_results({"none": (1, 0), "yarn ×2": (1, 1), "linear ×2": (1, 0)})
    linear, samples_by_label = measured["methods"][-1], measured["retrieval"][0]["samples"]
    for i, label in enumerate(("linear ×3", "linear ×4", "linear ×5", "linear ×6")):
        measured["methods"].append(linear | {"label": label})
        samples_by_label[label] = [
            sample | {"log_likelihood": sample["log_likelihood"] - i}
            for sample in samples_by_label["linear ×2"]
        ]
    sentences = sentences_of(measured)
    others = next(s for s in sentences if s.startswith("In texts beyond 4,096 tokens"))
    assert others.count(" gets ") == 4
    assert others.endswith("; the tables show 2 more.")


def test_without_the_plain_model_no_length_is_claimed() -> None:
    head = sentences_of(make_results({"yarn ×2": (1, 1)}))[0]
    assert "no length is called usable" in head


def test_the_plain_model_alone_is_no_method() -> None:
    head = sentences_of(make_results({"none": (1, 0)}))[0]
    assert head.startswith("Without a method, the model is not shown to be usable beyond")


def test_without_measurements_beyond_nothing_is_claimed() -> None:
    measured = results()
    measured["run"]["trained_length"] = 32768
    sentences = sentences_of(measured)
    assert sentences[0] == "No retrieval was measured beyond the trained 32,768 tokens."
    assert "No perplexity was measured beyond the trained 32,768 tokens." in sentences
    nothing = {"perplexity": None, "retrieval": [], "control": [], "short": [], "cost": {}}
    assert sentences_of(measured | nothing) == ["Nothing was measured."]


def test_perplexity_is_the_headline_without_retrieval() -> None:
    head, against, *_ = sentences_of(results() | {"retrieval": []})
    assert re.match(r"Beyond its trained 4,096 tokens the model's perplexity is 15\.\d \(", head)
    assert re.search(r" and 2\d\d \(.* without a patch\.$", head)
    assert "with yarn ×2, " in head
    assert "n = " in head
    assert against.startswith("Against the control, which reads only the last 2,048 tokens")


def test_the_price_is_paired_and_has_its_interval() -> None:
    price = next(
        s for s in sentences_of(results()) if s.startswith("Up to 4,096 tokens yarn ×2 changes")
    )
    match = re.search(r"perplexity by \+(\d\.\d)% \(\+(\d\.\d) to \+(\d\.\d)%, n = ", price)
    assert match
    expected = 100 * (16.2 / 16 - 1)
    assert float(match[2]) <= expected <= float(match[3])
    assert re.search(r"accuracy at ordinary tasks by \S+ points \(.* to .*, n = 1\d\d, p ", price)


def test_time_and_memory_are_those_of_the_best_method() -> None:
    sentence = sentences_of(results())[-1]
    assert sentence == (
        "With yarn ×2 reading a prompt takes ×1.01 (1.00–1.03) of the plain model's time, writing "
        "a token takes ×1.00 (0.99–1.02) of the plain model's time, the cache and one decoding "
        "step take 3.00 GB for 4,096 tokens, beside the weights."
    )
    without = results() | {"cost": {}}
    assert not any("the cache" in s for s in sentences_of(without))


def test_questions_that_can_be_guessed_are_warned_about() -> None:
    measured = results()
    assert not list(summary.warnings(RunStatistics(measured)))
    guessed = samples("rp_niah_single_1", (1.0, 1.0), lengths=(2048,), count=12)
    measured["control"][0]["samples"] = {"none": guessed}
    (warning,) = summary.warnings(RunStatistics(measured))
    assert warning.startswith("Careful: niah_single_1 can be answered without its needle, 100% (")


def test_failed_samples_are_counted_and_excluded() -> None:
    measured = make_results({"none": (1, 0), "yarn ×2": (1, 1)})
    before = RunStatistics(measured).accuracy("yarn ×2")
    failed = measured["retrieval"][0]["samples"]["yarn ×2"][:7]
    for sample in failed:
        sample |= {"score": None, "error": "out of memory"}
    warnings = list(summary.warnings(RunStatistics(measured)))
    assert warnings == ["7 samples failed and count in no number here."]
    after = RunStatistics(measured).accuracy("yarn ×2")
    assert before is not None
    assert after is not None
    assert (before.n, after.n, after.estimate) == (400, 393, 1)


def test_infinite_losses_are_infinite() -> None:
    measured = results() | {"retrieval": []}
    for document in measured["perplexity"]["losses"]["none"]:
        document[-1] = math.inf
    assert re.search(r"∞ \(\d+–∞, .* without a patch", sentences_of(measured)[0])
    document[-1] = "Infinity"  # as it comes back from JSON
    assert re.search(r"∞ \(\d+–∞, .* without a patch", sentences_of(measured)[0])


def test_retention_is_over_the_plain_model_within_its_length() -> None:
    run = RunStatistics(make_results({"none": (0.8, 0.1), "yarn ×2": (0.7, 0.6)}))
    task = run.results["retrieval"][0]["samples"]

    def mean(label: str, lengths: tuple[int, ...]) -> float:
        scores = [s["score"] for s in task[label] if s["length"] in lengths]
        return sum(scores) / len(scores)

    retention = run.retention("yarn ×2", 8192)
    assert retention is not None
    assert retention.estimate == pytest.approx(
        mean("yarn ×2", (8192,)) / mean("none", (2048, 4096))
    )


def test_the_ruler_threshold_needs_all_tasks_of_ruler() -> None:
    niah = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")
    names = [f"niah_{name}" for name in (*niah, "multivalue", "multiquery")]
    names += ["vt", "cwe", "fwe", "qa_1", "qa_2"]
    tasks = [retrieval(f"rp_{name}", lengths=(2048,), count=4) for name in names]
    assert len(tasks) == 13

    def heads(chosen: list[dict[str, Any]]) -> list[str]:
        stats = RunStatistics(results() | {"retrieval": chosen})
        table, lines = summary_table([("", stats, Ranking(stats))])
        assert table is not None
        return [*lines, *(column.text for column in table.columns)]

    assert any("85.6%" in head for head in heads(tasks))
    assert not any("85.6%" in head for head in heads(tasks[:-1]))


def test_the_table_has_a_row_per_method_and_run() -> None:
    first, second = results(), results()
    second["methods"] = second["methods"][:1]
    table = table_of(("A", first), ("B", second))
    assert [(row.group, row.name) for row in table.rows] == [
        ("A", "yarn ×2"), ("A", "linear ×2"), ("A", "plain model"), ("B", "plain model"),
    ]  # fmt: skip
    assert {len(row.cells) for row in table.rows} == {len(table.columns)}


def test_weighted_averages_are_those_of_ruler() -> None:
    """Weights 1, 2, 3, 4 over lengths, or 4, 3, 2, 1."""
    measured = make_results({"none": (1, 0)})
    run = RunStatistics(measured)
    assert run.ruler_weighted_average("none", increasing=True) == pytest.approx((1 + 2) / 10)
    assert run.ruler_weighted_average("none", increasing=False) == pytest.approx((4 + 3) / 10)


def test_tasks_with_the_same_samples_count_once():
    """The likelihood and the choice task of a question are not independent."""

    def findings(*names):
        samples = [
            {"id": str(i), "text": i, "length": 512, "depth": 50, "score": float(i % 2)}
            for i in range(20)
        ]
        tasks = [
            {"task": name, "lengths": [512], "depths": [50], "samples": {"none": samples}}
            for name in names
        ]
        run = {"trained_length": 256}
        methods = [{"label": "none", "method": None}]
        return RunStatistics({"run": run, "methods": methods, "retrieval": tasks})

    alone = findings("rp_vt").accuracy("none")
    twins = findings("rp_vt", "rp_vt_ll", "rp_vt_mc").accuracy("none")
    others = findings("rp_vt", "rp_cwe", "rp_fwe").accuracy("none")
    assert twins == alone
    assert others.n == 3 * alone.n
    assert others.half_width < 0.7 * alone.half_width
