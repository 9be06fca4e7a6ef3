"""The final numbers: what was found and the known methods, on samples that nobody chose by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.searching.measure.fitness import Evaluation

FOUND, PLAIN = "found", "none"
REFERENCES = ("yarn", "ntk", "linear")


def compare(
    evaluations: Mapping[str, Evaluation], samples: Sequence[Sample]
) -> dict[str, dict[str, Any]]:
    """Intervals of each, and of what was found less each other.

    Args:
        evaluations: By label, all on the same samples; `FOUND` is among them.
        samples: In the evaluations' order.

    Returns:
        By label: `nll` (nats for a scored token, mean of the samples) with its 95% `interval` over
        groups, `hits`, `answers` and `accuracy` where there are answers, `error` where it failed.
        And as "against yarn", ...: `nll` and `interval` of the difference, found less yarn, and of
        accuracy `accuracy`, `accuracy interval` and `p` (McNemar's, by groups where they share
        texts). Where samples are answers and prose, all losses are of both alike.
    """
    found = {label: _summary(one, samples) for label, one in evaluations.items()}
    ours = evaluations[FOUND]
    for label, other in evaluations.items():
        if label != FOUND and ours.complete and other.complete:
            found[f"against {label}"] = _paired_difference(ours, other, samples)
    return found


def _summary(one: Evaluation, samples: Sequence[Sample]) -> dict[str, Any]:
    if not one.complete:
        return {"error": one.error}
    interval = _bootstrap_interval([float(nll or 0) for nll in one.nll], samples)
    found: dict[str, Any] = {"nll": one.fitness, "interval": interval, "samples": len(samples)}
    if answers := [hit for hits in one.hits for hit in hits]:
        found |= {"hits": sum(answers), "answers": len(answers)}
        found["accuracy"] = sum(answers) / len(answers)
    return found


def _paired_difference(
    ours: Evaluation, other: Evaluation, samples: Sequence[Sample]
) -> dict[str, Any]:
    from rope_patch import statistics

    behind = [float(a or 0) - float(b or 0) for a, b in zip(ours.nll, other.nll, strict=True)]
    found = {"nll": ours.fitness - other.fitness, "interval": _bootstrap_interval(behind, samples)}
    pairs = [
        (float(a), float(b), sample.group)
        for sample, mine, theirs in zip(samples, ours.hits, other.hits, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    if pairs:
        mine, theirs, groups = (list(column) for column in zip(*pairs, strict=True))
        test = statistics.mcnemar(mine, theirs, groups)
        difference = test.difference
        found |= {
            "accuracy": difference.estimate,
            "accuracy interval": [difference.low, difference.high],
            "p": test.p_value,
        }
    return found


def _bootstrap_interval(values: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    """95%, of the weighted mean; whole groups are drawn."""
    from rope_patch import statistics

    prose = sum(sample.prose for sample in samples)
    share = {True: prose, False: len(samples) - prose}
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    found = statistics.bootstrap_mean(
        [[values[i] for i in group] for group in groups.values()],
        [[1 / share[samples[i].prose] for i in group] for group in groups.values()],
    )
    return [found.low, found.high]
