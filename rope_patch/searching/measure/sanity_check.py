"""Whether a model can do at its trained length what candidates are to be chosen by."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.searching.measure.fitness import Evaluation

MAX_LOSS_RATIO = 0.75  # of the control's loss
MIN_STANDARD_ERRORS = 3.0  # standard errors that the gain is at least


def unigram_loss(samples: Sequence[Sample]) -> list[float]:
    """Nats for each sample's scored tokens, given only how frequent tokens are in all samples.

    What a model says that knows nothing but the vocabulary's statistics, and those exactly.
    """
    counts = collections.Counter(token for sample in samples for token in sample.ids)
    total = sum(counts.values())
    return [
        math.fsum(-math.log(counts[s.ids[p]] / total) for p in s.positions) / len(s.positions)
        for s in samples
    ]


def compare_with_control(
    kind: str, length: int, evaluation: Evaluation, control: Sequence[float | None]
) -> dict[str, Any]:
    """Compares what the plain model makes of samples with their control.

    Args:
        kind: "needles", "recall", "answers" or "documents".
        length: The trained length, tokens.
        evaluation: The model on samples of that length.
        control: Nats of the same samples' control, in the same order.

    Returns:
        `nll`, `control` (nats), `length`, and `able`.
    """
    pairs = [(a, b) for a, b in zip(evaluation.nll, control, strict=True) if a is not None and b]
    gains = [b - a for a, b in pairs]
    nll, other = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    mean = other - nll
    spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / max(len(gains) - 1, 1))
    sure = len(gains) > 1 and mean > MIN_STANDARD_ERRORS * spread / math.sqrt(len(gains))
    return {
        "kind": kind,
        "length": length,
        "nll": nll,
        "control": other,
        "able": bool(sure and nll <= MAX_LOSS_RATIO * other),
    }


def require_competence(sanity: dict[str, Any]) -> None:
    """Refuses a model that cannot do it.

    Raises:
        ValueError: With the numbers.
    """
    if sanity["able"]:
        return
    control = {
        "needles": "the same questions of texts without the needles",
        "recall": "the same questions of texts with other pairs",
        "answers": "wrong answers to the same questions",
        "documents": "how frequent each token is in these texts",
    }[sanity["kind"]]
    what = {"documents": "predict documents", "recall": "recall word pairs"}.get(
        sanity["kind"], "find needles"
    )
    raise ValueError(
        f"the model cannot {what} at its own trained length of {sanity['length']:,} tokens: a token "
        f"costs it {sanity['nll']:.3f} nats, and {sanity['control']:.3f} by {control}; expected at "
        f"most {MAX_LOSS_RATIO:g} of that. What is searched by would be noise: choose another fitness, or a "
        "model that can"
    )
