"""The evaluation pipeline: methods x tasks x lengths on one model, resumable, with a report."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.evaluation.decision_plan import (
    PassTime,
    RunPlan,
    log_plan,
    plan_sentences,
    texts_short_of_verdict,
    try_plan,
)
from rope_patch.evaluation.measures import external_tasks, lm_eval_tasks, speed
from rope_patch.evaluation.measures.external_tasks import ExternalResults
from rope_patch.evaluation.perplexity_run import PerplexityRun
from rope_patch.evaluation.report.conclusions import find_gaps, gap_sentence
from rope_patch.evaluation.request import (
    BASELINE,
    PERPLEXITY,
    SPEED,
    EvalRequest,
    check_request,
)
from rope_patch.evaluation.results_schema import (
    CostRecord,
    OtherRecords,
    RunMetadata,
    RunRecord,
)
from rope_patch.evaluation.retrieval_run import RetrievalRun, cautions
from rope_patch.evaluation.session import Session
from rope_patch.patching.length_warning import silence_length_warnings
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import read_config, read_tokenizer
from rope_patch.tasks import chat_template, short, text_of
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils import atomic_files, provenance
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

_SPEED_PROMPT = 2048  # tokens
# What a plan counts: a document is read whole and cut, a short question with each of its choices.
_DOCUMENT_PASSES, _SHORT_CHOICES, _SHORT_TOKENS = 2, 4, 100
_UNLIMITED = 10**9  # tokens: lm-eval's own tasks have no limit here


@takes_remote_code
@silence_length_warnings()  # the report shows what happens beyond a method's length
def evaluate(request: EvalRequest, show: Callable[[str], object] | None = None) -> RunRecord:
    """Evaluate, and write the report.

    The folder stores everything that is finished, so the same request continues an earlier run.
    Under `accelerate launch` all processes take part, each with the whole model.

    Args:
        request: What to evaluate.
        show: Called with the verdict, the summary and cautions as plain text, in the main process.

    Returns:
        The results that the report shows (`report.json`).

    Raises:
        ValueError: A request that cannot be met, found out before weights are read; or a run in
            which not one sample could be answered; or another run works in the folder.
        OSError: The folder cannot be written to or locked, found out before the model is loaded; or
            a file could not be written, with how to go on.
    """
    atomic_files.require_writable_folder(request.folder, "the report")
    with add_write_advice(request.folder):
        return _evaluate(request, show)


@takes_remote_code
def plan(request: EvalRequest) -> RunPlan:
    """Return what an evaluation would measure, how long that takes here, and what it can decide.

    Reads the model, times one short pass, and writes nothing.

    Args:
        request: What to evaluate.

    Raises:
        ValueError: A request that cannot be met.
    """
    with tempfile.TemporaryDirectory() as folder:
        session = _open_session(replace(request, folder=Path(folder)))
        questions, others = RetrievalRun(session), _OtherMeasures(session)
        session.check_tasks(others.external_tasks)
        session.load()
        return _plan(session, questions, others)


def _plan(session: Session, questions: RetrievalRun, others: _OtherMeasures) -> RunPlan:
    request, planned = session.request, questions.planned()
    # Within the trained length: tables of positions have no more rows before they are stretched.
    times = PassTime(session.model, min(request.longest, session.trained_length))
    methods = len(request.methods)
    texts = {
        (text_of(name), length, sample["text"])
        for (name, length), samples in planned.items()
        for sample in samples
    }
    reading = sum(times.seconds(length) for _, length, _ in texts)
    documents = len(PerplexityRun(session).documents) if PERPLEXITY in request.tasks else 0
    short_passes = len(others.short_tasks) * request.short_samples * _SHORT_CHOICES
    seconds = methods * (
        reading
        + _DOCUMENT_PASSES * documents * times.seconds(request.longest)
        + short_passes * times.seconds(_SHORT_TOKENS)
    )
    count = sum(map(len, planned.values()))
    measures = [f"{methods} methods: {', '.join(request.methods)}"]
    if planned:
        lengths = ", ".join(f"{length:,}" for length in request.lengths)
        measures.append(f"{count} questions about {len(texts)} texts of {lengths} tokens, each")
    if others.external_tasks:
        measures.append("lm-eval's own tasks, which the time does not count")
    decides = plan_sentences(request, planned, session.trained_length)
    missing = ""
    if needed := texts_short_of_verdict(request, planned):
        has, least = needed
        more = methods * reading * (least / has - 1)
        missing = f"{has} texts, {least} decide; it takes about {format_duration(seconds + more)}"
    return RunPlan(
        measures=tuple(measures), seconds=seconds, decides=tuple(decides), missing=missing
    )


def add_write_advice(folder: Path) -> AbstractContextManager[None]:
    """Say how to go on in errors of writing, while the block runs.

    Args:
        folder: The folder of the report.
    """
    advice = f"What was measured is kept in {folder / 'cache'}: REMEDY, and the same command"
    return atomic_files.add_write_advice(f"{advice} goes on from there")


def _evaluate(request: EvalRequest, show: Callable[[str], object] | None) -> RunRecord:
    started = time.monotonic()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of intended settings
    return measure(_open_session(request), started, show)


def _open_session(request: EvalRequest) -> Session:
    """Return the session of a request that can be met; its weights are not read."""
    path = demo.resolve_model_path(request.model)
    config = read_config(path, gguf_file=request.gguf_file)
    check_request(request, path, config)
    tokenizer = read_tokenizer(path, gguf_file=request.gguf_file)
    tokenizer.model_max_length = 10**9  # lengths are checked here; it would warn of each prompt
    return Session(request, path, config, tokenizer)


def measure(session: Session, started: float, show: Callable[[str], object] | None) -> RunRecord:
    """Measure everything that a session is asked for, and write the report.

    Args:
        session: The session; its model is loaded here.
        started: When the run began, by `time.monotonic`.
        show: See `evaluate`.

    Returns:
        The results that the report shows.

    Raises:
        ValueError: See `evaluate`.
        OSError: See `evaluate`.
    """
    request = session.request
    if session.chat and request.retrieval:
        logger.info("questions stand in the tokenizer's chat template (--chat-template off)")
    documents, questions = PerplexityRun(session), RetrievalRun(session)
    others = _OtherMeasures(session)
    session.check_tasks(others.external_tasks)
    with session.run_folder.locked(session.processes):
        if session.processes.is_main:
            log_plan(request, questions.planned(), session.trained_length)
        session.load()
        # A run that goes on may have everything: it reads nothing again, not even to be timed.
        is_new = session.processes.is_main and not session.continued
        if is_new and isinstance(session.model, nn.Module):
            expected = try_plan(lambda: _plan(session, questions, others))
            if expected is not None:
                takes = format_duration(expected.seconds)
                logger.info("plan: takes about %s on this machine", takes)
        return _measure_all(session, documents, questions, others, started, show)


def _measure_all(
    session: Session,
    documents: PerplexityRun,
    questions: RetrievalRun,
    others: _OtherMeasures,
    started: float,
    show: Callable[[str], object] | None,
) -> RunRecord:
    """Measure everything that is asked for, and write the report; return its results."""
    from rope_patch.evaluation.report.writer import with_conclusions, write_report

    request = session.request
    documents.measure_plain()
    questions.measure_plain()
    start = time.monotonic()
    for number, method in enumerate(request.methods, start=1):
        with session.patched(method) as label:
            place = f"{label} ({number} of {len(request.methods)})"
            documents.measure(label)
            questions.measure(label, place)
            others.measure(label, place)
        _log_progress(number, len(request.methods), time.monotonic() - start)
    questions.measure_more()
    others.measure_speed()

    results: RunRecord = {
        "run": _run_metadata(session, time.monotonic() - started),
        "methods": list(session.methods.values()),
        "perplexity": documents.results(),
        "retrieval": [*questions.results(), *others.external_results.retrieval()],
        "control": questions.controls,
        **others.results(),
    }
    results["run"]["looks"] = questions.looks
    results["run"]["cautions"] = cautions(results, [d.tokens for d in documents.documents])
    if session.processes.is_main:
        results = with_conclusions(results)
        overview: list[str] = []
        write_report(results, request.folder, overview.append)
        _warn_failures(results)
        if show is not None:
            show(*overview)
    return results


class _OtherMeasures:
    """Ordinary short tasks, lm-eval's own tasks, speed and memory."""

    def __init__(self, session: Session) -> None:
        from lm_eval.api.task import ConfigurableTask

        self.session = session
        request = session.request
        self.short_tasks = {}
        for name in request.short:
            config = short.config(name)
            config["metadata"] |= {"samples": request.short_samples, "seed": request.seed}
            self.short_tasks[name] = ConfigurableTask(config=config)
        self.external_tasks = external_tasks.load(
            request.harness, list(request.lengths), session.path, request.include_paths
        )
        self.short_scores: dict[str, dict[str, list[int | None]]] = {}
        self.external_results = ExternalResults()
        self.cost: dict[str, CostRecord] = {}

    def measure(self, label: str, place: str) -> None:
        """Measure short tasks and lm-eval's under the model's present method."""
        session = self.session
        for name, task in self.short_tasks.items():
            with session.timer("short tasks"), session.language_model(f"{place}, {name}") as lm:
                hits = lm_eval_tasks.choice_hits(lm_eval_tasks.evaluate(lm, [task]), lm.failures)
            self.short_scores.setdefault(name, {})[label] = hits
            self._note_failures(f"{name}'s samples", label, lm.failures, session.failed)
        for task in self.external_tasks:
            # A model for each task, since failures are known by a task's name without its length.
            with (
                session.timer("lm-eval"),
                session.language_model(f"{place}, {task.label}", _UNLIMITED) as lm,
            ):
                lm.rolling_window = max(session.request.lengths)
                measure = partial(
                    external_tasks.evaluate,
                    lm,
                    task,
                    session.request.samples,
                    chat=session.chat and session.request.chat_template == "on",
                )
                result = session.try_measure(f"{task.label}, {label}", measure)
            if result is not None:
                self.external_results.add(task, label, result)
                # A metric without scores of samples counts those that failed as wrong.
                counted = all(_any_score(m.get("scores")) for m in result.metrics.values())
                if not (result.samples and counted):  # these samples carry their errors
                    notes = session.failed if counted else session.not_run
                    self._note_failures(f"{task.label}'s samples", label, lm.failures, notes)

    def measure_speed(self) -> None:
        """Measure times and memory in the main process alone, since others would slow it down."""
        session, request = self.session, self.session.request
        if SPEED in request.tasks and session.processes.is_main:
            patches = {
                label: None if method == BASELINE else request.extension(method)
                for label, method in zip(session.methods, request.methods, strict=True)
            }
            with session.timer(SPEED):
                prompt = min(_SPEED_PROMPT, request.longest)
                measure = partial(speed.compare_methods, session.model, patches, prompt)
                self.cost = session.try_measure(SPEED, measure) or {}
        session.processes.wait()

    def _note_failures(
        self, of: str, label: str, failures: dict[Any, str], notes: list[str]
    ) -> None:
        if failures:
            reason = next(iter(failures.values()))
            notes.append(f"{len(failures)} of {of}, {label}: {reason}")

    def results(self) -> OtherRecords:
        """Return the parts `short`, `cost` and `harness` of the results."""
        return {
            "short": [
                {
                    "task": name,
                    "n": max(map(len, by_label.values())),
                    "chance": short.config(name)["metadata"]["chance"],
                    "samples": by_label,
                }
                for name, by_label in self.short_scores.items()
            ],
            "cost": self.cost,
            "harness": self.external_results.harness(),
        }


def _run_metadata(session: Session, total: float) -> RunMetadata:
    """Return the part `run` of the results: where and how the evaluation ran."""
    request = session.request
    return {
        "model": request.model,
        **session.model_facts(),
        "trained_length": session.trained_length,
        "geometry": {
            kind or "all": {
                "head_dim": g.head_dim,
                "rotary_dim": g.rotary_dim,
                "theta": g.theta,
                "trained_length": g.trained_length,
            }
            for kind, g in session.geometries.items()
        },
        "seed": request.seed,
        "precision": request.precision,
        "per_text": request.per_text,
        "chat_template": chat_template.fingerprint(session.tokenizer) if session.chat else None,
        "processes": session.processes.size,
        "date": provenance.now(),
        "seconds": {**session.seconds, "total": total + session.earlier_seconds},
        "stored_seconds": session.stored_seconds,
        "continued": session.continued,
        "untimed_answers": session.answers.untimed,
        "prompt_tokens": session.tokens,
        "weights": session.weights,
        **session.code,
        "versions": provenance.versions(),
        "git_revision": provenance.git_revision(),
        "command": request.command,
        "not_run": session.not_run,
        "failed": session.failed,
    }


def _any_score(scores: Sequence[float | None] | None) -> bool:
    return any(score is not None for score in scores or ())


def _log_progress(done: int, of: int, seconds: float) -> None:
    if done < of:
        left = seconds / done * (of - done) / 60
        text = f"about {left:,.0f} min" if left > 1 else "less than a minute"
        logger.info("%d of %d methods done, %s left", done, of, text)


def _warn_failures(results: RunRecord) -> None:
    """Log failures; raise if nothing could be measured."""
    rows = [
        row
        for entry in results["retrieval"]
        for samples in entry["samples"].values()
        for row in samples
    ]
    failed = [row["error"] for row in rows if row["score"] is None]
    notes = results["run"]["not_run"]
    for caution in results["run"]["cautions"]:
        logger.warning("caution: %s", caution)
    if failed and len(failed) == len(rows):
        raise ValueError(f"not one of {len(rows)} samples could be answered: {failed[0]}")
    reasons = [*notes, *results["run"]["failed"]]
    if reasons and not rows and not _has_results(results):
        raise ValueError(f"nothing could be measured: {reasons[0]}")
    if missing := find_gaps(results):
        logger.error(gap_sentence(missing))
    if failed:
        logger.warning(
            "%d of %d samples failed (%s); the report lists them, and the same command tries them "
            "again",
            len(failed),
            len(rows),
            failed[0],
        )
    for note in notes:
        logger.warning("not run: %s", note)
    for note in results["run"]["failed"]:
        logger.warning("failed: %s", note)


def _has_results(results: RunRecord) -> bool:
    """Return whether there is any result besides retrieval."""
    long = results["perplexity"]
    parts = (long, long["key_tokens"], long["sliding"]) if long else ()
    short = [
        s for entry in results["short"] for scores in entry["samples"].values() for s in scores
    ]
    has_any = any(part and part["losses"] for part in parts) or any(s is not None for s in short)
    return bool(has_any or results["cost"] or results["harness"])
