"""Write the table of false verdicts in docs/evaluation.md: `python docs/generate/verdicts.py`.

Differences whose mean is zero are drawn again and again, and tested as reports test them. About a
minute of CPU; the seed is fixed, so the table is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special

from rope_patch.statistics import clustered_mean, least_texts, look_factor, mean_test
from rope_patch.statistics.clustered_mean import hall_p_values

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
FIRST, LAST = "<!-- written by docs/generate/verdicts.py -->\n", "<!-- end -->\n"
RUNS, LEVEL = 4000, 0.05
RARE = 0.15  # of the mixture's answers; their gain is large
LIMIT = 0.03  # one-sided, with the error of the simulation; higher shares are in bold

Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return symmetric differences, as where methods may be exchanged without a change."""
    return generator.normal(size=count)


def lognormal(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return skewed differences: the logarithm has a standard deviation of 1."""
    return np.exp(generator.normal(size=count)) - math.exp(0.5)


def mixture(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return differences of which few are large: 15% near 2, the others near -0.35."""
    is_rare = generator.random(count) < RARE
    small = generator.normal(-2 * RARE / (1 - RARE), 0.1, count)
    return np.where(is_rare, generator.normal(2, 1, count), small)


DRAWS: dict[str, Draw] = {"normal": normal, "lognormal": lognormal, "mixture": mixture}


class Design(NamedTuple):
    """What a run asks.

    Attributes:
        name: What the table calls it.
        parts: For each task, its texts and the answers to each.
        looks: How often the texts are doubled and tested again; None for one test.
    """

    name: str
    parts: tuple[tuple[int, int], ...]
    looks: int | None = None

    @property
    def first_answers(self) -> int:
        """Return the answers at the first test."""
        return sum(texts * answers for texts, answers in self.parts)


DESIGNS = (
    *(Design(f"{texts} texts", ((texts, 1),)) for texts in (6, 8, 10, 12, 16, 20, 24, 30)),
    Design("8 texts, 4 answers each", ((8, 4),)),
    Design("2 tasks of 8 texts", ((8, 1), (8, 1))),
    Design("a task of 3 texts with 5 answers each, one of 20 texts", ((3, 5), (20, 1))),
    Design("8 texts, doubled up to 64 until shown", ((8, 1),), looks=4),
)


def false_verdicts(draw: Draw, design: Design, runs: int, seed: int) -> dict[str, float]:
    """Return how often zero means are called better or worse, the larger share of the two.

    Args:
        draw: Draws independent answers' differences of mean zero.
        design: What a run asks.
        runs: Runs to draw.
        seed: Of the draws.

    Returns:
        By rule, "Student's t" alone and "the rule" of reports.
    """
    generator = np.random.default_rng(seed)
    calls = {"Student's t": [0, 0], "the rule": [0, 0]}
    for _ in range(runs):
        for rule, side in _verdicts(generator, draw, design).items():
            calls[rule][side] += 1
    return {rule: max(sides) / runs for rule, sides in calls.items()}


def bound(design: Design) -> float:
    """Return how often no answer is large, so that the mixture looks like a shift by -0.35."""
    return float((1 - RARE) ** design.first_answers)


def table(runs: int = RUNS) -> str:
    """Return the table in Markdown."""
    heads = [f"{kind}, t | {kind}, the rule" for kind in DRAWS]
    lines = [f"| texts | {' | '.join(heads)} | any test (mixture) |", "|:--" + "|--:" * 7 + "|"]
    for number, design in enumerate(DESIGNS):
        cells = []
        for kind, draw in enumerate(DRAWS.values()):
            shares = false_verdicts(draw, design, runs, 100 * number + kind)
            cells += [_share_text(share) for share in shares.values()]
        lines.append(f"| {design.name} | {' | '.join(cells)} | {_share_text(bound(design))} |")
    return "\n".join(lines) + "\n"


def _verdicts(generator: np.random.Generator, draw: Draw, design: Design) -> dict[str, int]:
    """Return, of one run, which rules call a difference and on which side: 0 below, 1 above."""
    doublings = range(1 if design.looks is None else design.looks)
    most = [(texts * 2 ** doublings[-1], answers) for texts, answers in design.parts]
    values = [draw(generator, texts * answers) for texts, answers in most]
    verdicts: dict[str, int] = {}
    for doubling in doublings:
        level = LEVEL / look_factor(0 if design.looks is None else doubling + 1)
        differences: list[float] = []
        clusters: list[Hashable] = []
        strata: list[Hashable] = []
        for task, ((texts, answers), drawn) in enumerate(zip(design.parts, values, strict=True)):
            count = texts * 2**doubling * answers
            differences += drawn[:count].tolist()
            clusters += [(task, i // answers) for i in range(count)]
            strata += [task] * count
        measured = clustered_mean(differences, clusters, strata)
        side = int(measured.mean.estimate > 0)
        by_text = np.array(measured.by_text)
        t = abs(measured.mean.estimate) / measured.deviation * math.sqrt(len(by_text))
        if 2 * special.stdtr(len(by_text) - 1, -t) < level:
            verdicts.setdefault("Student's t", side)
        # Most runs need no sign flips: the rule's p is the larger of two.
        rejects = len(by_text) >= least_texts(level) and hall_p_values(by_text[None])[0] < level
        if rejects and mean_test(differences, clusters, strata).p_value < level:
            verdicts.setdefault("the rule", side)
    return verdicts


def _share_text(share: float) -> str:
    text = f"{share:.3f}".removeprefix("0")
    return f"**{text}**" if share > LIMIT else text


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(FIRST)
    _, tail = rest.split(LAST, 1)
    PAGE.write_text(head + FIRST + table() + LAST + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
