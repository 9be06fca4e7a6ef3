"""The result of recommend(): a verdict with its evidence, to print and to save."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rope_patch.evaluation.report.conclusions import verdict_text
from rope_patch.recommending.decision_rule import (
    NATS,
    Choice,
    Scores,
    VariantScores,
    held_out_table,
    score_difference,
    usable_length_of,
)
from rope_patch.recommending.sample_sets import BLOCK_SIZE
from rope_patch.recommending.successive_halving import SuccessiveHalving
from rope_patch.recommending.variants import PLAIN, export_command, patch_call
from rope_patch.searching.model import plain_config
from rope_patch.searching.search_result import SearchResult
from rope_patch.statistics import USABLE_SHARE, Interval, Outcome, UsableLength, Verdict
from rope_patch.utils import atomic_files
from rope_patch.utils.checksums import json_safe
from rope_patch.utils.errors import (
    escape_markdown,
    markdown_block,
    markdown_code,
    markdown_prose,
    markdown_table,
    one_line,
    text_html,
)
from rope_patch.utils.terminal import SignedFormat, align

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
        shell: The export command for another engine, or a line for each of `engines`; empty if
            there is none.
        rows: A row for each method: `name`, `method`, `options`, `status`, `engines`; `long`,
            `short` and `prose` with `nll`, `accuracy`, their intervals and `samples`; `behind` (the
            best at the length), `on_plain` (the `outcome` beside the plain model there), `price`
            and `prose_price` (against the plain model); `usable`, the fields of its
            `rope_patch.statistics.UsableLength`, or None.
        samples: Samples at the target length that the last methods were compared on.
        scored: Samples scored in all, without the search's.
        not_measured: What was not measured, and why.
        seed: Seed of samples and search.
        versions: Versions of the packages that the result depends on.
        command: The command line, to run it again.
        engines: The engines that the method had to run in; none if empty.
        elsewhere: Which methods were left out because those engines cannot run them, in a line.
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
    engines: tuple[str, ...] = ()
    elsewhere: str = ""
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
        folder = Path(folder)
        if self.found is not None:
            self.found.save(folder / SEARCH_FOLDER)
        atomic_files.atomic_write(folder / MARKDOWN_FILE, recommendation_markdown(self))
        atomic_files.atomic_write(folder / JSON_FILE, json.dumps(self.to_dict(), indent=1) + "\n")
        return folder / JSON_FILE

    def __str__(self) -> str:
        return recommendation_text(self)

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a result says of its run beside the measurements; see `Recommendation`.

    Attributes:
        folder: The folder that the result is written to, or None.
    """

    model: str
    weights: str
    short_length: int | None
    budget: float
    seed: int
    versions: dict[str, str]
    command: str
    folder: str | os.PathLike[str] | None
    engines: tuple[str, ...] = ()


def make_recommendation(
    facts: RunFacts, halving: SuccessiveHalving, choice: Choice
) -> Recommendation:
    """Return the recommendation of a run, from its measurements and the decision on them."""
    space = halving.space
    trained = space.geometry.trained_length
    lengths = {"long": space.length}
    if facts.short_length is not None:
        lengths["short"] = facts.short_length
    rows = result_rows(list(halving.rows.values()), choice, lengths)
    shown = _shown_text(choice, halving)
    python = shell = ""
    if choice.name is not None:
        row = halving.rows[choice.name]
        search_folder = None if facts.folder is None else str(Path(facts.folder) / SEARCH_FOLDER)
        python = patch_call(row.variant, halving.extension, search_folder)
        places: list[tuple[str, ...]] = [(engine,) for engine in facts.engines] or [row.engines]
        shell = "\n".join(
            export_command(row.variant, halving.extension, facts.model, each) for each in places
        ).strip()
    return Recommendation(
        model=facts.model,
        weights=facts.weights,
        length=space.length,
        trained_length=trained,
        short_length=facts.short_length,
        budget=facts.budget,
        seconds=halving.clock.spent(),
        method=choice.name,
        outcome=choice.verdict,
        verdict=verdict_sentence(choice, rows, space.length, trained, shown),
        reasons=(*choice.reasons, *[shown] * bool(shown)),
        python=python,
        shell=shell,
        rows=rows,
        samples=halving.block_count * BLOCK_SIZE,
        scored=halving.scorer.samples_scored,
        not_measured=tuple(halving.not_measured),
        seed=facts.seed,
        versions=facts.versions,
        command=facts.command,
        engines=facts.engines,
        elsewhere=halving.elsewhere(choice),
        found=_search_result(facts, halving),
    )


def _search_result(facts: RunFacts, halving: SuccessiveHalving) -> SearchResult | None:
    """Return the result of the run's search as `search` gives it; None if there was none."""
    outcome = halving.search_outcome
    if outcome is None:
        return None
    return SearchResult(
        model=facts.model,
        weights=facts.weights,
        strategy=outcome.strategy,
        seed=facts.seed,
        factor=halving.space.factor,
        geometry=halving.space.geometry,
        candidate=outcome.candidate,
        history=outcome.history,
        held_out=held_out_table(halving.rows),
        asked=replace(halving.extension, factor=None, length=None).arguments(),
        evaluations_per_minute=outcome.evaluations_per_minute,
        versions=facts.versions,
        command=facts.command,
        config=plain_config(halving.model),
    )


def result_rows(
    rows: Sequence[VariantScores], choice: Choice, lengths: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return all results of each method as plain data, see `Recommendation.rows`."""
    table = []
    plain = next(row for row in rows if row.variant.method is None)
    best = next((row for row in rows if row.variant.name == choice.best), None)
    for row in rows:
        entry, name = row.variant, row.variant.name
        usable = usable_length_of(row, plain, lengths)
        table.append(
            {
                "name": name,
                "method": entry.method,
                "options": dict(entry.options),
                "status": outcome_text(row, choice),
                "engines": list(row.engines),
                "everywhere": set(row.engines) >= set(plain.engines),
                "long": _scores_to_dict(row.long),
                "short": _scores_to_dict(row.short),
                "prose": _scores_to_dict(row.prose),
                "on_plain": _verdict_to_dict(choice.on_plain.get(name)),
                "behind": None if best is None else _difference_to_dict(row.long, best.long),
                "price": _difference_to_dict(row.short, plain.short),
                "prose_price": _difference_to_dict(row.prose, plain.prose),
                "usable": None if usable is None else asdict(usable),
                "leaves_short": entry.short_rotation.candidate is None,
            }
        )
    return table


def outcome_text(row: VariantScores, choice: Choice) -> str:
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


def _verdict_to_dict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    difference = interval_to_list(verdict.test.mean)
    return {"outcome": verdict.outcome.value, "nll": difference, "p_value": verdict.p_value}


def _difference_to_dict(scores: Scores | None, other: Scores | None) -> dict[str, Any] | None:
    """Return the differences on the samples that both scores cover."""
    if scores is None or other is None:
        return None
    difference = score_difference(scores, other)
    return {"nll": interval_to_list(difference.nll), "accuracy": interval_to_list(difference.hits)}


_NO_VALUE = "–"
_PERCENT = SignedFormat(1)
_NOTES = (
    f"Usable is a length up to which {USABLE_SHARE:.0%} of the answers are right that the plain "
    "model gets right within its trained length, with its 95% interval.",
    "Intervals are 95% each, over texts, not for all comparisons together. The best of several "
    "looks better on the samples that it was chosen by than it is.",
    "A price is the difference from the plain model within its trained length, on the same "
    "samples, in nats for a token of an answer and in perplexity of prose. What follows the length "
    "leaves texts within it as they are, but needs this package or turns cached keys; lengths "
    "between the trained one and the target were not measured.",
)


def _shown_text(choice: Choice, halving: SuccessiveHalving) -> str:
    """Return compare's sentence on the recommended method beside the plain model; "" if none."""
    verdict = choice.on_plain.get(choice.name or "")
    if verdict is None:
        return ""
    row, plain = halving.rows[str(choice.name)], halving.rows[PLAIN]
    assert row.long is not None
    assert plain.long is not None
    count = min(len(row.long), len(plain.long))
    losses = (row.long.first(count).mean, plain.long.first(count).mean)
    compared = len({halving.rows[name].variant.long_rotation.key for name in choice.on_plain})
    after = f" after Holm over {compared} rotations" if compared > 1 else ""
    return verdict_text(verdict, row.variant.name, halving.space.length, losses, after)


def verdict_sentence(
    choice: Choice, rows: Sequence[dict[str, Any]], length: int, trained: int, shown: str = ""
) -> str:
    """Return the verdict in a sentence or two.

    Args:
        choice: The decision.
        rows: See `Recommendation.rows`.
        length: Target length in tokens.
        trained: Trained length in tokens.
        shown: What is shown of the method beside the plain model; part of the verdict where it is
            not shown to be better.
    """
    by_name = {row["name"]: row for row in rows}
    at = f"at {length:,} tokens"
    if choice.verdict == "cannot answer":
        return (
            "Nothing can be recommended by these questions: the model does not answer them within "
            f"its trained {trained:,} tokens either, so no method has anything to keep. Ask what "
            "it can answer (--samples), or measure perplexity with rope-patch compare."
        )
    if choice.name is None:
        best = by_name[str(choice.best)]
        return (
            f"Nothing here holds {at}: the best, {choice.best}, gets "
            f"{_accuracy_text(best['long'])} there{_retention_text(choice)}."
            f"{_usable_text(best)} Fine-tune at that length (rope-patch finetune), or ask for a "
            "shorter one."
        )
    row = by_name[choice.name]
    if choice.name == PLAIN:
        return (
            f"Nothing is needed {at}: the plain model gets {_accuracy_text(row['long'])} there, "
            f"and no method that was measured is shown to be better.{_usable_text(row)}"
        )
    plain = by_name[PLAIN]["long"]
    verdict = choice.on_plain.get(choice.name)
    caution = "" if verdict is None or verdict.outcome is Outcome.BETTER else f" {shown}"
    return (
        f"Use {choice.name} {at}: it gets {_accuracy_text(row['long'])} "
        f"there{_retention_text(choice)}; the plain model gets {_accuracy_text(plain)}."
        f"{_usable_text(row)} {_price_text(row, trained)}{caution}"
    )


def recommendation_text(recommendation: Recommendation) -> str:
    """Return a recommendation as text for a terminal."""
    lines = [_title_line(recommendation), "", recommendation.verdict]
    if recommendation.python:
        lines += ["", f"  {recommendation.python}"]
    lines += [f"  {line}" for line in recommendation.shell.splitlines()]
    if recommendation.elsewhere:
        lines += ["", f"Elsewhere: {recommendation.elsewhere}."]
    lines += [
        "",
        *align(_table_rows(recommendation)),
        "",
        *(f"- {reason}" for reason in recommendation.reasons),
    ]
    lines += [f"- not measured: {why}" for why in recommendation.not_measured]
    return "\n".join([*lines, "", *_NOTES, _cost_line(recommendation)])


def recommendation_markdown(recommendation: Recommendation) -> str:
    """Return a recommendation as a Markdown page."""
    rows = _table_rows(recommendation)
    lines = [
        f"# {escape_markdown(_title_line(recommendation))}",
        "",
        f"**{markdown_prose(recommendation.verdict)}**",
        "",
    ]
    if recommendation.python:
        shell = [recommendation.shell] if recommendation.shell else []
        lines += [markdown_block("\n".join([recommendation.python, *shell])), ""]
    if recommendation.elsewhere:
        lines += [f"Elsewhere: {markdown_prose(recommendation.elsewhere)}.", ""]
    lines += markdown_table(rows, f"l{'r' * (len(rows[0]) - 2)}l")
    lines += ["", *(f"- {markdown_prose(reason)}" for reason in recommendation.reasons)]
    lines += [f"- not measured: {markdown_prose(why)}" for why in recommendation.not_measured]
    for note in (*_NOTES, _cost_line(recommendation)):
        lines += ["", note]
    if recommendation.command:
        lines += ["", f"Made by {markdown_code(recommendation.command)}."]
    return "\n".join(lines) + "\n"


def _title_line(recommendation: Recommendation) -> str:
    factor = recommendation.length / recommendation.trained_length
    return (
        f"{one_line(recommendation.model)}, from {recommendation.trained_length:,} to "
        f"{recommendation.length:,} tokens (×{factor:.4g})"
    )


def _cost_line(recommendation: Recommendation) -> str:
    text = (
        f"{recommendation.samples} samples at the length for what was compared in the end, "
        f"{recommendation.scored:,} scored in all"
    )
    if recommendation.found is not None:
        text += f", a search of {len(recommendation.found.history)} evaluations on others"
    return f"{text}; {recommendation.seconds / 60:.3g} of {recommendation.budget:g} minutes."


def _table_rows(recommendation: Recommendation) -> list[list[str]]:
    head = [
        "method",
        f"right at {recommendation.length:,}",
        "nats",
        "usable up to",
        "behind the best",
        "right within",
        "price, nats",
        "price, prose",
        "runs without rope_patch",
        "samples",
        "",
    ]
    return [head, *(_method_cells(row) for row in recommendation.rows)]


def _method_cells(row: dict[str, Any]) -> list[str]:
    long, short = row["long"] or {}, row["short"] or {}
    price = row["price"] and _format_signed(row["price"]["nll"])
    prose = row["prose_price"] and _format_percent(row["prose_price"]["nll"])
    return [
        row["name"],
        _format_share(long.get("accuracy")),
        _format_nats(long.get("nll")),
        str(_usable_length(row)).replace(" tokens", "") if row.get("usable") else _NO_VALUE,
        _format_signed(row["behind"]["nll"]) if row["behind"] else _NO_VALUE,
        _format_share(short.get("accuracy")),
        price or _NO_VALUE,
        prose or _NO_VALUE,
        "everywhere" if row["everywhere"] else ", ".join(row["engines"]) or "nowhere",
        str(long.get("samples", 0)),
        row["status"],
    ]


def _accuracy_text(scores: dict[str, Any]) -> str:
    nats = f"{_format_nats(scores['nll'])} nats a token"
    if scores["accuracy"] is None:
        return nats
    return f"{_format_share(scores['accuracy'])} of answers right ({nats})"


def _retention_text(choice: Choice) -> str:
    if choice.retained_share is None:
        return ""
    share = choice.retained_share
    # A method may do better than the plain model does there: nothing is kept but all of it.
    estimate, low, high = (min(x, 1.0) for x in (share.estimate, share.low, share.high))
    return (
        f", {estimate:.0%} ({low:.0%} to {high:.0%}) of what the plain model gets right within its "
        "trained length"
    )


def _usable_text(row: dict[str, Any]) -> str:
    """Return a sentence on a method's usable length, with a space before it; none if unknown."""
    if row.get("usable") is None:
        return ""
    return f" Usable length: {_usable_length(row)}."


def _usable_length(row: dict[str, Any]) -> UsableLength:
    return UsableLength(**{**row["usable"], "lengths": tuple(row["usable"]["lengths"])})


def _price_text(row: dict[str, Any], trained: int) -> str:
    if row["leaves_short"]:
        return f"Within the trained {trained:,} tokens it changes nothing."
    prices = [f"{_format_signed(row['price']['nll'])} nats a token of answers"]
    if row["prose_price"]:
        prices.append(f"{_format_percent(row['prose_price']['nll'])} perplexity of prose")
    return f"Within the trained {trained:,} tokens it costs {', '.join(prices)}."


def _format_share(interval: Sequence[float] | None) -> str:
    if interval is None:
        return _NO_VALUE
    estimate, low, high = interval
    return f"{estimate:.0%} ({low:.0%} to {high:.0%})"


def _format_nats(interval: Sequence[float] | None) -> str:
    if interval is None:
        return _NO_VALUE
    estimate, low, high = interval
    return f"{estimate:.3f} ({low:.3f} to {high:.3f})"


def _format_signed(interval: Sequence[float]) -> str:
    estimate, *bounds = interval
    return NATS.with_interval(estimate, bounds) if any(interval) else "0"


def _format_percent(interval: Sequence[float]) -> str:
    """Return a difference in nats as a change of perplexity in percent."""
    if not any(interval):
        return "0"
    _, low, high = interval
    estimate, *bounds = (100 * math.expm1(min(value, 20.0)) for value in interval)
    if math.isinf(high - low):
        bounds = [low, high]  # unknown, which the changes in percent do not tell
    return _PERCENT.with_interval(estimate, bounds, unit="%", range_unit="%")
