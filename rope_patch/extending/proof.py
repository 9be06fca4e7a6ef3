"""The proof: the candidates and the plain model on the same questions, and the decision by it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rope_patch.evaluation import pipeline
from rope_patch.evaluation.profiles import fit_tasks
from rope_patch.evaluation.report.conclusions import Ranking, is_shown_to_help, verdict_sentence
from rope_patch.evaluation.report.merging import add_other_weights
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.report.summary import summary_table
from rope_patch.evaluation.report.table import Table, p_text
from rope_patch.evaluation.report.writer import write_report
from rope_patch.evaluation.request import BASELINE, PERPLEXITY, SHORT, EvalRequest
from rope_patch.evaluation.results_schema import RunRecord
from rope_patch.extending.request import ExtendRequest
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import get_method, registered_methods
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_tokenizer
from rope_patch.runs.run_folder import LOCK
from rope_patch.statistics import SIGNIFICANCE_LEVEL, Outcome, Verdict, least_texts
from rope_patch.tasks import texts
from rope_patch.utils import checksums
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

PER_TEXT = 1  # questions about a text: intervals rest on texts, and each is read once
_TASKS = ("rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc", PERPLEXITY, SHORT)
_DEPTHS = (10, 30, 50, 70, 90)  # percent
_PILOT_SHORT = 3  # samples of each ordinary short task in the pilot
_MIN_SHORT, _MAX_SHORT = 10, 60
_SHORT_SHARE = 0.2  # share of the remaining time that goes into short tasks
_USED_SHARE = 0.85  # share of the time that is planned, since passes vary
NOT_COMPARED = (
    "time, memory and the lengths between the trained one and the target: "
    "`rope-patch compare` measures them"
)


@dataclass(frozen=True)
class Decision:
    """The decision on what to publish.

    Attributes:
        label: The label of the chosen method in the results; None if none is shown to help.
        sentences: The reasons, with their numbers.
    """

    label: str | None
    sentences: tuple[str, ...]


def base_request(
    request: ExtendRequest,
    candidates: list[Candidate],
    trained: int,
    length: int,
    measured: tuple[str, ...],
    folder: Path,
) -> EvalRequest:
    """Return the comparison of the candidates with the plain model, on the fewest samples.

    Its seed is another one than the recommendation's: the questions are others.
    """
    methods = (BASELINE, *(candidate.method for candidate in candidates))
    chosen = fit_tasks(_TASKS, request.model, None, trained)
    document = measured[:1] or ("emma",)
    if not _has_document(request.model, document, length):
        chosen = tuple(task for task in chosen if task != PERPLEXITY)
    return EvalRequest(
        model=request.model,
        methods=methods,
        length=length,
        lengths=(trained, length),
        tasks=chosen,
        samples=PER_TEXT,
        per_text=PER_TEXT,
        depths=_DEPTHS,
        controls=True,
        texts=document,
        haystacks=measured,
        short_samples=_PILOT_SHORT,
        trained_length=request.trained_length,
        start=request.start,
        anyway=request.anyway,
        arguments={candidate.method: candidate.options for candidate in candidates},
        dtype=request.dtype,
        device_map=request.device_map,
        trust_remote_code=request.trust_remote_code,
        seed=request.seed + 1,
        folder=folder,
        command=request.command,
    )


def plan_samples(
    pilot: EvalRequest, seconds: float, most: int, with_trained: bool
) -> dict[str, Any]:
    """Run the pilot, and return how many samples fit into the time.

    The pilot's times are those that are stored with its answers. So a pilot that was killed and
    continued comes to the same number, although it asks only what it had not asked.

    Args:
        pilot: The comparison on one text.
        seconds: Time for the whole comparison.
        most: Questions at each length at most.
        with_trained: Whether a trained model is measured, too.

    Returns:
        `samples`, `short_samples` (0 for none) and `left_out`, the reasons.
    """
    results = pipeline.evaluate(pilot)
    parts = results["run"]["stored_seconds"]
    more = (len(pilot.methods) + with_trained) / len(pilot.methods)
    text_seconds = max(parts.get("retrieval", 0.0) * more, 1e-3)
    short_seconds = parts.get("short tasks", 0.0) * more / _PILOT_SHORT
    left = _USED_SHARE * seconds - sum(parts.values())
    left -= with_trained * parts.get(PERPLEXITY, 0.0) / len(pilot.methods)
    left_out = []
    short = _MAX_SHORT
    if short_seconds:
        short = min(_MAX_SHORT, int(_SHORT_SHARE * left / short_seconds))
    if short < _MIN_SHORT or not short_seconds:
        short = 0
        left_out.append("ordinary short tasks: the budget has no time for them")
    left -= short * short_seconds
    texts_in_time = 1 + max(0, int(left / text_seconds))
    count = max(1, min(most // PER_TEXT, texts_in_time))
    least = least_texts(SIGNIFICANCE_LEVEL / (len(pilot.methods) - 1 + with_trained))
    if count < least <= most // PER_TEXT:
        texts = f"{count} text{'' if count == 1 else 's'}"
        left_out.append(
            f"more than {texts}: one takes {format_duration(text_seconds)} "
            f"({text_seconds:.3g} s), and the budget leaves {format_duration(seconds)} for the "
            f"comparison; these are too few texts to say ({least} decide), and a larger budget "
            "asks about more"
        )
    if PERPLEXITY not in pilot.tasks:
        left_out.append("perplexity: the text is shorter than the target")
    logger.info("the comparison asks %s questions about %s texts", PER_TEXT * count, count)
    return {"samples": PER_TEXT * count, "short_samples": short, "left_out": left_out}


def measure(
    pilot: EvalRequest,
    sample_plan: dict[str, Any],
    tuned: tuple[Path, str] | None,
    report: Path,
) -> RunRecord:
    """Measure as planned, write the report, and return the results of all methods.

    Args:
        pilot: The comparison on one text.
        sample_plan: What `plan_samples` returned.
        tuned: The folder of a trained model and its label, if there is one.
        report: The folder of the report.
    """
    request = _planned(pilot, sample_plan)
    results = pipeline.evaluate(request)
    if tuned is not None:
        folder, label = tuned
        own = replace(
            request,
            model=str(folder),
            methods=(BASELINE,),
            length=None,
            arguments={},
            controls=False,
            trained_length=None,
            start="auto",
            folder=request.folder.with_name(f"{request.folder.name}-trained"),
        )
        trained_results = pipeline.evaluate(own)
        names = {method["label"]: label for method in trained_results["methods"]}
        results = add_other_weights(results, trained_results, names)
        write_report(results, report)
        return results
    # It is the evaluation's own.
    shutil.rmtree(report, ignore_errors=True)
    ignored = shutil.ignore_patterns("cache", LOCK)
    shutil.copytree(request.folder, report, ignore=ignored)
    return results


def decide(
    results: RunRecord, length: int, tuned_label: str | None, unserved: Collection[str] = ()
) -> Decision:
    """Decide what to publish.

    The first candidate that is shown to make right answers likelier than the plain model does; one
    that no engine runs only if no other one is shown to. The trained model only if it is shown to
    be better than that, because a rotation alone leaves the weights as they were.

    Args:
        results: All methods on the same questions.
        length: The target in tokens.
        tuned_label: The label of the trained model, if there is one.
        unserved: Labels of methods that no engine runs without this package.
    """
    stats = RunStatistics(results)
    verdicts = stats.verdicts_on_plain(length)
    labels = [label for label in stats.patched if label in verdicts]
    sentences = [verdict_sentence(stats, label, length, verdicts[label]) for label in labels]
    if stats.floor is not None:
        sentences += [
            f"With {label} the right answers are not shown to be likelier than where the text "
            "lacks them."
            for label in labels
            if not stats.reads_answers(label, length)
        ]
    helping = [label for label in labels if is_shown_to_help(stats, label, length)]
    rotations = [label for label in helping if label != tuned_label]
    served = [label for label in rotations if label not in unserved]
    chosen = next(iter([*served, *rotations, *helping]), None)
    if chosen is not None and rotations and chosen != rotations[0]:
        sentences.append(
            f"No engine runs {rotations[0]} without rope_patch, so {chosen} is published; "
            "rope-patch patch writes the other."
        )
    if chosen is not None and tuned_label in helping and chosen != tuned_label:
        assert tuned_label is not None
        test = stats.loss_difference(tuned_label, chosen, length)
        if test is not None and Verdict(test, test.p_value).outcome is Outcome.BETTER:
            sentences.append(f"Training makes them likelier still ({p_text(test.p_value)}).")
            chosen = tuned_label
        else:
            sentences.append(
                f"That training adds to {chosen} is not shown, so the weights stay as they were."
            )
    return Decision(chosen, tuple(sentences))


def evidence_table(results: RunRecord) -> tuple[Table | None, list[str]]:
    """Return the report's first table, and the lines below it."""
    stats = RunStatistics(results)
    return summary_table([("", stats, Ranking(stats))])


def usable_text(results: RunRecord, label: str) -> str:
    """Return the usable length of a method, or why there is none."""
    stats = RunStatistics(results)
    usable = stats.usable_length(label)
    return f"not shown: {stats.nothing_to_keep}" if usable is None else str(usable)


def _planned(pilot: EvalRequest, sample_plan: dict[str, Any]) -> EvalRequest:
    short = int(sample_plan["short_samples"])
    chosen = pilot.tasks if short else tuple(t for t in pilot.tasks if t not in pilot_short(pilot))
    return replace(
        pilot,
        samples=int(sample_plan["samples"]),
        short_samples=short or _PILOT_SHORT,
        tasks=chosen,
    )


def pilot_short(pilot: EvalRequest) -> tuple[str, ...]:
    """Return the names of the short tasks among a request's tasks."""
    return (SHORT, *pilot.short)


def _has_document(model: str, names: tuple[str, ...], length: int) -> bool:
    tokenizer = read_tokenizer(demo.resolve_model_path(model))
    try:
        texts.documents(names, tokenizer, length)
    except ValueError:
        return False
    return True


def read_results(report: Path) -> RunRecord:
    """Return the results of a report."""
    path = report / "report.json"
    return cast(RunRecord, checksums.verify_checksum(path.read_bytes(), str(path)))


@dataclass(frozen=True)
class Candidate:
    """A method with its options, without the length.

    Attributes:
        method: The registered name.
        options: The method's options.
        runs_nowhere: Whether no engine has a form for it without this package.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    runs_nowhere: bool = False


def compared_candidates(recommendation: dict[str, Any]) -> list[Candidate]:
    """Return the methods to compare with the plain model, the preferred one first.

    The recommended one, else the best at the length. If not all engines run it, the best of those
    that all of them run is second, as what people would serve instead; unless engines are required,
    which run the first.

    Args:
        recommendation: As `Recommendation.to_dict` returns it.
    """
    measured = _measured_rows(recommendation)
    first = next((row for row in measured if row["name"] == recommendation["method"]), None)
    first = first or next(iter(measured), None)
    if first is None:
        return []
    rows = [first]
    if not first["everywhere"] and not recommendation.get("engines"):
        rows += [row for row in measured if row["everywhere"]][:1]
    by_method = {row["method"]: row for row in reversed(rows)}  # labels are by method
    return [
        Candidate(row["method"], row["options"], runs_nowhere=not row["engines"])
        for row in reversed(by_method.values())
    ]


def trained_candidate(
    recommendation: dict[str, Any], is_servable: Callable[[Candidate], bool] = lambda _: True
) -> Candidate | None:
    """Return the method to fine-tune: the best at the length of those with one set of frequencies.

    Training needs one rotation for long rows, so position maps and what follows the length are left
    out. The method's mixed form, which leaves short rows as they were, takes its place if it has
    one and no options.

    Args:
        recommendation: As `Recommendation.to_dict` returns it.
        is_servable: Whether the engines that the request names run a candidate.
    """
    for row in _measured_rows(recommendation):
        method = get_method(row["method"])
        if issubclass(method, PositionMap) or method.is_dynamic or row["leaves_short"]:
            continue
        mixed = Candidate(f"mixed-{row['method']}")
        if mixed.method in registered_methods() and not row["options"] and is_servable(mixed):
            return mixed
        return Candidate(row["method"], row["options"])
    return None


def _measured_rows(recommendation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of patched methods that were measured at the length, best first."""
    rows = [
        row
        for row in recommendation["rows"]
        if row["method"] is not None and row["long"] and row["long"]["nll"]
    ]
    return sorted(rows, key=lambda row: float(row["long"]["nll"][0]))
