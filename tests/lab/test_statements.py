"""Test what the lab says of numbers: intervals over seeds, their text, and verdicts on papers."""

import math

import numpy as np
import pytest

from rope_patch.lab import (
    STATEMENTS,
    LabResults,
    LabSettings,
    check_statements,
    difference_range,
    difference_text,
    headline,
    loss_cell,
    seeded_difference,
    seeded_mean,
    share_cell,
    variants,
    verdict,
)
from rope_patch.statistics import Interval

# -- intervals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "luck"), [(3, 0.2), (3, 0.0), (1, 0.0)])
def test_intervals_hold_the_truth(seeds, luck):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        of_samples = random.normal(0, 0.3, 16)
        of_seeds = random.normal(0, luck, (seeds, 1))
        scores = 2.0 + of_seeds + of_samples + random.normal(0, 0.1, (seeds, 16))
        interval = seeded_mean(scores.tolist())
        held += interval.low <= 2.0 <= interval.high
    assert held >= 0.93 * 400


def test_one_half_width_is_that_of_samples_and_seeds_together():
    scores = [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]
    interval = seeded_mean(scores)
    # By hand: Student's t of 3 degrees over samples, of one degree over seeds.
    over_samples = 3.182446 * math.sqrt(5 / 3) / 2
    over_seeds = 12.706205 * math.sqrt(0.5) / math.sqrt(2)
    assert interval.estimate == 3.0
    assert interval.half_width == pytest.approx(math.hypot(over_samples, over_seeds), rel=1e-5)


def test_differences_are_paired():
    first = [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]]
    second = [[0.5, 4.5, 8.5], [1.5, 5.5, 9.5]]
    difference = seeded_difference(first, second)
    assert (difference.estimate, difference.low, difference.high) == (0.5, 0.5, 0.5)


def test_shares_stay_shares_and_perfect_ones_have_a_width():
    interval = seeded_mean([[1.0] * 20] * 3, is_share=True)
    assert interval.high == 1
    assert 0.8 < interval.low < 0.9


@pytest.mark.parametrize("scores", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_scores_of_different_samples_are_refused(scores):
    with pytest.raises(ValueError, match="same samples"):
        seeded_mean(scores)


# -- numbers as text -------------------------------------------------------------------------------


def interval(low, estimate, high):
    return Interval(estimate, low, high, 48, 16)


@pytest.mark.parametrize(
    ("cell", "values", "text"),
    [
        (loss_cell, (1.70, 1.75, 1.80), "1.75"),
        (loss_cell, (1.20, 1.75, 2.30), "unclear"),
        (loss_cell, (-math.inf, 1.75, math.inf), "unclear"),
        (share_cell, (0.3, 0.4, 0.5), "40%"),
        (share_cell, (0.2, 0.3, 0.4), "maybe chance"),
        (share_cell, (0.1, 0.2, 0.3), "chance or less"),
        (share_cell, (0.0, 0.1, 0.2), "chance or less"),
    ],
)
def test_numbers_are_printed_as_far_as_their_intervals_reach(cell, values, text):
    assert cell(interval(*values)).text == text
    assert "48" in cell(interval(*values)).tip
    assert cell(None, missing="no rows").text == "no rows"


def test_differences_have_signs_but_for_zero():
    assert difference_text(-0.001, is_share=False) == "0.00 nats"
    assert difference_text(0.126, is_share=False) == "+0.13 nats"
    assert difference_text(-0.126, is_share=True) == "−13 points"
    assert difference_range(interval(-0.5, 0, 0.25), is_share=False) == "−0.50 to +0.25"


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "bound", "expected"),
    [
        (-0.2, -0.1, 0.0, "agrees"),
        (0.1, 0.2, 0.0, "disagrees"),
        (-0.1, 0.1, 0.0, "cannot tell"),
        (-0.1, 0.0, 0.0, "cannot tell"),  # ends at the bound
        (0.0, 0.0, 0.0, "cannot tell"),
        (-0.01, 0.015, 0.02, "agrees"),
        (-0.04, -0.01, -0.05, "disagrees"),
        (-math.inf, math.inf, 0.0, "cannot tell"),
    ],
)
def test_verdict(low, high, bound, expected):
    assert verdict(Interval(0.0, low, high, 9, 9), bound) == expected


def made_up(losses, seeds=3):
    """Return results of text with a loss for each encoding and length; samples vary a little."""
    cells = []
    for encoding, by_length in losses.items():
        for seed in range(seeds):
            scores = [
                {"method": "plain", "length": length, "target": 64}
                | {"loss": [loss + 0.001 * ((seed + sample) % 3) for sample in range(8)]}
                for length, loss in by_length.items()
            ]
            cell = {"task": "text", "encoding": encoding, "seed": seed}
            cells.append({"cell": cell, "scores": scores})
    settings = {"encodings": list(losses), "tasks": ["text"], "length": 64, "seeds": seeds}
    settings["tests"] = [64, 128, 256, 512]
    return LabResults({"run": {"settings": settings}, "cells": cells})


def verdicts(results):
    return {finding.statement.claim: finding.verdict for finding in check_statements(results)}


def test_statements_agree_disagree_and_stay_open_as_numbers_say():
    losses = {
        "alibi": {64: 1.75, 128: 1.75, 512: 1.74},
        "sinusoidal": {64: 1.70, 128: 2.5, 512: 3.0},
        "rope": {64: 1.60, 128: 1.63, 512: 1.60},
        "t5": {64: 1.70, 128: 1.9, 512: 1.7405},
    }
    expected = {
        "ALiBi reads 8 times its length at no loss": "agrees",
        "sinusoids fail at twice the length": "agrees",
        "RoPE fails farther out": "disagrees",
        "T5's bias holds at twice the length": "disagrees",
        "within its length ALiBi loses less than sinusoids": "disagrees",
        "within its length RoPE loses less than ALiBi": "agrees",
        "a learned table loses less than no positions": "not measured",
        "ALiBi's last half of windows is flat, too": "not measured",
    }
    found = verdicts(made_up(losses))
    assert {claim: found[claim] for claim in expected} == expected


def test_seeds_that_differ_leave_a_statement_open():
    results = made_up({"rope": {64: 1.6}, "alibi": {64: 1.7}})
    assert verdicts(results)["within its length RoPE loses less than ALiBi"] == "agrees"
    for record, luck in zip(results.records("text", "rope"), (-0.3, 0.0, 0.3), strict=True):
        score = record["scores"][0]
        score["loss"] = [loss + luck for loss in score["loss"]]
    assert verdicts(results)["within its length RoPE loses less than ALiBi"] == "cannot tell"


def test_all_statements_are_measured_by_a_run_of_all_encodings():
    settings = LabSettings(encodings=("none", "alibi", "learned"), length=64)
    measured = {
        (encoding, v.method, v.length // 64)
        for encoding in {s.encoding for x in STATEMENTS for s in (x.first, x.second)}
        for v in variants(encoding, settings)
    }
    for statement in STATEMENTS:
        for side in (statement.first, statement.second):
            many = (side.multiple,) if isinstance(side.multiple, int) else side.multiple
            assert {(side.encoding, side.method, m) for m in many} <= measured


def test_published_differences_agree_with_their_own_statements():
    stated = [s for s in STATEMENTS if s.published is not None]
    assert len(stated) > 15
    for statement in stated:
        assert statement.published < statement.bound, statement.claim


def test_one_seed_says_nothing_about_papers():
    losses = {"alibi": dict.fromkeys((64, 128, 256, 512), 2.0)}
    for seeds, said in ((1, "cannot tell"), (3, "agrees")):
        results = made_up(losses, seeds)
        findings = check_statements(results)
        assert {finding.verdict for finding in findings} == {said, "not measured"}
        assert ("One seed" in headline(results, findings)) == (seeds == 1)
