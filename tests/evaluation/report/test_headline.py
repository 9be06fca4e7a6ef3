"""Test the headline: one sentence for each kind of result, which claims no more than it can."""

from __future__ import annotations

import re
from typing import Any

import pytest
from report_results import results, samples

from rope_patch.evaluation.report.headline import headline
from rope_patch.evaluation.report.ranking import Ranking
from rope_patch.evaluation.report.results.run_statistics import RunStatistics

NO_ANSWERS: dict[str, Any] = {"retrieval": [], "control": []}


def head_of(measured: dict[str, Any]) -> str:
    stats = RunStatistics(measured)
    return headline(stats, Ranking(stats))


def retrieved(
    chances: dict[str, tuple[float, float]], count: int = 100, likelihood: bool = True
) -> dict[str, Any]:
    """Return an evaluation of one task, right with these chances within and beyond."""
    measured = results() | {"control": []}
    measured["methods"] = [m for m in measured["methods"] if m["label"] in chances]
    by_label = {
        label: samples("rp_vt", pair, count=count, depths=(None,), label="")
        for label, pair in chances.items()
    }
    for rows in by_label.values():
        for i, sample in enumerate(rows):
            sample["text"] = i
            if not likelihood:
                sample["log_likelihood"] = None
    task = {"task": "rp_vt", "lengths": [2048, 4096, 6144, 8192], "samples": by_label}
    return measured | {"retrieval": [task]}


def test_a_usable_method_is_recommended_with_its_length_price_and_interval() -> None:
    head = head_of(retrieved({"none": (1, 0), "yarn ×2": (1, 1)}))
    assert re.fullmatch(
        r"Use yarn ×2 up to 8,192 tokens, 2 times the trained 4,096: it keeps 100% \(\d+–\d+%, "
        r"n = 100\) of the plain model's accuracy there, at the price of \+1\.\d% "
        r"\(\+0\.\d to \+1\.\d%\) in perplexity and \S+ points \(.*\) at short tasks up to 4,096\.",
        head,
    )


def test_likelier_answers_are_no_claim_that_the_model_is_usable() -> None:
    head = head_of(results())
    assert head.startswith("At 8,192 tokens use yarn ×2 rather than the plain model: the right ")
    assert "(p < 0.001, 45 texts), at the price of +1.3% (+0.7 to +1.9%) in perplexity" in head
    assert head.endswith("; that the model is usable there is not shown.")


def test_methods_that_are_not_told_apart_are_named() -> None:
    """Each text's answers are likelier with both methods, by amounts that differ."""
    labels = ("none", "yarn ×2", "linear ×2")
    measured = retrieved(dict.fromkeys(labels, (0.0, 0.0)), count=12)
    for label, first, second in (("yarn ×2", 5.0, 4.0), ("linear ×2", 3.9, 4.9)):
        for i, sample in enumerate(measured["retrieval"][0]["samples"][label]):
            sample["log_likelihood"] += first if i % 2 else second
    assert "; not told apart from it: linear ×2; " in head_of(measured)


def test_a_run_of_few_texts_cannot_decide() -> None:
    measured = retrieved({"none": (1, 0), "yarn ×2": (0.5, 0.5)}, count=4)
    head = head_of(measured)
    assert head.startswith("This run cannot decide what to use at 8,192 tokens: ")
    assert head.endswith("but 4 texts are too few to say (6 decide).")


def test_a_run_of_texts_that_differ_cannot_decide() -> None:
    measured = retrieved({"none": (0.5, 0.5), "yarn ×2": (0.5, 0.5)}, count=12)
    for i, sample in enumerate(measured["retrieval"][0]["samples"]["yarn ×2"]):
        sample["log_likelihood"] += 1.5 if i % 3 else -2.0
    assert "12 texts are too few to be sure (p = " in head_of(measured)


def test_an_undecided_run_names_the_plain_model_where_it_leads() -> None:
    measured = retrieved({"none": (1, 1), "yarn ×2": (0.5, 0.5)}, count=4)
    assert "the right answers are the likeliest with the plain model, but 4 texts" in head_of(
        measured
    )


def test_answers_no_likelier_than_without_them_in_the_text_decide_nothing() -> None:
    measured = results()
    for sample in measured["control"][0]["samples"]["none"]:
        sample["log_likelihood"] = -1.0
    assert head_of(measured).endswith("but not surely likelier than where the text lacks them.")


@pytest.mark.parametrize(
    ("beyond", "start"),
    [
        (0.0, "Use none of these methods beyond the trained 4,096 tokens: even with yarn ×2, "),
        (0.85, "This run cannot decide what to use beyond the trained 4,096 tokens: with yarn ×2 "),
    ],
)
def test_accuracy_decides_without_likelihoods(beyond: float, start: str) -> None:
    chances = {"none": (1.0, 0.0), "yarn ×2": (1.0, beyond)}
    head = head_of(retrieved(chances, likelihood=False))
    assert head.startswith(start)
    assert "of its accuracy at 6,144" in head


def test_perplexity_alone_decides_nothing() -> None:
    head = head_of(results() | NO_ANSWERS)
    assert head.startswith("This run cannot decide what to use: it measured no answers, only perp")
    assert "is the lowest with yarn ×2, 15." in head
    assert "but not surely lower than with the text cut to its last 2,048 tokens, " in head


def test_without_the_plain_model_or_far_lengths_nothing_is_recommended() -> None:
    measured = results()
    measured["methods"] = measured["methods"][1:]
    assert head_of(measured).startswith("This run cannot decide what to use beyond")
    measured = results()
    measured["run"]["trained_length"] = 32768
    assert head_of(measured) == (
        "This run cannot decide what to use: it measured nothing beyond the trained 32,768 tokens."
    )
    nothing = {"perplexity": None, "short": [], "cost": {}}
    head = head_of(results() | NO_ANSWERS | nothing)
    assert head == "Nothing was measured that tells which method to use."
