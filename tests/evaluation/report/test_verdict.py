"""The verdict by likelihood: what it decides, what it cannot, and what it is held against."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rope_patch.evaluation.report import summary
from rope_patch.evaluation.report.headline import headline
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary_table import summary_table
from rope_patch.evaluation.report.verdict import is_shown_to_help

LENGTH, TRAINED = 2048, 1024


def samples(loss: float, label: str, texts: int, spread: float = 0.2) -> list[dict[str, Any]]:
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


def run(
    losses: dict[str, float],
    texts: int,
    task: str = "rp_niah_multikey_1_ll",
    spread: float = 0.2,
    floor: float | None = None,
) -> RunStatistics:
    """Return the statistics of a run in which no answer is right, with these losses by method."""
    by_label = {label: samples(loss, label, texts, spread) for label, loss in losses.items()}
    control = [] if floor is None else [{"task": task, "samples": {"none": samples(floor, "f", 4)}}]
    results: Any = {
        "run": {"trained_length": TRAINED},
        "methods": [
            {"label": label, "method": None if label == "none" else label} for label in losses
        ],
        "retrieval": [{"task": task, "lengths": [LENGTH], "depths": [50], "samples": by_label}],
        "control": control,
    }
    return RunStatistics(results)


def test_likelihood_decides_where_no_answer_is_right():
    stats = run({"none": 3.0, "yarn": 0.6}, texts=6)
    head = summary.sentences(stats)[0]
    assert head.startswith("At 2,048 tokens yarn makes the right answers likelier than no patch: ")
    assert "n = 30, 6 texts, p " in head
    assert stats.comparisons_with_plain(LENGTH)["yarn"][1] == pytest.approx(2 / 2**6)
    difference = stats.loss_difference("yarn", "none", LENGTH)
    assert difference is not None
    assert difference.mean.low < -2.4 < difference.mean.high < 0


def test_questions_about_one_text_are_one_piece_of_evidence():
    stats = run({"none": 3.0, "yarn": 0.6}, texts=1)
    assert stats.comparisons_with_plain(LENGTH)["yarn"][1] == 1
    head = summary.sentences(stats)[0]
    assert head.startswith("This run has too few texts to say (6 decide) whether yarn makes")
    assert "no interval, n = 5, 1 text, p = 1" in head


@pytest.mark.parametrize(("methods", "least"), [(1, 6), (2, 7), (4, 8), (7, 9)])
def test_nothing_is_shown_with_fewer_texts_than_decide(methods, least):
    """With five texts nothing is, and as many as are named show the largest difference."""
    losses = {"none": 30.0} | {f"m{i}": 0.6 + 3 * i for i in range(methods)}
    for texts in (5, least - 1, least):
        stats = run(losses, texts=texts, floor=40.0)
        helps = [m for m in stats.patched if is_shown_to_help(stats, m, LENGTH)]
        assert bool(helps) == (texts == least)
        assert stats.is_decided == stats.has_enough_texts == (texts == least)
        head = summary.sentences(stats)[0]
        assert (f"too few texts to say ({least} decide)" in head) == (texts < least)
        if texts < least:
            assert Ranking(stats).shown_best == set()
            assert headline(stats, Ranking(stats)).endswith(f"too few to say ({least} decide).")
        if texts < 6:
            assert set(stats.rivals_of_best(LENGTH)) == set(stats.patched) - {"m0"}


def test_a_run_that_cannot_decide_says_how_many_texts_it_takes():
    stats = run({"none": 1.0, "yarn": 0.6}, texts=9, spread=0.5)
    head = summary.sentences(stats)[0]
    assert head.startswith("This run cannot decide whether yarn makes the right answers likelier")
    needed = int(head.split("; about ")[1].split(" texts")[0].replace(",", ""))
    assert 9 < needed < 5000


def test_the_best_is_named_only_where_the_others_are_shown_to_be_worse():
    apart = run({"none": 3.0, "yarn": 0.6, "linear": 2.0}, texts=8)
    assert apart.rivals_of_best(LENGTH) == []
    assert "Each of the other methods is shown to be worse than it." in summary.sentences(apart)
    close = run({"none": 3.0, "yarn": 0.6, "ntk": 0.62, "linear": 2.0}, texts=8)
    (rival,) = close.rivals_of_best(LENGTH)
    assert {rival, close.best_by_likelihood(LENGTH)} == {"yarn", "ntk"}
    assert f"Not told apart from it: {rival}." in summary.sentences(close)
    assert not any("the best of" in sentence for sentence in summary.sentences(close))


def test_methods_are_one_family_at_the_length():
    """Of 20 methods without an effect none is called better, nineteen times of twenty."""
    calls = 0
    for seed in range(60):
        labels = [f"m{seed}-{i}" for i in range(20)]
        stats = run({"none": 1.0, **dict.fromkeys(labels, 1.0)}, texts=10)
        calls += any(p < 0.05 for _, p in stats.comparisons_with_plain(LENGTH).values())
    assert calls <= 9  # 60 times .05, and three standard deviations


def test_a_worse_method_is_not_called_better():
    head = summary.sentences(run({"none": 0.5, "yarn": 2.0, "linear": 3.0}, texts=8))[0]
    assert head.startswith("No method makes the right answers likelier than no patch at 2,048")


@pytest.mark.parametrize(("floor", "reads"), [(3.0, True), (0.5, False)])
def test_answers_are_held_against_questions_without_them(floor, reads):
    stats = run({"none": 3.0, "yarn": 0.6}, texts=6, floor=floor)
    assert is_shown_to_help(stats, "yarn", LENGTH) is reads
    sentences = summary.sentences(stats)
    (sentence,) = (s for s in sentences if s.startswith("Without the answers in the text"))
    assert sentence.endswith("the model does read them.") == reads
    assert sentence.endswith("it is not shown that the model reads them.") != reads


def test_two_texts_cannot_show_that_the_model_reads():
    """Two of six texts, four of them the floor's, are the lowest in one division of fifteen."""
    few, enough = (
        run({"none": 3.0, "yarn": 0.6}, texts=texts, spread=0.3, floor=2.0) for texts in (2, 8)
    )
    assert not few.reads_answers("yarn", LENGTH)
    assert enough.reads_answers("yarn", LENGTH)
    assert not enough.reads_answers("none", LENGTH)


def test_reading_is_corrected_over_the_methods():
    losses = {f"m{i}": 2.6 for i in range(20)}
    alone, among = (
        run({"none": 3.0, "yarn": 2.6} | others, 6, floor=3.0) for others in ({}, losses)
    )
    assert alone.reads_answers("yarn", LENGTH)
    assert not among.reads_answers("yarn", LENGTH)


@pytest.mark.parametrize(("texts", "is_shown"), [(2, False), (20, True)])
def test_accuracies_stand_beside_likelihoods_where_they_say_something(texts, is_shown):
    stats = run({"none": 3.0, "yarn": 0.6}, texts)
    table, _ = summary_table([("", stats, Ranking(stats))])
    assert table is not None
    heads = [column.text for column in table.columns]
    assert "loss of right answers at 2,048" in heads
    assert ("accuracy beyond 1,024" in heads) == is_shown


def test_twins_by_choice_are_not_counted_again():
    stats = run({"none": 3.0, "yarn": 0.6}, texts=6)
    both = stats.results | {
        "retrieval": [
            *(stats.results.get("retrieval") or []),
            {**(stats.results.get("retrieval") or [])[0], "task": "rp_niah_multikey_1_mc"},
        ]
    }
    twins = RunStatistics(both)
    assert twins.likelihood_tasks == ["rp_niah_multikey_1_ll"]
    assert twins.answer_loss("yarn", LENGTH) == stats.answer_loss("yarn", LENGTH)
