"""What papers found, as statements that a lab run can agree or disagree with.

Numbers are those of the papers' tables; where only the abstract states a finding, it has none.
The lab's models are a thousandth of the papers' in size and read characters, so a disagreement says
that a finding does not carry over to such models, not that it is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.lab.results import LAST_HALF, RIGHT, LabResults, ScoreKey, seeded_difference
from rope_patch.lab.settings import RECALL, SCALE, TEXT
from rope_patch.statistics import Interval

AGREES, DISAGREES, UNCLEAR, UNMEASURED = "agrees", "disagrees", "cannot tell", "not measured"
LEAST_SEEDS = 2  # seeds; another one moves a model by more than its own samples show

PRESS = "Press et al., ALiBi, arXiv:2108.12409"
HAVIV = "Haviv et al., arXiv:2203.16634"
KAZEMNEJAD = "Kazemnejad et al., arXiv:2305.19466"
AL_KHATEEB = "Al-Khateeb et al., arXiv:2310.13017"
WANG = "Wang et al., arXiv:2404.12224"

_FLAT = 0.02  # nats; up to 2% of perplexity count as no loss
_RISE = 0.05  # nats; from 5% of perplexity on, a loss counts as a rise
_BEYOND = (2, 4, 8)


@dataclass(frozen=True)
class Statement:
    """A published statement: first - second is below a bound.

    Attributes:
        paper: Authors and arXiv id.
        claim: The statement in words.
        numbers: The paper's two numbers, or where the finding is stated.
        setting: What the numbers are of.
        first: What is smaller according to the paper.
        second: What it is compared with.
        bound: See above; in the quantity's unit.
        published: The paper's difference in the same unit, if it has numbers in it.
    """

    paper: str
    claim: str
    numbers: str
    setting: str
    first: ScoreKey
    second: ScoreKey
    bound: float = 0.0
    published: float | None = None


@dataclass(frozen=True)
class Finding:
    """What a run says to a statement.

    Attributes:
        statement: The statement.
        difference: What came out, with its interval; None if it was not measured.
        verdict: "agrees", "disagrees", "cannot tell" or "not measured". A single seed cannot tell:
            of an encoding and itself, trained from other seeds, 25% of such intervals exclude 0.
    """

    statement: Statement
    difference: Interval | None
    verdict: str


def verdict(difference: Interval, bound: float) -> str:
    """Return what an interval says of "the difference is below the bound".

    Args:
        difference: The difference with its interval.
        bound: The bound.
    """
    if difference.high < bound:
        return AGREES
    return DISAGREES if difference.low > bound else UNCLEAR


def check_statements(results: LabResults) -> list[Finding]:
    """Return what a run says to each published statement."""
    findings = []
    for statement in STATEMENTS:
        first, second = results.find(statement.first), results.find(statement.second)
        if first is None or second is None:
            findings.append(Finding(statement, None, UNMEASURED))
            continue
        difference = seeded_difference(first, second)
        said = verdict(difference, statement.bound) if len(first) >= LEAST_SEEDS else UNCLEAR
        findings.append(Finding(statement, difference, said))
    return findings


def _text(encoding: str, multiple: int, method: str = "plain", quantity: str = "loss") -> ScoreKey:
    return ScoreKey(TEXT, encoding, multiple, method, quantity)


def _recall(encoding: str, multiple: int | tuple[int, ...], method: str = "plain") -> ScoreKey:
    return ScoreKey(RECALL, encoding, multiple, method, RIGHT)


def _perplexities(
    paper: str,
    claim: str,
    first: ScoreKey,
    second: ScoreKey,
    numbers: tuple[float, float],
    lengths: str,
    bound: float = 0.0,
) -> Statement:
    """Return a statement of two perplexities; their ratio's logarithm is in nats."""
    return Statement(
        paper,
        claim,
        f"{numbers[0]:g} against {numbers[1]:g}",
        f"perplexity{lengths}",
        first,
        second,
        bound,
        math.log(numbers[0] / numbers[1]),
    )


STATEMENTS: tuple[Statement, ...] = (
    _perplexities(
        PRESS,
        "ALiBi reads 8 times its length at no loss",
        _text("alibi", 8),
        _text("alibi", 1),
        (18.40, 19.73),
        " (3,512 against 512 tokens)",
        _FLAT,
    ),
    Statement(
        PRESS,
        "ALiBi's last half of windows is flat, too",
        "18.3 against 17.98",
        "perplexity under a sliding window",
        _text("alibi", 8, quantity=LAST_HALF),
        _text("alibi", 1, quantity=LAST_HALF),
        _FLAT,
        math.log(18.3 / 17.98),
    ),
    _perplexities(
        PRESS,
        "sinusoids fail at twice the length",
        _text("sinusoidal", 1),
        _text("sinusoidal", 2),
        (20.05, 43.54),
        " (512 against 1,012 tokens)",
        -_RISE,
    ),
    _perplexities(
        PRESS,
        "RoPE fails farther out",
        _text("rope", 1),
        _text("rope", 8),
        (20.07, 35.54),
        " (512 against 3,512 tokens)",
        -_RISE,
    ),
    _perplexities(
        PRESS,
        "T5's bias holds at twice the length",
        _text("t5", 2),
        _text("t5", 1),
        (18.79, 19.65),
        " (1,012 against 512 tokens)",
        _FLAT,
    ),
    _perplexities(
        PRESS,
        "far out, ALiBi loses less than T5's bias",
        _text("alibi", 8),
        _text("t5", 8),
        (18.40, 22.91),
        " (3,512 tokens)",
    ),
    _perplexities(
        PRESS,
        "far out, T5's bias loses less than RoPE",
        _text("t5", 8),
        _text("rope", 8),
        (22.91, 35.54),
        " (3,512 tokens)",
    ),
    _perplexities(
        PRESS,
        "far out, RoPE loses less than sinusoids",
        _text("rope", 8),
        _text("sinusoidal", 8),
        (35.54, 178.97),
        " (3,512 tokens)",
    ),
    _perplexities(
        PRESS,
        "within its length ALiBi loses less than sinusoids",
        _text("alibi", 1),
        _text("sinusoidal", 1),
        (19.73, 20.05),
        " (512 tokens)",
    ),
    _perplexities(
        HAVIV,
        "no positions: within 0.05 nats of a learned table",
        _text("none", 1),
        _text("learned", 1),
        (20.97, 20.42),
        "",
        _RISE,
    ),
    _perplexities(
        HAVIV,
        "a learned table loses less than no positions",
        _text("learned", 1),
        _text("none", 1),
        (20.42, 20.97),
        "",
    ),
    _perplexities(
        HAVIV,
        "sinusoids lose less than a learned table",
        _text("sinusoidal", 1),
        _text("learned", 1),
        (20.16, 20.42),
        "",
    ),
    _perplexities(
        HAVIV,
        "ALiBi loses less than a learned table",
        _text("alibi", 1),
        _text("learned", 1),
        (19.71, 20.42),
        "",
    ),
    Statement(
        KAZEMNEJAD,
        "beyond, no positions recall more than T5's bias",
        "0.69 against 0.55",
        "mean reciprocal rank over ten tasks",
        _recall("t5", _BEYOND),
        _recall("none", _BEYOND),
    ),
    Statement(
        KAZEMNEJAD,
        "beyond, T5's bias recalls more than ALiBi",
        "0.55 against 0.50",
        "mean reciprocal rank over ten tasks",
        _recall("alibi", _BEYOND),
        _recall("t5", _BEYOND),
    ),
    Statement(
        KAZEMNEJAD,
        "beyond, ALiBi recalls more than RoPE",
        "0.50 against 0.33",
        "mean reciprocal rank over ten tasks",
        _recall("rope", _BEYOND),
        _recall("alibi", _BEYOND),
    ),
    Statement(
        KAZEMNEJAD,
        "beyond, RoPE recalls more than sinusoids",
        "0.33 against 0.22",
        "mean reciprocal rank over ten tasks",
        _recall("sinusoidal", _BEYOND),
        _recall("rope", _BEYOND),
    ),
    _perplexities(
        KAZEMNEJAD,
        "within its length RoPE loses less than ALiBi",
        _text("rope", 1),
        _text("alibi", 1),
        (2.40, 2.43),
        " (512 tokens of code)",
    ),
    _perplexities(
        KAZEMNEJAD,
        "within its length ALiBi loses less than no positions",
        _text("alibi", 1),
        _text("none", 1),
        (2.43, 2.46),
        " (512 tokens of code)",
    ),
    _perplexities(
        KAZEMNEJAD,
        "beyond, no positions lose less than RoPE",
        _text("none", 2),
        _text("rope", 2),
        (536, 760),
        " (2,560 tokens of code, trained on 1,024)",
    ),
    _perplexities(
        KAZEMNEJAD,
        "beyond, ALiBi loses less than no positions",
        _text("alibi", 2),
        _text("none", 2),
        (150, 536),
        " (2,560 tokens of code, trained on 1,024)",
    ),
    Statement(
        AL_KHATEEB,
        "half ALiBi's slopes keep its loss at twice the length",
        "abstract",
        "no number could be read",
        _text("alibi", 2, "linear"),
        _text("alibi", 1),
        _FLAT,
    ),
    Statement(
        AL_KHATEEB,
        "half ALiBi's slopes recall more at twice the length",
        "abstract",
        "no number could be read",
        _recall("alibi", 2),
        _recall("alibi", 2, "linear"),
    ),
    Statement(
        WANG,
        "beyond, no positions lose less than RoPE",
        "abstract",
        "no number could be read",
        _text("none", 4),
        _text("rope", 4),
    ),
    Statement(
        WANG,
        "beyond, no positions recall more than RoPE",
        "abstract",
        "no number could be read",
        _recall("rope", _BEYOND),
        _recall("none", _BEYOND),
    ),
    Statement(
        WANG,
        "no positions reach an end, too",
        "abstract",
        "no number could be read",
        _text("none", 1),
        _text("none", 8),
        -_RISE,
    ),
    Statement(
        WANG,
        "logits times 1.2 help the loss of no positions",
        "abstract",
        "1.2 is the smallest scale that its scripts try",
        _text("none", 8, SCALE),
        _text("none", 8),
    ),
    Statement(
        WANG,
        "logits times 1.2 help the recall of no positions",
        "abstract",
        "1.2 is the smallest scale that its scripts try",
        _recall("none", _BEYOND),
        _recall("none", _BEYOND, SCALE),
    ),
)
