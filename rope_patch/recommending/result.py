"""What recommend() returns: a verdict with its evidence, to print and to save."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.recommending.decision_rule import Choice
from rope_patch.recommending.scores import Scores, gap
from rope_patch.statistics import Interval
from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import strict

if TYPE_CHECKING:
    from rope_patch.recommending.scoreboard import Row
    from rope_patch.searching.result.search_result import SearchResult

FORMAT = "rope_patch.recommend/1"
JSON, MARKDOWN, SEARCHED = "recommendation.json", "recommendation.md", "searched"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Which method to use at a length, and what that rests on; print it to read it.

    Attributes:
        model: The model's name or folder.
        weights: The fingerprint of its weights.
        length: Target length in tokens.
        trained_length: Tokens of pretraining.
        short_length: Tokens of what was measured within them; None where samples were given.
        budget: Minutes that were given.
        seconds: That were spent, with earlier runs.
        method: The name of what to use, as in the rows; None where nothing is recommended.
        outcome: "use", "nothing holds" or "cannot answer", see `choosing.Choice`.
        verdict: It in a sentence or two.
        reasons: How it came about, a step each.
        python: The line that applies it; empty where there is none.
        shell: The command that says what another engine is to be given; empty where there is none.
        rows: A row for each method: `name`, `method`, `options`, `status`, `engines`; `long`,
            `short` and `prose` with `nll`, `accuracy`, their intervals and `samples`; `behind` (the
            best at the length) and `price` and `prose_price` (against the plain model).
        samples: At the target length, of what was compared in the end.
        scored: Samples that were scored in all, those of the search not counted.
        not_measured: What was not, and why.
        seed: Of samples and search.
        versions: Of the packages that the result depends on.
        command: What was run, for doing it again.
        found: The search's result, if there was one.
    """

    model: str
    weights: str
    length: int
    trained_length: int
    short_length: int | None
    budget: float
    seconds: float
    method: str | None
    outcome: str
    verdict: str
    reasons: tuple[str, ...]
    python: str
    shell: str
    rows: list[dict[str, Any]]
    samples: int
    scored: int
    not_measured: tuple[str, ...] = ()
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    found: SearchResult | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, strict JSON; what was searched is a file of its own."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said.pop("found")
        return strict({"format": FORMAT, **said})

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `recommendation.json` and `recommendation.md`, and `searched/found.json`.

        Args:
            folder: Where to; made if missing.

        Returns:
            The path of `recommendation.json`, which is written last.
        """
        from rope_patch.recommending.summary import markdown

        folder = Path(folder)
        if self.found is not None:
            self.found.save(folder / SEARCHED)
        atomic_files.write(folder / MARKDOWN, markdown(self))
        atomic_files.write(folder / JSON, json.dumps(self.to_dict(), indent=1) + "\n")
        return folder / JSON

    def __str__(self) -> str:
        from rope_patch.recommending.summary import recount

        return recount(self)


def rows_of(rows: Sequence[Row], choice: Choice) -> list[dict[str, Any]]:
    """All that is known of each method, as plain data."""
    found = []
    plain = next(row for row in rows if row.entry.method is None)
    best = next((row for row in rows if row.entry.name == choice.best), None)
    for row in rows:
        entry, name = row.entry, row.entry.name
        found.append(
            {
                "name": name,
                "method": entry.method,
                "options": dict(entry.options),
                "status": status(row, choice),
                "engines": list(row.engines),
                "everywhere": set(row.engines) >= set(plain.engines),
                "long": _scores(row.long),
                "short": _scores(row.short),
                "prose": _scores(row.prose),
                "behind": None if best is None else _gap(row.long, best.long),
                "price": _gap(row.short, plain.short),
                "prose_price": _gap(row.prose, plain.prose),
                "leaves_short": entry.within.candidate is None,
            }
        )
    return found


def status(row: Row, choice: Choice) -> str:
    """What became of a method, in a few words."""
    name = row.entry.name
    if name == choice.name:
        return "recommended"
    if row.status:
        return row.status
    if name in choice.ties:
        return "cannot be told from the best at the length"
    return "worse than the best at the length" if name in choice.behind else "not compared"


def interval_of(interval: Interval | None) -> list[float] | None:
    """Estimate, low and high."""
    return None if interval is None else [interval.estimate, interval.low, interval.high]


def _scores(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "nll": interval_of(scores.loss()),
        "accuracy": interval_of(scores.right()),
        "samples": len(scores),
    }


def _gap(scores: Scores | None, other: Scores | None) -> dict[str, Any] | None:
    """How they differ on the samples that both were given."""
    if scores is None or other is None:
        return None
    found = gap(scores, other)
    return {"nll": interval_of(found.nll), "accuracy": interval_of(found.hits)}
