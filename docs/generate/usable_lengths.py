"""Write the coverage table of docs/evaluation.md: `python docs/generate/usable_lengths.py`.

Scores that fall with the length are drawn again and again, and their usable length is found as
reports find it. A few minutes of CPU; the seed is fixed, so the table is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rope_patch.statistics import (
    Interval,
    accuracy,
    clopper_pearson,
    retention,
    usable_length,
)

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
FIRST, LAST = "<!-- written by docs/generate/usable_lengths.py -->\n", "<!-- end -->\n"
RUNS, SHARE = 2000, 0.85
LENGTHS = (4096, 6144, 8192, 12288, 16384)
TEXTS = (8, 16, 32, 64, 128)
ALIKE = 0.3  # correlation of two answers about one text


class Curve(NamedTuple):
    """A score by length.

    Attributes:
        name: What the table calls it.
        reference: The plain model's score at the shortest length.
        score: The method's score at a length in tokens.
        usable: The longest length, measured or not, up to which 85% of the reference is kept.
    """

    name: str
    reference: float
    score: Callable[[float], float]
    usable: float


CURVES = (
    Curve("flat, a cliff at 10,000", 0.95, lambda n: 0.95 if n <= 10_000 else 0.2, 10_000),
    Curve(
        "gradual decline",
        0.95,
        lambda n: 0.95 - 0.15 * math.log2(n / 4096),
        4096 * 2**0.95,  # 0.95 - 0.15 * 0.95 is 85% of 0.95
    ),
    Curve("flat", 0.95, lambda n: 0.95, math.inf),
    Curve("all right", 1.0, lambda n: 1.0, math.inf),
    Curve("just kept beyond 4,096", 0.9, lambda n: 0.9 if n <= 4096 else 0.765, math.inf),
    Curve("just lost beyond 4,096", 1.0, lambda n: 1.0 if n <= 4096 else 0.8499, 4096),
    Curve("below everywhere", 0.95, lambda n: 0.6, 0),
    Curve("just below everywhere", 0.5, lambda n: 0.4249, 0),
)


def coverage(curve: Curve, texts: int, questions: int, runs: int, seed: int) -> tuple[float, float]:
    """Return how often the interval holds the usable length, and its mean width.

    Args:
        curve: The scores.
        texts: Texts at each length.
        questions: Questions about each text, right or wrong.
        runs: Runs to draw.
        seed: Of the draws.

    Returns:
        The share of runs; and measured lengths that are left undecided, of five.
    """
    generator = np.random.default_rng(seed)
    covered = undecided = 0
    for _ in range(runs):
        reference = _accuracy(generator, curve.reference, texts, questions)
        if not reference.low > 0:  # no report says anything then
            covered, undecided = covered + 1, undecided + len(LENGTHS)
            continue
        usable = usable_length(
            {
                n: retention(_accuracy(generator, curve.score(n), texts, questions), reference)
                for n in LENGTHS
            },
            SHARE,
        )
        low, high = usable.low or 0, usable.high or math.inf
        covered += low <= curve.usable and (usable.high is None or curve.usable < high)
        undecided += sum(low < n < high for n in LENGTHS)
    return covered / runs, undecided / runs


def table(runs: int = RUNS) -> str:
    """Return the table in Markdown."""
    heads = " | ".join(f"{texts} texts" for texts in TEXTS)
    lines = [f"| curve | questions a text | {heads} |", "|:--|--:" + "|--:" * len(TEXTS) + "|"]
    for number, curve in enumerate(CURVES):
        for questions in (1, 4):
            cells = []
            for texts in TEXTS:
                share, width = coverage(curve, texts, questions, runs, 10 * number + questions)
                cells.append(f"{share:.1%} ({width:.1f})")
            lines.append(f"| {curve.name} | {questions} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _accuracy(generator: np.random.Generator, score: float, texts: int, questions: int) -> Interval:
    """Return the accuracy of drawn answers: each text has its own share of right ones."""
    shares = np.full(texts, score)
    if questions > 1 and 0 < score < 1:
        spread = (1 - ALIKE) / ALIKE
        shares = generator.beta(score * spread, (1 - score) * spread, texts)
    hits = generator.binomial(questions, shares)
    return _accuracy_of(tuple(sorted(hits.tolist())), questions)


@lru_cache(maxsize=100_000)
def _accuracy_of(hits: tuple[int, ...], questions: int) -> Interval:
    scores = [float(i < count) for count in hits for i in range(questions)]
    clusters = [text for text in range(len(hits)) for _ in range(questions)]
    return accuracy(scores, clusters, bounds=clopper_pearson)


def main() -> None:
    text = table()
    head, rest = PAGE.read_text(encoding="utf-8").split(FIRST)
    _, tail = rest.split(LAST, 1)
    PAGE.write_text(head + FIRST + text + LAST + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
