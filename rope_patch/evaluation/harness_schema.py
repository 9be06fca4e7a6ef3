"""The schema of lm-eval's own tasks in an evaluation's results; see `results_schema`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class OptionalMetricKeys(TypedDict, total=False):
    """The keys of metrics that are means of samples, in the task's order.

    Attributes:
        scores: The score of each sample, 0 to 1, if the value is their mean; None for a sample
            that failed.
        texts: The number of each sample's text, if some samples with scores share one.
        losses: The nats of each sample, and its weight, such as its words, if the value is a
            perplexity: exp of the sum of nats over the sum of weights.
        prompts: The digest of what was asked, of all samples; older results lack it.
    """

    prompts: str
    scores: Sequence[float | None]
    texts: Sequence[int]
    losses: Sequence[Sequence[float]]


class MetricRecord(OptionalMetricKeys):
    """A metric of one of lm-eval's own tasks.

    Attributes:
        value: The value that lm-eval gives.
        stderr: The standard error; None if the metric is no mean or all samples score alike.
    """

    value: float | Literal["Infinity", "-Infinity", "NaN"] | str | None
    stderr: float | None


class HarnessRecord(TypedDict):
    """One of lm-eval's own tasks, or of a user's; those made at a length are in `retrieval`.

    Attributes:
        task: The task's name.
        metrics: The metrics by method and name.
    """

    task: str
    metrics: Mapping[str, Mapping[str, MetricRecord]]
