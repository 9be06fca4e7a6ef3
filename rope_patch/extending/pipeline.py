"""The pipeline of an extension: diagnose, recommend, train, compare, publish, within a budget.

Each step writes its result into the work folder before the next one begins, so the same call
continues an extension that was killed, and gives the same result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rope_patch.diagnosing import diagnose
from rope_patch.diagnosing.encoding_diagnosis import EncodingDiagnosis
from rope_patch.evaluation.decision_plan import PassTime, RunPlan, effect_sentence
from rope_patch.evaluation.encoding_facts import model_lengths
from rope_patch.evaluation.report.model_index import evaluations
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.extending import fine_tuning, proof, publication
from rope_patch.extending.progress_page import ProgressPage
from rope_patch.extending.proof import Candidate, compared_candidates, trained_candidate
from rope_patch.extending.request import (
    NOT_SHOWN,
    PUBLISHED,
    Extended,
    ExtendRequest,
    target_length,
)
from rope_patch.extending.work_folder import WORK, WorkFolder
from rope_patch.extension import require_near
from rope_patch.inference.samples import needles_refusal
from rope_patch.patching.length_warning import silence_length_warnings
from rope_patch.pretrained import demo
from rope_patch.pretrained.gguf import split_gguf
from rope_patch.pretrained.loading import read_config, read_tokenizer
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.recommending import recommend
from rope_patch.recommending.budget import BudgetTooSmall
from rope_patch.recommending.result import JSON_FILE, MARKDOWN_FILE, Recommendation
from rope_patch.searching.model import open_model
from rope_patch.statistics import SIGNIFICANCE_LEVEL, least_texts
from rope_patch.transformers_api.remote_code import takes_remote_code
from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused, one_line
from rope_patch.utils.processes import Processes, free_memory
from rope_patch.utils.terminal import format_duration

logger = logging.getLogger("rope_patch")

DIAGNOSE, RECOMMEND, TRAIN, COMPARE, PUBLISH = (
    "diagnose",
    "recommend",
    "train",
    "compare",
    "publish",
)
STEPS = (DIAGNOSE, RECOMMEND, TRAIN, COMPARE, PUBLISH)
# Results that a step stores on its way: what fits into its time.
TRAINING_PLAN, SAMPLE_PLAN = "training-plan", "sample-plan"
_WEIGHTS = {DIAGNOSE: 0.02, RECOMMEND: 0.5, COMPARE: 0.45, PUBLISH: 0.03}
_TRAINING_WEIGHTS = {DIAGNOSE: 0.02, RECOMMEND: 0.2, TRAIN: 0.53, COMPARE: 0.22, PUBLISH: 0.03}


@takes_remote_code
def run(request: ExtendRequest) -> Extended:
    """Extend a checkpoint; see `rope_patch.extend`.

    Args:
        request: What to extend.

    Raises:
        ValueError: See `rope_patch.extend`.
        OSError: See `rope_patch.extend`.
    """
    processes = Processes()
    if processes.size > 1:
        raise Refused(
            f"extend runs in one process, got {processes.size}: start it without accelerate "
            "launch; recommend, finetune and compare share their work over processes"
        )
    trained, length = _check(request)
    atomic_files.require_writable_folder(request.out, "the extension")
    work = WorkFolder(request.out)
    work.require_same_request(request.identity())
    with work.run_folder.locked(processes), silence_length_warnings():
        return _Extension(request, work, trained, length).run()


@takes_remote_code
def plan(request: ExtendRequest) -> RunPlan:
    """Return what an extension would measure within its budget, and what that can decide.

    Reads the model, times one short pass, and writes nothing.

    Args:
        request: What to extend.

    Raises:
        ValueError: See `rope_patch.extend`.
    """
    trained, length = _check(request)
    weights = _TRAINING_WEIGHTS if request.train else _WEIGHTS
    share = {step: request.budget * part for step, part in weights.items()}
    choice = recommend(
        request.model,
        plan=True,
        **_recommendation_options(request, trained, length, share[RECOMMEND]),
    )
    assert isinstance(choice, RunPlan)
    where = {"dtype": request.dtype, "device_map": request.device_map}
    source = open_model(request.model, None, Processes(alone=True), **where)
    times = PassTime(source.load(), length)
    methods = (2 if request.engines else 3) + request.train
    seconds = methods * (times.seconds(length) + times.seconds(trained))
    texts = max(1, min(request.samples, int(share[COMPARE] / seconds)))
    least = least_texts(SIGNIFICANCE_LEVEL / (methods - 1))
    missing = choice.missing
    decides: tuple[str, ...] = ()
    if texts >= least:
        decides = (effect_sentence(texts, methods - 1, length),)
    elif not missing:
        needed = request.budget * least * seconds / share[COMPARE]
        missing = (
            f"the comparison has {texts} texts, {least} decide; it takes about "
            f"{format_duration(needed)}"
        )
    training = [f"training for up to {format_duration(share.get(TRAIN, 0.0))}"] * request.train
    comparison = f"a comparison on about {texts} texts of {trained:,} and {length:,} tokens"
    return RunPlan(
        measures=(*choice.measures, *training, comparison),
        seconds=choice.seconds + texts * seconds + share.get(TRAIN, 0.0),
        budget=request.budget,
        decides=decides,
        missing=missing,
    )


def _recommendation_options(
    request: ExtendRequest, trained: int, length: int, seconds: float
) -> dict[str, Any]:
    """Return what the recommendation is asked for."""
    texts: tuple[str, ...] | None = fine_tuning.measured_texts(request) or None
    tokenizer = read_tokenizer(demo.resolve_model_path(request.model))
    if texts and not request.texts and needles_refusal(tokenizer, trained):
        texts = None  # word pairs need no text
    return {
        "length": length,
        "budget": seconds / 60,
        "text": texts,
        "most": request.samples,
        "search": request.search,
        "trained_length": request.trained_length,
        "start": request.start,
        "anyway": request.anyway,
        "engines": request.engines,
        "seed": request.seed,
        "dtype": request.dtype,
        "device_map": request.device_map,
        "trust_remote_code": request.trust_remote_code,
        "command": request.command,
    }


def _check(request: ExtendRequest) -> tuple[int, int]:
    """Return the trained and the target length; raise if the request cannot be met."""
    path = demo.resolve_model_path(request.model)
    if split_gguf(path)[1] is not None:
        raise Refused(
            f"extend publishes a folder of safetensors, got the GGUF file {path}: see what helps "
            "with `rope-patch recommend`, and write the file with `rope-patch patch "
            f"{path} --method METHOD --to NEW.gguf`"
        )
    config = read_config(path)
    if not getattr(config.get_text_config(decoder=True), "rope_parameters", None):
        raise Refused(
            f"{request.model} ({config.model_type}) does not rotate, and extend compares "
            "rotations: use rope-patch patch and compare"
        )
    if patch_to_restore(path) is not None:
        raise Refused(
            f"{request.model} was saved with a patch by rope_patch: extend the model that it was "
            "made from"
        )
    _, trained = model_lengths(path, config, request.trained_length, request.start)
    length = target_length(request.to, trained)
    require_near(length, trained, request.anyway)
    fine_tuning.require_recipe(request)
    if request.engines:
        publication.require_servable_method(request, length)
    if request.engines and (method := request.recipe.get("method")):
        candidate = Candidate(method)
        if reasons := publication.serving_refusals(request, candidate, length):
            raise Refused(f"recipe: {method} cannot be published for {'; '.join(reasons.values())}")
    return trained, length


class _Extension:
    """The steps of one extension."""

    def __init__(self, request: ExtendRequest, work: WorkFolder, trained: int, length: int) -> None:
        self.request, self.work = request, work
        self.trained, self.length = trained, length  # in tokens
        weights = _TRAINING_WEIGHTS if request.train else _WEIGHTS
        self.clock = work.run_folder.clock(request.budget, weights)
        self.steps = [step for step in STEPS if step in weights]
        title = f"{one_line(Path(request.model).name)}, {trained:,} → {length:,} tokens"
        self.page = ProgressPage(request.out, title, self.steps, self.clock, request.command)
        self.left_out: list[str] = []
        self._used = 0.0  # seconds that the steps before the present one needed

    def run(self) -> Extended:
        """Run all steps, or those that are missing."""
        try:
            return self._run()
        except BaseException as error:
            self.page.fail(one_line(str(error)) or type(error).__name__)
            raise

    def _run(self) -> Extended:
        self._step(DIAGNOSE, self._diagnose)
        recommendation = self._step(RECOMMEND, self._recommend)["recommendation"]
        self._leave_out(recommendation["not_measured"])
        if elsewhere := recommendation.get("elsewhere"):  # runs of earlier releases have none
            self._leave_out([elsewhere])
        outcome, method = recommendation["outcome"], recommendation["method"]
        nothing_to_gain = outcome == "cannot answer" or (outcome == "use" and method == "plain")
        if nothing_to_gain or (outcome != "use" and not self.request.train):
            return self._finish(NOT_SHOWN, recommendation["verdict"])
        training: dict[str, Any] | None = None
        if self.request.train:
            training = self._step(TRAIN, lambda seconds: self._train(recommendation, seconds))
            if reason := training.get("left_out"):
                self._leave_out([reason])
                training = None
        if outcome != "use" and training is None:
            return self._finish(NOT_SHOWN, recommendation["verdict"])
        comparison = self._step(
            COMPARE, lambda seconds: self._compare(recommendation, training, seconds)
        )
        self._leave_out(comparison["left_out"])
        self.page.add_link(f"{WORK}/report/report.html", "the comparison")
        if comparison["label"] is None:
            return self._finish(NOT_SHOWN, comparison["sentence"], compared=True)
        self._step(PUBLISH, lambda _: self._publish(recommendation, training, comparison))
        self.page.add_link(f"{publication.MODEL}/README.md", "the card of the published model")
        return self._finish(
            PUBLISHED, comparison["sentence"], method=comparison["label"], compared=True
        )

    def _step(self, step: str, make: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
        """Return a step's stored result; without one run the step and store its result."""
        stored = self.work.read(step)
        if stored is None:
            seconds, before = self.clock.allot(step, self._used), self.clock.spent(step)
            self.page.begin(step, seconds)
            with self.clock.running(step, self.page.refresh):
                result = make(seconds)
            free_memory()  # the next step loads a model of its own
            spent = self.clock.spent(step)
            # A step that continues says itself what it needs in all; others begin anew.
            used = result.pop("used", spent - before)
            stored = self.work.write(step, result, spent, used)
        self._used += stored.get("used", stored["seconds"])  # earlier versions wrote no "used"
        result = stored["result"]
        self.page.end(step, result["text"], left_out="left_out_step" in result)
        return result

    def _part(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a stored plan within a step with its seconds; without one make and store it."""
        stored = self.work.read(name)
        if stored is None:
            started = time.monotonic()
            plan = make()
            seconds = time.monotonic() - started
            stored = self.work.write(name, plan, seconds, seconds)
        return {**stored["result"], "seconds": stored["seconds"]}

    def _diagnose(self, _: float) -> dict[str, Any]:
        diagnosis = diagnose(
            self.request.model,
            length=self.length,
            trained_length=self.request.trained_length,
            start=self.request.start,
            anyway=self.request.anyway,
        )
        assert not isinstance(diagnosis, EncodingDiagnosis)  # `_check` refuses those
        atomic_files.atomic_write(self.work.path / "diagnosis.txt", f"{diagnosis}\n")
        findings = [f"{each.severity}: {each.what}" for each in diagnosis.findings]
        return {
            "text": "; ".join([f"from the config alone: {diagnosis.advice.summary}", *findings]),
            "findings": findings,
            "healthy": diagnosis.healthy,
        }

    def _recommend(self, seconds: float) -> dict[str, Any]:
        request = self.request
        try:
            recommendation = recommend(
                request.model,
                folder=self.work.path / RECOMMEND,
                **_recommendation_options(request, self.trained, self.length, seconds),
            )
        except BudgetTooSmall as error:
            share = seconds / request.budget
            needed = format_duration(1.1 * 60 * error.minutes / share)
            raise BudgetTooSmall(
                f"budget must be larger, got {format_duration(request.budget)}, of which the "
                f"recommendation has {format_duration(seconds)}: expected about {needed} or more "
                f"({error})",
                error.minutes,
            ) from error
        assert isinstance(recommendation, Recommendation)  # it was asked for no plan
        return {
            "text": recommendation.verdict,
            "recommendation": recommendation.to_dict(),
            "used": recommendation.seconds,
        }

    def _train(self, recommendation: dict[str, Any], seconds: float) -> dict[str, Any]:
        candidate = trained_candidate(
            recommendation,
            lambda each: not publication.serving_refusals(self.request, each, self.length),
        )
        if candidate is None and "method" not in self.request.recipe:
            return _left_out("training: no method with one set of frequencies was measured")
        candidate = candidate or Candidate(self.request.recipe["method"])

        def make_plan() -> dict[str, Any]:
            return fine_tuning.plan_training(
                self.request, candidate, self.length, self.work.path / "timing", seconds
            )

        training_plan = self._part(TRAINING_PLAN, make_plan)
        used = training_plan["seconds"]
        if reason := training_plan.get("left_out"):
            return _left_out(reason) | {"used": used}
        used += training_plan["steps"] * training_plan["step_seconds"]
        done = fine_tuning.train(
            self.request, candidate, self.length, self.work.path / "training", training_plan
        )
        if reason := done.get("left_out"):
            return _left_out(reason) | {"used": used}
        first, last = done["losses"]
        text = (
            f"{done['label']}: {done['mode']}, {done['steps']:,} steps of "
            f"{training_plan['step_seconds']:.3g} s, loss {first:.4f} to {last:.4f}"
        )
        return {"text": text, **done, "used": used}

    def _compare(
        self,
        recommendation: dict[str, Any],
        training: dict[str, Any] | None,
        seconds: float,
    ) -> dict[str, Any]:
        pilot = proof.base_request(
            self.request,
            compared_candidates(recommendation),
            self.trained,
            self.length,
            fine_tuning.measured_texts(self.request),
            self.work.path / COMPARE,
        )
        samples = self._part(
            SAMPLE_PLAN,
            lambda: proof.plan_samples(pilot, seconds, self.request.samples, training is not None),
        )
        tuned_label = None if training is None else f"{training['label']}, fine-tuned"
        tuned = None
        if training is not None and tuned_label is not None:
            tuned = (self.work.path / "training" / training["folder"], tuned_label)
        results = proof.measure(pilot, samples, tuned, self.work.path / publication.REPORT)
        if results["run"]["weights"] != recommendation["weights"]:
            raise Refused(
                f"the weights of {self.request.model} changed since the recommendation: expected "
                f"{recommendation['weights']}, got {results['run']['weights']}; give another --out"
            )
        methods = [method["label"] for method in results["methods"]]
        # The plain model's label is the first one.
        named = zip(methods[1:], compared_candidates(recommendation), strict=False)
        unserved = [label for label, candidate in named if candidate.runs_nowhere]
        decision = proof.decide(results, self.length, tuned_label, unserved)
        sentence = " ".join(decision.sentences)
        if decision.label is None:
            sentence = (
                f"No method is shown to help at {self.length:,} tokens, so nothing is written to "
                f"publish. {sentence}"
            )
        else:
            sentence = f"Use {decision.label} at {self.length:,} tokens. {sentence}"
        failed = [*results["run"]["not_run"], *results["run"].get("failed", [])]
        return {
            "text": sentence,
            "sentence": sentence,
            "sentences": list(decision.sentences),
            "label": decision.label,
            "tuned": decision.label is not None and decision.label == tuned_label,
            "number": None if decision.label is None else methods.index(decision.label) - 1,
            "samples": samples["samples"],
            "left_out": [
                *samples["left_out"],
                *failed,
                *(f"caution: {each}" for each in results["run"].get("cautions", [])),
                proof.NOT_COMPARED,
            ],
        }

    def _publish(
        self,
        recommendation: dict[str, Any],
        training: dict[str, Any] | None,
        comparison: dict[str, Any],
    ) -> dict[str, Any]:
        report = self.work.path / publication.REPORT
        for name in (MARKDOWN_FILE, JSON_FILE):
            content = (self.work.path / RECOMMEND / name).read_bytes()
            atomic_files.atomic_write(report / name, content)
        atomic_files.atomic_write(
            report / "diagnosis.txt", (self.work.path / "diagnosis.txt").read_bytes()
        )
        results = proof.read_results(report)
        table, lines = proof.evidence_table(results)
        chosen: Candidate | Path
        if comparison["tuned"]:
            assert training is not None
            chosen = self.work.path / "training" / training["folder"]
        else:
            chosen = compared_candidates(recommendation)[comparison["number"]]
        folder = publication.publish(
            self.request,
            chosen,
            self.length,
            report,
            {
                "model": self.request.model,
                "method": comparison["label"],
                "trained_length": self.trained,
                "length": self.length,
                "sentences": comparison["sentences"],
                "usable": proof.usable_text(results, comparison["label"]),
                "evaluations": evaluations(RunStatistics(results), comparison["label"]),
                "table": table,
                "lines": lines,
                "left_out": self.left_out,
                "training": training if comparison["tuned"] else None,
                "samples": (comparison["samples"], comparison["samples"] // proof.PER_TEXT),
                "command": self.request.command,
            },
        )
        return {"text": f"written to {folder}"}

    def _leave_out(self, lines: Sequence[str]) -> None:
        self.left_out += [line for line in lines if line not in self.left_out]
        self.page.add_left_out(self.left_out)

    def _finish(
        self, outcome: str, sentence: str, *, method: str | None = None, compared: bool = False
    ) -> Extended:
        if (over := self.clock.spent() - self.request.budget) > 1:
            self._leave_out([f"the budget was overrun by {format_duration(over)}"])
        self.page.finish(sentence)
        out = self.request.out
        folder = out / publication.MODEL if outcome == PUBLISHED else None
        engines = self.request.engines if folder is not None else ()
        return Extended(
            outcome=outcome,
            sentence=sentence,
            model=self.request.model,
            trained_length=self.trained,
            length=self.length,
            method=method,
            folder=folder,
            report=self.work.path / publication.REPORT / "report.html" if compared else None,
            page=self.page.path,
            left_out=tuple(self.left_out),
            seconds=self.clock.spent(),
            exports={
                engine: out / publication.MODEL / publication.EXPORTS / f"{engine}.json"
                for engine in engines
            },
        )


def _left_out(reason: str) -> dict[str, Any]:
    return {"text": reason, "left_out": reason, "left_out_step": True}
