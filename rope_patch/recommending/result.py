"""What recommend() returns: a verdict with its evidence, to print and to save."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.recommending.decision_rule import Choice
from rope_patch.recommending.scores import Scores, score_difference
from rope_patch.statistics import Interval
from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import json_safe

if TYPE_CHECKING:
    from rope_patch.recommending.scoreboard import VariantScores
    from rope_patch.searching.result.search_result import SearchResult

FORMAT = "rope_patch.recommend/1"
JSON_FILE, MARKDOWN_FILE, SEARCH_FOLDER = "recommendation.json", "recommendation.md", "searched"


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
        return json_safe({"format": FORMAT, **said})

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `recommendation.json` and `recommendation.md`, and `searched/found.json`.

        Args:
            folder: Where to; made if missing.

        Returns:
            The path of `recommendation.json`, which is written last.
        """
        from rope_patch.recommending.summary import as_markdown

        folder = Path(folder)
        if self.found is not None:
            self.found.save(folder / SEARCH_FOLDER)
        atomic_files.atomic_write(folder / MARKDOWN_FILE, as_markdown(self))
        atomic_files.atomic_write(folder / JSON_FILE, json.dumps(self.to_dict(), indent=1) + "\n")
        return folder / JSON_FILE

    def __str__(self) -> str:
        from rope_patch.recommending.summary import as_text

        return as_text(self)


def to_rows(rows: Sequence[VariantScores], choice: Choice) -> list[dict[str, Any]]:
    """All that is known of each method, as plain data."""
    found = []
    plain = next(row for row in rows if row.variant.method is None)
    best = next((row for row in rows if row.variant.name == choice.best), None)
    for row in rows:
        entry, name = row.variant, row.variant.name
        found.append(
            {
                "name": name,
                "method": entry.method,
                "options": dict(entry.options),
                "status": status(row, choice),
                "engines": list(row.engines),
                "everywhere": set(row.engines) >= set(plain.engines),
                "long": _scores_to_dict(row.long),
                "short": _scores_to_dict(row.short),
                "prose": _scores_to_dict(row.prose),
                "behind": None if best is None else _difference_to_dict(row.long, best.long),
                "price": _difference_to_dict(row.short, plain.short),
                "prose_price": _difference_to_dict(row.prose, plain.prose),
                "leaves_short": entry.short_rotation.candidate is None,
            }
        )
    return found


def status(row: VariantScores, choice: Choice) -> str:
    """What became of a method, in a few words."""
    name = row.variant.name
    if name == choice.name:
        return "recommended"
    if row.status:
        return row.status
    if name in choice.ties:
        return "cannot be told from the best at the length"
    return "worse than the best at the length" if name in choice.behind else "not compared"


def interval_to_list(interval: Interval | None) -> list[float] | None:
    """Estimate, low and high."""
    return None if interval is None else [interval.estimate, interval.low, interval.high]


def _scores_to_dict(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "nll": interval_to_list(scores.loss_interval()),
        "accuracy": interval_to_list(scores.accuracy_interval()),
        "samples": len(scores),
    }


def _difference_to_dict(scores: Scores | None, other: Scores | None) -> dict[str, Any] | None:
    """How they differ on the samples that both were given."""
    if scores is None or other is None:
        return None
    found = score_difference(scores, other)
    return {"nll": interval_to_list(found.nll), "accuracy": interval_to_list(found.hits)}
