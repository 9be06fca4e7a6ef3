"""Means over tasks: each task counts the same, chance is taken off, twins are not pooled.

The samples are made up, so that what is true of each method is known beforehand.
"""

import pytest
from helpers.report_results import results, retrieval, statistics_of

from rope_patch.evaluation import (
    RunStatistics,
    accuracy_tables,
    can_tell,
    heat_maps,
    retention_table,
    usable_table,
)

WITHIN, BEYOND, TRAINED = 512, 2048, 1024
RULER = [
    *(f"rp_niah_{kind}_{i}" for kind in ("single", "multikey") for i in (1, 2, 3)),
    *("rp_niah_multivalue", "rp_niah_multiquery", "rp_vt", "rp_cwe", "rp_fwe"),
    *("rp_qa_1", "rp_qa_2"),
]


def samples(hits, count, length, chance=None):
    """Return samples of one task at one length, each on a text of its own, `hits` of them right."""
    row = {"length": length, "depth": 50, "log_likelihood": None, "target_tokens": 4}
    row |= {} if chance is None else {"chance": chance}
    return [
        row | {"id": f"{length}/{i}", "text": i, "score": float(i < hits)} for i in range(count)
    ]


def run(tasks):
    """Return the statistics of samples by task and method."""
    everywhere = {task: {"none": [], "yarn": []} | of for task, of in tasks.items()}
    return statistics_of(everywhere, TRAINED)


@pytest.fixture(scope="module")
def unequal():
    """Return thirteen tasks as a stopping rule measures them: on more samples near one half.

    The plain model has 50% of six tasks and all of seven. Beyond, the patched model loses the six.
    """
    hard = {"none": samples(250, 500, WITHIN), "yarn": samples(0, 40, BEYOND)}
    easy = {"none": samples(40, 40, WITHIN), "yarn": samples(40, 40, BEYOND)}
    return run({task: hard if number < 6 else easy for number, task in enumerate(RULER)})


def test_each_task_counts_the_same_whatever_its_number_of_samples(unequal):
    within, beyond = unequal.accuracy("none"), unequal.accuracy("yarn")
    assert within.estimate == pytest.approx((6 * 0.5 + 7) / 13)
    assert beyond.estimate == pytest.approx(7 / 13)
    assert within.n == 6 * 500 + 7 * 40
    kept = unequal.retention("yarn", BEYOND)
    assert kept.estimate == pytest.approx(7 / 10)
    assert kept.high < 0.85
    assert str(unequal.usable_length("yarn")) == f"below {BEYOND:,} tokens (the shortest measured)"


def test_rulers_average_is_the_mean_of_its_thirteen_tasks(unequal):
    assert unequal.ruler_average("none", WITHIN).estimate == pytest.approx(10 / 13)
    assert unequal.ruler_average("none", BEYOND) is None  # nothing was measured there
    alone = run({task: {"none": samples(9, 10, WITHIN)} for task in RULER[:-1]})
    assert not alone.has_ruler
    assert alone.ruler_average("none", WITHIN) is None


def test_rulers_average_has_a_row_where_other_tasks_ran_too():
    everything = {task: {"none": samples(10, 10, WITHIN)} for task in RULER}
    everything["rp_count"] = {"none": samples(0, 10, WITHIN)}
    table = accuracy_tables(run(everything))[0]
    assert "14 tasks" in table.name
    (first, first_cell), (ruler, ruler_cell) = (
        (row.group, row.cells[0].text) for row in table.rows
    )
    assert (first, first_cell) == ("", "93%")
    assert "RULER" in ruler
    assert ruler_cell == "100%"


@pytest.mark.parametrize(
    ("tasks", "is_held"),
    [(RULER, True), (RULER[:-1], False), ([f"{task}_ll" for task in RULER], False)],
)
def test_rulers_threshold_is_for_written_answers_of_all_its_tasks(tasks, is_held):
    stats = run({task: {"none": samples(10, 10, WITHIN)} for task in tasks})
    assert stats.has_ruler == is_held
    heads = [column.text for column in usable_table(stats).columns]
    assert any("85.6%" in head for head in heads) == is_held


def test_weighted_averages_are_those_of_ruler():
    """Weights 1, 2, 3, 4 over lengths, or 4, 3, 2, 1."""
    lengths = {256: 10, WITHIN: 10, BEYOND: 0, 2 * BEYOND: 0}
    rows = [row for length, hits in lengths.items() for row in samples(hits, 10, length)]
    stats = run({"rp_vt": {"none": rows}})
    assert stats.ruler_weighted_average("none", increasing=True) == pytest.approx((1 + 2) / 10)
    assert stats.ruler_weighted_average("none", increasing=False) == pytest.approx((4 + 3) / 10)


@pytest.mark.parametrize(
    ("plain", "patched", "expected"), [(300, 100, 0.0), (300, 200, 0.5), (500, 500, 1.0)]
)
def test_what_a_guess_gets_is_nothing_kept(plain, patched, expected):
    """Of five choices, 500 samples: a method that guesses keeps none of the model's ability."""
    of = {"none": samples(plain, 500, WITHIN, 0.2), "yarn": samples(patched, 500, BEYOND, 0.2)}
    kept = run({"rp_recall_mc": of}).retention("yarn", BEYOND)
    assert kept.estimate == pytest.approx(expected)
    assert kept.low <= expected <= kept.high


def test_a_plain_model_that_guesses_has_nothing_to_keep():
    of = {"none": samples(110, 500, WITHIN, 0.2), "yarn": samples(100, 500, BEYOND, 0.2)}
    stats = run({"rp_recall_mc": of})
    assert stats.retention("yarn", BEYOND) is None
    assert stats.usable_length("yarn") is None
    assert "guessing" in stats.nothing_to_keep


@pytest.mark.parametrize("count", [8, 22, 23])
def test_so_many_texts_as_a_usable_length_needs_do(count):
    """Of 23 answers that are all right, 85% or less is true in at most 2.5% of runs: .85^23."""
    of = {"none": samples(count, count, WITHIN), "yarn": samples(count, count, BEYOND)}
    usable = run({"rp_vt": of}).usable_length("yarn")
    assert (usable.low, usable.texts_needed) == ((None, 23) if count < 23 else (BEYOND, None))


def test_a_usable_length_compares_with_the_shortest_length():
    """The plain model has 60% at the trained length; what is kept is of its 100% before."""
    rows = [
        row for length, hits in ((WITHIN, 100), (TRAINED, 60)) for row in samples(hits, 100, length)
    ]
    stats = run({"rp_vt": {"none": rows, "yarn": samples(60, 100, BEYOND)}})
    assert stats.retention("yarn", BEYOND).estimate == pytest.approx(0.6)
    assert str(stats.usable_length("none")) == f"{WITHIN} tokens ({WITHIN} to {TRAINED:,})"
    assert str(stats.usable_length("yarn")) == f"below {BEYOND:,} tokens (the shortest measured)"


def test_a_method_that_leaves_short_texts_as_they_are_keeps_all_there():
    """Eight texts show nothing of a method that answers alike but with other likelihoods."""

    def rows(nats):
        short = [row | {"log_likelihood": -nats - i} for i, row in enumerate(samples(6, 8, WITHIN))]
        return [*short, *samples(6, 8, BEYOND)]

    stats = run({"rp_vt": {"none": rows(1.0), "yarn": rows(1.0), "linear": rows(1.5)}})
    assert stats.usable_length("yarn").low == stats.usable_length("none").low == WITHIN
    assert stats.usable_length("linear").low is None
    without = run({"rp_vt": dict.fromkeys(("none", "yarn"), samples(6, 8, WITHIN))})
    assert without.usable_length("yarn").low is None


def test_each_group_of_tasks_has_a_usable_length():
    whole = {
        label: [*samples(60, 60, WITHIN), *samples(60, 60, BEYOND)] for label in ("none", "yarn")
    }
    lost = whole | {"yarn": [*samples(60, 60, WITHIN), *samples(0, 60, BEYOND)]}
    stats = run({"rp_vt": whole, "rp_niah_single_1": whole, "rp_copy": lost})
    assert stats.families == {"rp_hard": ["rp_copy"], "rp_ruler": ["rp_vt", "rp_niah_single_1"]}
    by_family = {name: str(stats.usable_length("yarn", name)) for name in stats.families}
    assert by_family == {
        "rp_hard": f"{WITHIN} tokens ({WITHIN} to {BEYOND:,})",
        "rp_ruler": f"at least {BEYOND:,} tokens (the longest measured)",
    }
    assert run({"rp_vt_ll": whole}).families == {"rp_ruler": ["rp_vt_ll"]}


def test_a_question_and_its_twins_count_once():
    def both(hits, chance=None):
        return {label: samples(hits, 20, WITHIN, chance) for label in ("none", "yarn")}

    tasks = {"rp_recall": both(18), "rp_recall_ll": both(2), "rp_recall_mc": both(10, 0.2)}
    written = run(tasks).accuracy("none")
    assert written == run({"rp_recall": tasks["rp_recall"]}).accuracy("none")
    assert (written.estimate, written.n) == (0.9, 20)
    twins = run({task: tasks[task] for task in ("rp_recall_mc", "rp_recall_ll")})
    by_likelihood = twins.accuracy("none")
    assert (by_likelihood.estimate, by_likelihood.n) == (0.1, 20)
    assert run(tasks).difference("yarn", "none").difference.n == 20
    others = run({task: both(18) for task in ("rp_recall", "rp_vt", "rp_cwe")}).accuracy("none")
    assert others.n == 3 * written.n
    assert others.half_width < 0.7 * written.half_width


def test_paired_differences_count_each_task_the_same():
    """Pooled, yarn would win 45 to 10; as a mean of tasks it is worse."""
    tasks = {
        "rp_vt": {"none": samples(0, 450, WITHIN), "yarn": samples(45, 450, WITHIN)},
        "rp_cwe": {"none": samples(10, 20, WITHIN), "yarn": samples(0, 20, WITHIN)},
    }
    difference = run(tasks).difference("yarn", "none").difference
    assert difference.estimate == pytest.approx((0.1 - 0.5) / 2)
    assert difference.high < 0


def test_failed_samples_count_in_no_number():
    rows = samples(10, 10, WITHIN)
    for row in rows[:3]:
        row |= {"score": None, "error": "out of memory"}
    accuracy = run({"rp_vt": {"none": rows}}).accuracy("none")
    assert (accuracy.n, accuracy.estimate) == (7, 1)


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "is_shown"), [(1, False), (60, True)])
def test_retention_is_shown_where_its_interval_says_something(count, is_shown):
    stats = RunStatistics(results() | {"retrieval": [retrieval("rp_niah_single_1", count=count)]})
    kept = [stats.retention(label, stats.lengths[-1]) for label in stats.labels]
    assert any(map(can_tell, kept)) == is_shown
    assert (retention_table(stats) is not None) == is_shown


def test_heat_maps_show_each_depth_and_length():
    task = retrieval("rp_niah_single_1", count=30)
    stats = RunStatistics(results() | {"retrieval": [task]})
    maps = heat_maps(stats, "rp_niah_single_1")
    assert [table.name for table in maps] == list(stats.names.values())
    for label, table in zip(stats.names, maps, strict=True):
        for row, depth in zip(table.rows, (10, 50, 90), strict=True):
            for cell, length in zip(row.cells, task["lengths"], strict=True):
                scores = [
                    s["score"]
                    for s in task["samples"][label]
                    if (s["depth"], s["length"]) == (depth, length)
                ]
                assert cell.text == f"{sum(scores):.0f}/{len(scores)}"
                assert cell.share == pytest.approx(sum(scores) / len(scores))
