"""The final numbers: the search's result and the known methods on held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.searching.measure.fitness import Evaluation

FOUND, PLAIN = "found", "none"
REFERENCES = ("yarn", "ntk", "linear")


def compare_on_held_out(
    evaluations: Mapping[str, Evaluation], samples: Sequence[Sample]
) -> dict[str, dict[str, Any]]:
    """Return intervals of each method, and of the differences between the result and the others.

    Args:
        evaluations: By label, all on the same samples; `FOUND` is one of the labels.
        samples: The samples, in the evaluations' order.

    Returns:
        By label: `nll` (nats for a scored token, mean of the samples) with its 95% `interval` over
        groups; `hits`, `answers` and `accuracy` if there are answers; `error` if it failed.
        Under "against yarn", ...: `nll` and `interval` of the difference (found - yarn), and of the
        accuracies' difference `accuracy`, `accuracy interval` and `p` (McNemar's, by groups if
        samples share texts). With answers and prose, both have equal weight in all losses.
    """
    table = {label: _summary(evaluation, samples) for label, evaluation in evaluations.items()}
    best = evaluations[FOUND]
    for label, evaluation in evaluations.items():
        if label != FOUND and best.complete and evaluation.complete:
            table[f"against {label}"] = _paired_difference(best, evaluation, samples)
    return table


def _summary(evaluation: Evaluation, samples: Sequence[Sample]) -> dict[str, Any]:
    if not evaluation.complete:
        return {"error": evaluation.error}
    interval = _bootstrap_interval([float(nll or 0) for nll in evaluation.nll], samples)
    summary: dict[str, Any] = {
        "nll": evaluation.fitness,
        "interval": interval,
        "samples": len(samples),
    }
    if answers := [hit for hits in evaluation.hits for hit in hits]:
        summary |= {"hits": sum(answers), "answers": len(answers)}
        summary["accuracy"] = sum(answers) / len(answers)
    return summary


def _paired_difference(
    ours: Evaluation, other: Evaluation, samples: Sequence[Sample]
) -> dict[str, Any]:
    from rope_patch import statistics

    differences = [float(a or 0) - float(b or 0) for a, b in zip(ours.nll, other.nll, strict=True)]
    texts, kinds = [sample.group for sample in samples], [sample.prose for sample in samples]
    interval = statistics.mean_test(differences, texts, kinds).mean
    comparison: dict[str, Any] = {
        "nll": ours.fitness - other.fitness,
        "interval": [interval.low, interval.high],
    }
    pairs = [
        (float(a), float(b), sample.group)
        for sample, own_hits, other_hits in zip(samples, ours.hits, other.hits, strict=True)
        for a, b in zip(own_hits, other_hits, strict=True)
    ]
    if pairs:
        own_hits, other_hits, groups = (list(column) for column in zip(*pairs, strict=True))
        test = statistics.mcnemar(own_hits, other_hits, groups)
        difference = test.difference
        comparison |= {
            "accuracy": difference.estimate,
            "accuracy interval": [difference.low, difference.high],
            "p": test.p_value,
        }
    return comparison


def _bootstrap_interval(values: Sequence[float], samples: Sequence[Sample]) -> list[float]:
    """Return the 95% interval of the weighted mean, resampling whole groups."""
    from rope_patch import statistics

    prose = sum(sample.prose for sample in samples)
    share = {True: prose, False: len(samples) - prose}
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    interval = statistics.bootstrap_mean(
        [[values[i] for i in group] for group in groups.values()],
        [[1 / share[samples[i].prose] for i in group] for group in groups.values()],
    )
    return [interval.low, interval.high]
