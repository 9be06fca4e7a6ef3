"""Means over tasks: each task counts the same, chance is taken off, twins are not pooled.

The samples are made up, so that what is true of each method is known beforehand.
"""

from __future__ import annotations

from typing import Any

import pytest

from rope_patch.evaluation.report import retrieval_tables, summary
from rope_patch.evaluation.report.results.run_statistics import RunStatistics

WITHIN, BEYOND, TRAINED = 512, 2048, 1024
RULER = [
    *(f"rp_niah_{kind}_{i}" for kind in ("single", "multikey") for i in (1, 2, 3)),
    *("rp_niah_multivalue", "rp_niah_multiquery", "rp_vt", "rp_cwe", "rp_fwe"),
    *("rp_qa_1", "rp_qa_2"),
]


def samples(
    hits: int, count: int, length: int, chance: float | None = None
) -> list[dict[str, Any]]:
    """Return samples of one task at one length, each on a text of its own, `hits` of them right."""
    return [
        {
            "id": f"{length}/{i}",
            "text": i,
            "length": length,
            "depth": 50,
            "score": float(i < hits),
            "log_likelihood": None,
            "target_tokens": 4,
            **({} if chance is None else {"chance": chance}),
        }
        for i in range(count)
    ]


def run(tasks: dict[str, dict[str, list[dict[str, Any]]]]) -> RunStatistics:
    """Return the statistics of samples by task and method."""
    retrieval = [
        {"task": task, "lengths": [WITHIN, BEYOND], "depths": [50], "samples": by_label}
        for task, by_label in tasks.items()
    ]
    methods = [{"label": "none", "method": None}, {"label": "yarn", "method": "yarn"}]
    results: Any = {"run": {"trained_length": TRAINED}, "methods": methods, "retrieval": retrieval}
    return RunStatistics(results)


def unequal() -> RunStatistics:
    """Return thirteen tasks as a stopping rule measures them: on more samples near one half.

    The plain model has 50% of six tasks and all of seven. Beyond, the patched model loses the six.
    """
    tasks = {}
    for number, task in enumerate(RULER):
        hard = number < 6
        within = samples(250, 500, WITHIN) if hard else samples(40, 40, WITHIN)
        beyond = samples(0, 40, BEYOND) if hard else samples(40, 40, BEYOND)
        tasks[task] = {"none": within, "yarn": beyond}
    return run(tasks)


def test_each_task_counts_the_same_whatever_its_number_of_samples():
    stats = unequal()
    within, beyond = stats.accuracy("none"), stats.accuracy("yarn")
    assert within is not None
    assert beyond is not None
    assert within.estimate == pytest.approx((6 * 0.5 + 7) / 13)
    assert beyond.estimate == pytest.approx(7 / 13)
    assert within.n == 6 * 500 + 7 * 40
    kept = stats.retention("yarn", BEYOND)
    assert kept is not None
    assert kept.estimate == pytest.approx(7 / 10)
    assert kept.high < 0.85
    length, reason = stats.effective_length("yarn")
    assert length is None
    assert reason.startswith("fails at 2,048 tokens: 70.0%")


def test_rulers_average_is_the_mean_of_its_thirteen_tasks():
    stats = unequal()
    average = stats.ruler_average("none", WITHIN)
    assert average is not None
    assert average.estimate == pytest.approx(10 / 13)
    assert stats.ruler_average("none", BEYOND) is None  # nothing was measured there
    alone = run({task: {"none": samples(9, 10, WITHIN)} for task in RULER[:-1]})
    assert not alone.has_ruler
    assert alone.ruler_average("none", WITHIN) is None


def test_rulers_average_has_a_row_where_other_tasks_ran_too():
    everything = {task: {"none": samples(10, 10, WITHIN)} for task in RULER}
    everything["rp_count"] = {"none": samples(0, 10, WITHIN)}
    table = retrieval_tables.tables(run(everything))[0]
    assert table.name == "Accuracy by length, mean of 14 tasks"
    assert [(row.group, row.cells[0].text) for row in table.rows] == [
        ("", "93%"),
        ("RULER-like, 13 tasks", "100%"),
    ]


def test_rulers_threshold_is_for_written_answers_alone():
    assert not run({f"{task}_ll": {"none": samples(10, 10, WITHIN)} for task in RULER}).has_ruler


@pytest.mark.parametrize(
    ("plain", "patched", "expected"), [(300, 100, 0.0), (300, 200, 0.5), (500, 500, 1.0)]
)
def test_what_a_guess_gets_is_nothing_kept(plain, patched, expected):
    """Of five choices, 500 samples: a method that guesses keeps none of the model's ability."""
    stats = run(
        {
            "rp_recall_mc": {
                "none": samples(plain, 500, WITHIN, 0.2),
                "yarn": samples(patched, 500, BEYOND, 0.2),
            }
        }
    )
    kept = stats.retention("yarn", BEYOND)
    assert kept is not None
    assert kept.estimate == pytest.approx(expected)
    assert kept.low <= expected <= kept.high


def test_a_plain_model_that_guesses_has_nothing_to_keep():
    stats = run(
        {
            "rp_recall_mc": {
                "none": samples(110, 500, WITHIN, 0.2),
                "yarn": samples(100, 500, BEYOND, 0.2),
            }
        }
    )
    assert stats.retention("yarn", BEYOND) is None
    length, reason = stats.effective_length("yarn")
    assert length is None
    assert "not surely better than guessing" in reason
    assert "not surely better than guessing" in summary.sentences(stats)[0]


def test_a_question_and_its_twins_count_once():
    def both(hits: int, chance: float | None = None) -> dict[str, list[dict[str, Any]]]:
        return {label: samples(hits, 20, WITHIN, chance) for label in ("none", "yarn")}

    tasks = {"rp_recall": both(18), "rp_recall_ll": both(2), "rp_recall_mc": both(10, 0.2)}
    written = run(tasks).accuracy("none")
    assert written == run({"rp_recall": tasks["rp_recall"]}).accuracy("none")
    assert written is not None
    assert (written.estimate, written.n) == (0.9, 20)
    twins = run({task: tasks[task] for task in ("rp_recall_mc", "rp_recall_ll")})
    by_likelihood = twins.accuracy("none")
    assert by_likelihood is not None
    assert (by_likelihood.estimate, by_likelihood.n) == (0.1, 20)
    difference = run(tasks).difference("yarn", "none")
    assert difference is not None
    assert difference.difference.n == 20


def test_paired_differences_count_each_task_the_same():
    """Pooled, yarn would win 45 to 10; as a mean of tasks it is worse."""
    tasks = {
        "rp_vt": {"none": samples(0, 450, WITHIN), "yarn": samples(45, 450, WITHIN)},
        "rp_cwe": {"none": samples(10, 20, WITHIN), "yarn": samples(0, 20, WITHIN)},
    }
    test = run(tasks).difference("yarn", "none")
    assert test is not None
    assert test.difference.estimate == pytest.approx((0.1 - 0.5) / 2)
    assert test.difference.high < 0
