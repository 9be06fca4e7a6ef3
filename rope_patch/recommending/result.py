"""The result of recommend(): a verdict with its evidence, to print and to save."""

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
from rope_patch.utils.notebook import text_html

if TYPE_CHECKING:
    from rope_patch.recommending.scoreboard import VariantScores
    from rope_patch.searching.result.search_result import SearchResult

FORMAT = "rope_patch.recommend/1"
JSON_FILE, MARKDOWN_FILE, SEARCH_FOLDER = "recommendation.json", "recommendation.md", "searched"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The method to use at a length, and the evidence; print it to read it.

    Attributes:
        model: The model's name or folder.
        weights: The fingerprint of its weights.
        length: Target length in tokens.
        trained_length: Tokens of pretraining.
        short_length: Tokens of the samples within the trained length; None if samples were given.
        budget: Minutes allowed.
        seconds: Seconds of all measurements, with those of earlier runs.
        method: The name of the recommended method, as in the rows, or None.
        outcome: "use", "nothing holds" or "cannot answer", see `decision_rule.Choice`.
        verdict: The outcome in a sentence or two.
        reasons: The steps of the decision.
        python: The line that applies the method; empty if there is none.
        shell: The export command for another engine; empty if there is none.
        rows: A row for each method: `name`, `method`, `options`, `status`, `engines`; `long`,
            `short` and `prose` with `nll`, `accuracy`, their intervals and `samples`; `behind` (the
            best at the length) and `price` and `prose_price` (against the plain model).
        samples: Samples at the target length that the last methods were compared on.
        scored: Samples scored in all, without the search's.
        not_measured: What was not measured, and why.
        seed: Seed of samples and search.
        versions: Versions of the packages that the result depends on.
        command: The command line, to run it again.
        found: The search's result, if any.
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
        """Return strict JSON data without the search's result, which has a file of its own."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data.pop("found")
        return json_safe({"format": FORMAT, **data})

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `recommendation.json` and `recommendation.md`, and `searched/found.json`.

        Args:
            folder: The folder to write to; created if missing.

        Returns:
            The path of `recommendation.json`, which is written last.
        """
        from rope_patch.recommending.summary import recommendation_markdown

        folder = Path(folder)
        if self.found is not None:
            self.found.save(folder / SEARCH_FOLDER)
        atomic_files.atomic_write(folder / MARKDOWN_FILE, recommendation_markdown(self))
        atomic_files.atomic_write(folder / JSON_FILE, json.dumps(self.to_dict(), indent=1) + "\n")
        return folder / JSON_FILE

    def __str__(self) -> str:
        from rope_patch.recommending.summary import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        return text_html(str(self))


def to_rows(rows: Sequence[VariantScores], choice: Choice) -> list[dict[str, Any]]:
    """Return all results of each method as plain data, see `Recommendation.rows`."""
    table = []
    plain = next(row for row in rows if row.variant.method is None)
    best = next((row for row in rows if row.variant.name == choice.best), None)
    for row in rows:
        entry, name = row.variant, row.variant.name
        table.append(
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
    return table


def status(row: VariantScores, choice: Choice) -> str:
    """Return a method's outcome in a few words."""
    name = row.variant.name
    if name == choice.name:
        return "recommended"
    if row.status:
        return row.status
    if name in choice.ties:
        return "cannot be told from the best at the length"
    return "worse than the best at the length" if name in choice.behind else "not compared"


def interval_to_list(interval: Interval | None) -> list[float] | None:
    """Return estimate, low and high of an interval."""
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
    """Return the differences on the samples that both scores cover."""
    if scores is None or other is None:
        return None
    difference = score_difference(scores, other)
    return {"nll": interval_to_list(difference.nll), "accuracy": interval_to_list(difference.hits)}
