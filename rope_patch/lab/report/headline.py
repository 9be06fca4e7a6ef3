"""The report's first sentences, computed from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rope_patch.lab.interval import seeded_difference, seeded_mean
from rope_patch.lab.recall_task import PAIRS
from rope_patch.lab.results import RIGHT, LabResults
from rope_patch.lab.settings import RECALL, TEXT
from rope_patch.lab.statements import (
    AGREES,
    DISAGREES,
    LEAST_SEEDS,
    UNCLEAR,
    UNMEASURED,
    Finding,
)

_FLAT = 0.05  # nats; more counts as a loss


def headline(results: LabResults, findings: Sequence[Finding]) -> str:
    """Return what came out in a few sentences.

    Args:
        results: The results.
        findings: What they say to published statements.
    """
    sentences = [*_text(results), *_recall(results), _published(results, findings)]
    return " ".join(sentence for sentence in sentences if sentence)


def _text(results: LabResults) -> list[str]:
    """Return which encodings keep their loss at the longest test, and which lose."""
    longest, trained = results.tests[-1], results.length
    flat, worse, unclear = [], [], []
    for name in results.encodings_of(TEXT):
        far = results.scores(TEXT, name, longest)
        near = results.scores(TEXT, name, trained)
        if far is None or near is None or longest == trained:
            continue
        gap = seeded_difference(far, near)
        if gap.high < _FLAT:
            flat.append(name)
        elif gap.low > _FLAT:
            worse.append((gap.estimate, name))
        else:
            unclear.append(name)
    times = f"{longest / trained:g} times the trained length"
    sentences = []
    if flat:
        sentences.append(f"At {times} {_join(flat)} lose less than {_FLAT} nats a character.")
    if worse:
        names = [f"{name} +{gap:.2f}" for gap, name in sorted(worse)]
        sentences.append(f"More is lost by {_join(names)}.")
    if unclear:
        sentences.append(f"It cannot be told of {_join(unclear)}.")
    return sentences


def _recall(results: LabResults) -> list[str]:
    longest = results.tests[-1]
    clear = []
    for name in results.encodings_of(RECALL):
        scores = results.scores(RECALL, name, longest, quantity=RIGHT)
        if scores is None:
            continue
        share = seeded_mean(scores, is_share=True)
        if share.low > 1 / PAIRS:
            clear.append((-share.estimate, f"{name} {share.estimate:.0%}"))
    if not results.encodings_of(RECALL):
        return []
    if not clear:
        return [f"At {longest:,} tokens no encoding is shown to recall more than a guess does."]
    return [f"At {longest:,} tokens {_join([text for _, text in sorted(clear)])} are recalled."]


def _published(results: LabResults, findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    measured = len(findings) - counts[UNMEASURED]
    if not measured:
        return ""
    if results.seeds < LEAST_SEEDS:
        return (
            "One seed says nothing about what papers found, because another one moves models by as "
            "much: give --seeds 3."
        )
    return (
        f"Of {measured} published statements {counts[AGREES]} agree, {counts[DISAGREES]} disagree "
        f"and {counts[UNCLEAR]} cannot be told."
    )


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
