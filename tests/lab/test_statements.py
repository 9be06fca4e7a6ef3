"""Test verdicts on made-up numbers, and that every statement can be measured."""

import pytest

from rope_patch.lab.measurement import variants
from rope_patch.lab.report.headline import headline
from rope_patch.lab.results import LabResults
from rope_patch.lab.settings import LabSettings
from rope_patch.lab.statements import (
    AGREES,
    DISAGREES,
    STATEMENTS,
    UNCLEAR,
    UNMEASURED,
    compare,
    verdict,
)
from rope_patch.statistics import Interval


@pytest.mark.parametrize(
    ("low", "high", "bound", "expected"),
    [
        (-0.2, -0.1, 0.0, AGREES),
        (0.1, 0.2, 0.0, DISAGREES),
        (-0.1, 0.1, 0.0, UNCLEAR),
        (-0.1, 0.0, 0.0, UNCLEAR),  # ends at the bound
        (0.0, 0.0, 0.0, UNCLEAR),
        (-0.01, 0.015, 0.02, AGREES),
        (-0.04, -0.01, -0.05, DISAGREES),
        (float("-inf"), float("inf"), 0.0, UNCLEAR),
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
                {
                    "method": "plain",
                    "length": length,
                    "target": 64,
                    "loss": [loss + 0.001 * ((seed + sample) % 3) for sample in range(8)],
                }
                for length, loss in by_length.items()
            ]
            cell = {"task": "text", "encoding": encoding, "seed": seed}
            cells.append({"cell": cell, "scores": scores})
    settings = {
        "encodings": list(losses),
        "tasks": ["text"],
        "length": 64,
        "tests": [64, 128, 256, 512],
        "seeds": seeds,
    }
    return LabResults({"run": {"settings": settings}, "cells": cells})


def verdicts(results):
    return {finding.statement.claim: finding.verdict for finding in compare(results)}


def test_statements_agree_disagree_and_stay_open_as_numbers_say():
    results = made_up(
        {
            "alibi": {64: 1.75, 128: 1.75, 512: 1.74},
            "sinusoidal": {64: 1.70, 128: 2.5, 512: 3.0},
            "rope": {64: 1.60, 128: 1.63, 512: 1.60},
            "t5": {64: 1.70, 128: 1.9, 512: 1.7405},
        }
    )
    found = verdicts(results)
    assert found["ALiBi reads 8 times its length at no loss"] == AGREES
    assert found["sinusoids fail at twice the length"] == AGREES
    assert found["RoPE fails farther out"] == DISAGREES
    assert found["T5's bias holds at twice the length"] == DISAGREES
    assert found["within its length ALiBi loses less than sinusoids"] == DISAGREES
    assert found["within its length RoPE loses less than ALiBi"] == AGREES
    assert found["a learned table loses less than no positions"] == UNMEASURED
    assert found["ALiBi's last half of windows is flat, too"] == UNMEASURED


def test_seeds_that_differ_leave_a_statement_open():
    results = made_up({"rope": {64: 1.6}, "alibi": {64: 1.7}})
    assert verdicts(results)["within its length RoPE loses less than ALiBi"] == AGREES
    rope = results.records("text", "rope")
    for record, luck in zip(rope, (-0.3, 0.0, 0.3), strict=True):
        score = record["scores"][0]
        score["loss"] = [loss + luck for loss in score["loss"]]
    assert verdicts(results)["within its length RoPE loses less than ALiBi"] == UNCLEAR


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
    one, three = (made_up(losses, seeds=seeds) for seeds in (1, 3))
    assert {finding.verdict for finding in compare(three)} == {AGREES, UNMEASURED}
    assert {finding.verdict for finding in compare(one)} == {UNCLEAR, UNMEASURED}
    assert "One seed says nothing about what papers found" in headline(one, compare(one))
    assert "published statements" in headline(three, compare(three))
