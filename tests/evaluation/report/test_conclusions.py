"""The verdict between methods: what it decides, what it cannot, and what it is held against."""

import random

import pytest
from helpers.report_results import results, retrieval, statistics_of

from rope_patch.evaluation import (
    Ranking,
    RunStatistics,
    accuracy_tables,
    conclude,
    is_shown_to_help,
    merge_runs,
    short_table,
    summary_sentences,
)

LENGTH, TRAINED = 2048, 1024
TASK = "rp_niah_multikey_1_ll"


def answers(loss, label, texts, spread=0.2):
    """Return five questions about each text, whose answers have about this loss a token."""
    rows = []
    for text in range(texts):
        rng = random.Random(f"{label}/{text}")
        level = loss + rng.gauss(0, spread)
        for i in range(5):
            nats = level + rng.gauss(0, 0.1)
            row = {"id": f"{text}/{i}", "text": text, "length": LENGTH, "depth": 50}
            rows.append(row | {"score": 0.0, "log_likelihood": -4 * nats, "target_tokens": 4})
    return rows


def run(losses, texts, spread=0.2, floor=None, tasks=(TASK,)):
    """Return the statistics of a run in which no answer is right, with these losses by method.

    `floor` is the loss of the answers where the text lacks them.
    """
    of = {label: answers(loss, label, texts, spread) for label, loss in losses.items()}
    control = [] if floor is None else [{"task": TASK, "samples": {"none": answers(floor, "f", 4)}}]
    return statistics_of(dict.fromkeys(tasks, of), TRAINED, control)


# -- likelihoods -----------------------------------------------------------------------------------


def test_likelihood_decides_where_no_answer_is_right():
    stats = run({"none": 3.0, "yarn": 0.6}, texts=6)
    assert stats.verdicts_on_plain(LENGTH)["yarn"].p_value == pytest.approx(2 / 2**6)
    difference = stats.loss_difference("yarn", "none", LENGTH).mean
    assert difference.low < -2.4 < difference.high < 0


def test_questions_about_one_text_are_one_piece_of_evidence():
    stats = run({"none": 3.0, "yarn": 0.6}, texts=1)
    assert stats.verdicts_on_plain(LENGTH)["yarn"].p_value == 1
    assert "n = 5, 1 text, p = 1" in summary_sentences(stats)[0]


def test_tasks_that_ask_about_the_same_texts_are_one_piece_of_evidence():
    losses, lines = {"none": 3.0, "yarn": 0.6}, ("rp_oolong_count_ll", "rp_oolong_topic_ll")
    for tasks, n, texts in ((lines, 60, 6), ((TASK, lines[0]), 60, 12)):
        stats = run(losses, texts=6, tasks=tasks)
        assert stats.verdicts_on_plain(LENGTH)["yarn"].p_value == pytest.approx(2 / 2**texts)
        assert f"n = {n}, {texts} texts" in summary_sentences(stats)[0]


@pytest.mark.parametrize(("methods", "least"), [(1, 6), (2, 7), (4, 8), (7, 9)])
def test_nothing_is_shown_with_fewer_texts_than_decide(methods, least):
    """With five texts nothing is, and as many as are named show the largest difference."""
    losses = {"none": 30.0} | {f"m{i}": 0.6 + 3 * i for i in range(methods)}
    for texts in (5, least - 1, least):
        stats = run(losses, texts=texts, floor=40.0)
        helps = [m for m in stats.patched if is_shown_to_help(stats, m, LENGTH)]
        assert bool(helps) == (texts == least)
        assert stats.is_decided == stats.has_enough_texts == (texts == least)
        assert (f"({least} decide)" in summary_sentences(stats)[0]) == (texts < least)
        if texts < least:
            assert Ranking(stats).shown_best == set()
            said = conclude(stats, Ranking(stats))
            assert said.method is None
            assert said.reason.endswith(f"{least} can.")
        if texts < 6:
            assert set(stats.rivals_of_best(LENGTH)) == set(stats.patched) - {"m0"}


def test_the_best_is_named_only_where_the_others_are_shown_to_be_worse():
    apart = run({"none": 3.0, "yarn": 0.6, "linear": 2.0}, texts=8)
    assert apart.rivals_of_best(LENGTH) == []
    close = run({"none": 3.0, "yarn": 0.6, "ntk": 0.62, "linear": 2.0}, texts=8)
    (rival,) = close.rivals_of_best(LENGTH)
    assert {rival, close.best_by_likelihood(LENGTH)} == {"yarn", "ntk"}


def test_methods_are_one_family_at_the_length():
    """Of 20 methods without an effect none is called better, nineteen times of twenty."""
    calls = 0
    for seed in range(60):
        labels = [f"m{seed}-{i}" for i in range(20)]
        stats = run({"none": 1.0, **dict.fromkeys(labels, 1.0)}, texts=10)
        calls += any(v.p_value < 0.05 for v in stats.verdicts_on_plain(LENGTH).values())
    assert calls <= 9  # 60 times .05, and three standard deviations


@pytest.mark.parametrize(("floor", "reads"), [(3.0, True), (0.5, False)])
def test_answers_are_held_against_questions_without_them(floor, reads):
    stats = run({"none": 3.0, "yarn": 0.6}, texts=6, floor=floor)
    assert is_shown_to_help(stats, "yarn", LENGTH) is reads
    assert not stats.reads_answers("none", LENGTH)


def test_two_texts_cannot_show_that_the_model_reads():
    """Two of six texts, four of them the floor's, are the lowest in one division of fifteen."""
    for texts, reads in ((2, False), (8, True)):
        stats = run({"none": 3.0, "yarn": 0.6}, texts=texts, spread=0.3, floor=2.0)
        assert stats.reads_answers("yarn", LENGTH) is reads


def test_reading_is_corrected_over_the_methods():
    for others, reads in (({}, True), ({f"m{i}": 2.6 for i in range(20)}, False)):
        stats = run({"none": 3.0, "yarn": 2.6} | others, 6, floor=3.0)
        assert stats.reads_answers("yarn", LENGTH) is reads


def test_twins_by_choice_are_not_counted_again():
    losses = {"none": 3.0, "yarn": 0.6}
    stats, twins = run(losses, 6), run(losses, 6, tasks=(TASK, "rp_niah_multikey_1_mc"))
    assert twins.likelihood_tasks == [TASK]
    assert twins.answer_loss("yarn", LENGTH) == stats.answer_loss("yarn", LENGTH)


# -- accuracies and looks --------------------------------------------------------------------------


def test_only_the_mean_over_tasks_at_the_longest_length_is_tested():
    """A single task of several and a shorter length bear no mark, be they ever so different."""
    names = ("rp_niah_single_1", "rp_vt")
    both = [retrieval(name, lengths=(2048, 6144, 8192), count=30) for name in names]
    for task in both:
        for label, rows in task["samples"].items():
            for row in rows:
                row |= {"score": float(label == "yarn ×2"), "text": row["id"]}
    averages, by_task = accuracy_tables(RunStatistics(results() | {"retrieval": both}))
    assert [cell.text for cell in averages.rows[1].cells[:3]] == ["100%", "100%", "▲◆ 100%"]
    assert "p < 0.001" in averages.rows[1].cells[2].tip
    assert {cell.text for row in by_task.rows for cell in row.cells} == {"0%", "100%"}
    assert not any(", p " in cell.tip for row in by_task.rows for cell in row.cells)
    assert "+100.0 points (+81.2 to +100.0)" in by_task.rows[1].cells[0].tip


def test_marks_come_by_chance_in_one_report_of_twenty():
    """Methods that are all as good as the plain model, at four lengths of three tasks."""
    marked = 0
    names = ("rp_niah_single_1", "rp_niah_single_2", "rp_vt")
    for seed in range(24):
        rng = random.Random(seed)
        retrieved = [retrieval(name, count=24) for name in names]
        for row in (r for t in retrieved for rows in t["samples"].values() for r in rows):
            row |= {"score": float(rng.random() < 0.5)}
        text = str(accuracy_tables(RunStatistics(results() | {"retrieval": retrieved})))
        marked += any(mark in text for mark in "▲▼◆")
    assert marked <= 4  # 24 times .05, and three standard deviations


def test_looks_at_growing_data_are_corrected():
    """A run that was looked at twice tests each p at a sixth of the level, and says so."""
    task = retrieval("rp_niah_single_1", lengths=(2048, 8192), count=30)
    plain = results() | {"retrieval": [task]}
    looked = plain | {"run": plain["run"] | {"looks": [15, 30]}}
    fixed, grown = RunStatistics(plain), RunStatistics(looked)
    for label, (_, p) in fixed.accuracy_comparisons().items():
        assert grown.accuracy_comparisons()[label][1] == pytest.approx(min(1, 6 * p))
    for label, verdict in fixed.verdicts_on_plain(8192).items():
        wider = grown.verdicts_on_plain(8192)[label]
        assert wider.p_value == pytest.approx(min(1, 6 * verdict.p_value))
        assert wider.test.mean.half_width > verdict.test.mean.half_width
    assert fixed.verdicts_on_plain(2048) == grown.verdicts_on_plain(2048)
    assert "2 looks" in summary_sentences(grown)[0]


def test_runs_that_are_merged_are_corrected_for_the_more_looks():
    runs = []
    for label, looks in (("yarn ×2", [30]), ("linear ×2", [15, 30])):
        task = retrieval("rp_niah_single_1", ("none", label), lengths=(2048, 8192))
        run = results() | {"retrieval": [task], "short": [], "perplexity": None, "cost": {}}
        methods = [m for m in run["methods"] if m["label"] in ("none", label)]
        runs.append(run | {"run": run["run"] | {"looks": looks}, "methods": methods})
    (merged,) = merge_runs(runs)
    assert RunStatistics(merged).look_factor() == 6
    assert len(RunStatistics(merged).accuracy_comparisons()) == 2


def test_short_tasks_are_tested_together_and_corrected_over_the_methods():
    """Eight losses of 100 without a win are McNemar's p of 1/128: .0156 after Holm over two."""
    scores = [1] * 100
    short = {"task": "cloze", "n": 100, "chance": None, "samples": {"none": scores}}
    short["samples"] |= {"yarn ×2": [0] * 8 + scores[8:], "linear ×2": scores}
    same = short | {"task": "facts", "samples": dict.fromkeys(short["samples"], scores)}
    for tasks, marked in (([short], [True]), ([short, same], [False, False, True])):
        stats = RunStatistics(results() | {"short": tasks, "perplexity": None})
        assert stats.short_p_values == {"yarn ×2": pytest.approx(2 * 2**-7), "linear ×2": 1}
        plain, yarn, linear = (
            [cell.text.endswith(" *") for cell in row.cells] for row in short_table(stats).rows
        )
        assert yarn == marked
        assert not any(plain + linear)
        assert any("p = 0.016" in sentence for sentence in summary_sentences(stats))
