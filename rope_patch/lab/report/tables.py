"""The tables of the lab's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rope_patch.evaluation.report.format import NOTHING
from rope_patch.evaluation.report.table import Cell, Row, Table, length_groups, length_heads
from rope_patch.lab.interval import seeded_mean
from rope_patch.lab.measurement import PLAIN
from rope_patch.lab.report.figure import colour_of
from rope_patch.lab.report.numbers import (
    difference_range,
    difference_text,
    loss_cell,
    share_cell,
)
from rope_patch.lab.results import BY_POSITION, LOSS, RIGHT, LabResults, unit
from rope_patch.lab.settings import TEXT
from rope_patch.lab.statements import Finding
from rope_patch.statistics import Interval


def length_table(results: LabResults, task: str, quantity: str, name: str) -> Table:
    """Return a quantity by encoding and test length, extensions below their encoding.

    Args:
        results: The results.
        task: The task.
        quantity: What is shown.
        name: The table's title.
    """
    is_share = quantity == RIGHT
    make: Callable[..., Cell] = share_cell if is_share else loss_cell
    rows = []
    for encoding in _ranked(results, task, quantity):
        for method in results.methods(task, encoding):
            cells = []
            for length in results.tests:
                scores = results.scores(task, encoding, length, method, quantity)
                mean = None if scores is None else seeded_mean(scores, is_share=is_share)
                missing = "no rows" if (encoding, method) == ("learned", PLAIN) else NOTHING
                cells.append(make(mean, beyond=length > results.length, missing=missing))
            label = encoding if method == PLAIN else f"{encoding} + {method}"
            rows.append(Row(name=label, cells=cells, key=colour_of(encoding)))
    columns = length_heads(results.tests, results.length)
    return Table(
        name=f"{name}, {unit(task, quantity)}",
        corner="test length",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, results.length),
    )


def position_table(results: LabResults) -> Table | None:
    """Return the loss by position in the longest windows; None without text."""
    encodings = results.encodings_of(TEXT)
    longest = results.tests[-1]
    edges: Sequence[int] = ()
    rows = []
    for encoding in _ranked(results, TEXT, LOSS):
        for method in results.methods(TEXT, encoding):
            scores = results.scores(TEXT, encoding, longest, method, BY_POSITION)
            if scores is None:
                continue
            edges = results.records(TEXT, encoding)[0]["bands"]
            cells = [
                loss_cell(
                    seeded_mean([[sample[band] for sample in seed] for seed in scores]),
                    beyond=low >= results.length,
                )
                for band, low in enumerate(edges[:-1])
            ]
            label = encoding if method == PLAIN else f"{encoding} + {method}"
            rows.append(Row(name=label, cells=cells, key=colour_of(encoding)))
    if not encodings or not rows:
        return None
    columns = [
        Cell(text=f"{low:,}–{high - 1:,}", beyond=low >= results.length)
        for low, high in pairwise(edges)
    ]
    return Table(
        name=f"Loss by position in windows of {longest:,} characters, nats a character",
        corner="positions",
        columns=columns,
        rows=rows,
        groups=length_groups(columns, results.length),
    )


def published_table(findings: Sequence[Finding]) -> Table:
    """Return each published statement beside what came out, and the verdict.

    Args:
        findings: What the run says to each statement.
    """
    rows = []
    for finding in findings:
        statement, is_share = finding.statement, finding.statement.first.quantity == RIGHT
        text = NOTHING
        if statement.published is not None:
            text = difference_text(statement.published, is_share=False)
        given = Cell(text=text, note=statement.numbers, tip=statement.setting)
        rows.append(
            Row(
                name=statement.claim,
                group=statement.paper,
                cells=[_verdict(finding), _difference_cell(finding.difference, is_share), given],
            )
        )
    return Table(
        name="What papers found, and what came out here",
        corner="the statement",
        columns=[
            Cell(text="verdict"),
            Cell(text="here"),
            Cell(text="the paper"),
        ],
        rows=rows,
        groups=[],
    )


def _difference_cell(difference: Interval | None, is_share: bool) -> Cell:
    if difference is None:
        return Cell(text=NOTHING)
    return Cell(
        text=difference_text(difference.estimate, is_share=is_share),
        note=difference_range(difference, is_share=is_share),
    )


def _verdict(finding: Finding) -> Cell:
    bound = finding.statement.bound
    text = difference_text(bound, is_share=False)
    return Cell(text=finding.verdict, note=f"bound {text}" if bound else "")


def _ranked(results: LabResults, task: str, quantity: str) -> list[str]:
    """Return encodings in the order of what they score at the longest test, best first."""

    def score(encoding: str) -> float:
        scores = results.scores(task, encoding, results.tests[-1], quantity=quantity)
        if scores is None:  # a table without rows there comes last
            return float("inf")
        mean = seeded_mean(scores).estimate
        return -mean if quantity == RIGHT else mean

    return sorted(results.encodings_of(task), key=score)
