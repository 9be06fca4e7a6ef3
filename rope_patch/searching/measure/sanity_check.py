"""The sanity check: does the unpatched model solve the search's task at its trained length?"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from rope_patch.inference.samples import Sample
from rope_patch.searching.measure.fitness import Evaluation

MAX_LOSS_RATIO = 0.75  # the model's loss / the control's
MIN_STANDARD_ERRORS = 3.0  # the least gain over the control


def unigram_loss(samples: Sequence[Sample]) -> list[float]:
    """Return the nats of each sample's scored tokens by token frequencies in all samples.

    This is the loss of a model that has only the exact frequencies of the vocabulary.
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
    """Compare the plain model's losses with those of a control.

    Args:
        kind: "needles", "recall", "answers" or "documents".
        length: The trained length in tokens.
        evaluation: The plain model on samples of that length.
        control: Nats of the same samples' control, in the same order.

    Returns:
        The check's result: `kind`, `length`, `nll` and `control` (nats), and `able`.
    """
    pairs = [(a, b) for a, b in zip(evaluation.nll, control, strict=True) if a is not None and b]
    gains = [b - a for a, b in pairs]
    nll, control_nll = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    mean_gain = control_nll - nll
    deviation = math.sqrt(sum((gain - mean_gain) ** 2 for gain in gains) / max(len(gains) - 1, 1))
    is_significant = len(gains) > 1 and mean_gain > MIN_STANDARD_ERRORS * deviation / math.sqrt(
        len(gains)
    )
    return {
        "kind": kind,
        "length": length,
        "nll": nll,
        "control": control_nll,
        "able": bool(is_significant and nll <= MAX_LOSS_RATIO * control_nll),
    }


def require_competence(sanity: dict[str, Any]) -> None:
    """Raise if a model fails the sanity check.

    Args:
        sanity: What `compare_with_control` returned.

    Raises:
        ValueError: The model fails; the message has the numbers.
    """
    if sanity["able"]:
        return
    control = {
        "needles": "the same questions of texts without the needles",
        "recall": "the same questions of texts with other pairs",
        "answers": "wrong answers to the same questions",
        "documents": "how frequent each token is in these texts",
    }[sanity["kind"]]
    task = {"documents": "predict documents", "recall": "recall word pairs"}.get(
        sanity["kind"], "find needles"
    )
    raise ValueError(
        f"the model cannot {task} at its own trained length of {sanity['length']:,} tokens: a "
        f"token costs it {sanity['nll']:.3f} nats, and {sanity['control']:.3f} by {control}; "
        f"expected at most {MAX_LOSS_RATIO:g} of that. What is searched by would be noise: choose "
        "another fitness, or a model that can"
    )
