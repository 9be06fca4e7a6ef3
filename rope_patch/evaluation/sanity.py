"""Sanity check: does the plain model beat chance within its trained length?"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from rope_patch.evaluation.request import BASELINE
from rope_patch.evaluation.results_schema import PerplexityRecord, RetrievalRecord, RunRecord


def cautions(results: RunRecord, documents: Sequence[Sequence[int]]) -> list[str]:
    """Return a sentence for each thing that the plain model does no better than chance.

    Args:
        results: The run's results; only `run`, `perplexity` and `retrieval` are read.
        documents: The documents' tokens, in the order of the control's losses.
    """
    trained = results["run"]["trained_length"]
    return [
        sentence
        for sentence in (
            _reading_caution(results["perplexity"], documents),
            _answering_caution(results["retrieval"], trained),
        )
        if sentence is not None
    ]


def _reading_caution(
    perplexity: PerplexityRecord | None, documents: Sequence[Sequence[int]]
) -> str | None:
    control = perplexity["control"] if perplexity else None
    if not control:
        return None
    losses = [float(loss) for by_end in control["losses"] for loss in by_end.values()]
    frequencies = math.fsum(unigram_entropy(tokens) for tokens in documents) / len(documents)
    mean = math.fsum(losses) / len(losses)
    if mean < frequencies:
        return None
    return (
        "the model reads these documents no better than chance: with "
        f"{control['context']:,} tokens of context a token costs it {mean:.2f} nats, and "
        f"{frequencies:.2f} by how frequent each token is; differences of perplexity between "
        "methods mean nothing"
    )


def _answering_caution(retrieval: Sequence[RetrievalRecord], trained: int) -> str | None:
    scores = [
        (score, row.get("chance", 0.0))
        for entry in retrieval
        for row in entry["samples"].get(BASELINE, [])
        if row["length"] <= trained and (score := row["score"]) is not None
    ]
    right = math.fsum(score for score, _ in scores)
    if not scores or right > math.fsum(chance for _, chance in scores):
        return None
    return (
        f"the model answers no better than chance within its trained length of {trained:,} tokens: "
        f"{right:g} of {len(scores)} right; a longer context cannot show in these questions, ask "
        "easier ones (--tasks rp_recall_ll)"
    )


def unigram_entropy(tokens: Sequence[int]) -> float:
    """Return what a token costs in nats, given only how frequent each is among these."""
    counts, total = collections.Counter(tokens).values(), len(tokens)
    return -math.fsum(count / total * math.log(count / total) for count in counts)
