"""Questions that a server and a model in this process answer alike, one by one.

One rotation in two engines answers all questions alike, apart from rounding; another rotation does
not, and the table shows which method of this process a server is closest to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rope_patch.evaluation.report.results.run_statistics import RunStatistics, task_name
from rope_patch.evaluation.report.table import NOTHING, Cell, Row, Table, filter_mark, first_few

_MAX_QUESTIONS = 6  # that are named, of those with another score
# Nats of one answer: what tests/engines/verifying allows two engines in float32.
_ROUNDING = 0.01


@dataclass(frozen=True)
class Agreement:
    """How far a server and a method in this process agree.

    Attributes:
        server: The server's label.
        method: The method's label.
        questions: Questions that both answered.
        differing: Names of those whose scores differ: task and sample.
        nats: The absolute differences of the right answers' log-likelihoods, where both have one.
    """

    server: str
    method: str
    questions: int
    differing: list[str]
    nats: list[float]

    @property
    def distance(self) -> tuple[float, int]:
        """Return what the closest method has the least of: mean nats, then other scores."""
        mean = sum(self.nats) / len(self.nats) if self.nats else 0.0
        return mean, len(self.differing)


def agreements(stats: RunStatistics) -> list[Agreement]:
    """Return how far each server agrees with each method in this process; none of servers alone."""
    local = [label for label in stats.labels if label not in stats.servers]
    both = [_agreement(stats, server, label) for server in stats.servers for label in local]
    return [each for each in both if each.questions]


def _agreement(stats: RunStatistics, server: str, label: str) -> Agreement:
    theirs = {(each["task"], each["id"]): each for each in stats.samples(server)}
    pairs = [
        (each, other)
        for each in stats.samples(label)
        if (other := theirs.get((each["task"], each["id"]))) is not None
    ]
    return Agreement(
        server,
        label,
        questions=len(pairs),
        differing=[
            f"{task_name(mine['task'])} {mine['id'].partition('/')[2].partition('/')[2]}: "
            f"{mine['score']:.2g} here, {other['score']:.2g} served"
            for mine, other in pairs
            if mine["score"] != other["score"]
        ],
        nats=[
            abs(float(a) - float(b)) if a != b else 0.0  # both may be minus infinity
            for mine, other in pairs
            if (a := mine["log_likelihood"]) is not None
            and (b := other["log_likelihood"]) is not None
        ],
    )


def agreement_table(stats: RunStatistics) -> Table | None:
    """Return a row for each server and method; None without servers beside a local model."""
    rows = [
        Row(
            name=stats.names[each.method],
            group=stats.names[each.server],
            key=stats.colour_names[each.method],
            method=filter_mark(each.method),
            cells=[
                Cell(text=f"{each.questions:,}"),
                Cell(text=f"{each.questions - len(each.differing):,}"),
                *_nats_cells(each.nats),
            ],
        )
        for each in agreements(stats)
    ]
    if not rows:
        return None
    columns = [
        Cell(text="questions"),
        Cell(text="same score"),
        Cell(text="difference", note="nats an answer, mean"),
        Cell(text="largest", note="nats an answer"),
    ]
    return Table(
        name="Answers of servers beside those of methods in this process",
        corner="method",
        columns=columns,
        rows=rows,
        groups=[],
    )


def _nats_cells(nats: list[float]) -> list[Cell]:
    if not nats:
        nothing = Cell(text=NOTHING, tip="the server gives no log-probabilities")
        return [nothing, nothing]
    return [Cell(text=f"{value:.2g}") for value in (sum(nats) / len(nats), max(nats))]


def agreement_lines(stats: RunStatistics) -> Iterator[str]:
    """Yield what each server's closest method is, and on which questions they differ."""
    by_server: dict[str, list[Agreement]] = {}
    for each in agreements(stats):
        by_server.setdefault(each.server, []).append(each)
    for server, candidates in by_server.items():
        closest = min(candidates, key=lambda each: each.distance)
        name, method = stats.names[server], stats.names[closest.method]
        same = closest.questions - len(closest.differing)
        text = (
            f"{name} is closest to {method}: {same:,} of {closest.questions:,} scores are the same"
        )
        if closest.nats:
            largest = max(closest.nats)
            text += f", and right answers are as likely within {largest:.2g} nats"
            if not closest.differing and largest <= _ROUNDING:
                text += ", which is rounding"
        yield f"{text}."
        if closest.differing:
            yield f"Other scores: {'; '.join(first_few(closest.differing, _MAX_QUESTIONS))}."
