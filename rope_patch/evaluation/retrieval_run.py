"""Questions on long prompts: retrieval tasks, their controls, more samples where they are few."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence
from typing import Any

from rope_patch import statistics
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.evaluation.results_schema import (
    UNREAD,
    ControlKind,
    PerplexityRecord,
    QuestionControlRecord,
    RetrievalRecord,
    RunRecord,
    SampleRecord,
    UnscoredSample,
)
from rope_patch.evaluation.session import Session
from rope_patch.tasks.samples import TooShort
from rope_patch.utils import atomic_files

logger = logging.getLogger("rope_patch")

# Samples and texts without their answer, whose mean likelihood is the floor of the verdict.
_CONTROL_SAMPLES, _CONTROL_TEXTS = 6, 4

# What builds the samples of a control, and what progress calls them.
_CONTROLS: dict[ControlKind, tuple[dict[str, bool], str]] = {
    "no answer": ({"planted": False}, "texts without their answers"),
    "closed book": ({"closed_book": True}, "questions without their texts"),
}


class RetrievalRun:
    """The retrieval samples of one evaluation, and their scores under each method.

    Args:
        session: The model; its weights need not be there yet.

    Attributes:
        looks: Samples of each task at the longest length, at each look of `until_decided`.

    Raises:
        ValueError: Samples that cannot be built, or no length at which a verdict is possible.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        request = session.request
        self.task_names = request.retrieval
        self.looks: list[int] = []
        self.longest = max(request.lengths)
        if request.until_decided and self.longest <= session.trained_length:
            raise ValueError(
                "until_decided asks what a method gains beyond the trained "
                f"{session.trained_length:,} tokens: expected a longer one among --lengths, got "
                f"{', '.join(map(str, request.lengths))}"
            )
        first = request.first_samples
        at = [(name, length) for name in self.task_names for length in request.lengths]
        self.counts = dict.fromkeys(at, first)
        self.tasks = {(n, length): self._build(n, length, first) for n, length in at}
        self.scores: dict[str, dict[str, dict[int, list[SampleRecord]]]] = {}
        self.controls: list[QuestionControlRecord] = []

    def measure_plain(self) -> None:
        """Ask questions of texts without their answer, and of no text, at the shortest length."""
        request = self.session.request
        length, depths = min(request.lengths), list(request.depths)
        per_text = 1 if request.per_text is None else request.per_text
        few = max(_CONTROL_SAMPLES, _CONTROL_TEXTS * per_text)
        # Questions without a text are short: as many as the task asks at this length.
        counts: dict[ControlKind, int] = {"no answer": few}
        counts["closed book"] = max(few, request.first_samples)
        built: dict[str, dict[ControlKind, Any]] = {}
        for name in self.task_names if request.controls else []:
            try:
                built[name] = {
                    kind: self._build(name, length, count, **_CONTROLS[kind][0])
                    for kind, count in counts.items()
                }
            except ValueError as error:
                self.session.not_run.append(f"controls of {name}: {error}")
        for kind in counts if built else ():
            with self.session.timer("retrieval"):
                of_kind = [controls[kind] for controls in built.values()]
                scores = self._score_tasks(of_kind, _CONTROLS[kind][1])
            for name, rows in zip(built, scores, strict=True):
                record: RetrievalRecord = {
                    "task": name,
                    "lengths": [length],
                    "depths": depths,
                    "samples": {self.session.plain_label: rows},
                }
                self.controls.append({**record, "kind": kind})

    def measure(self, label: str, place: str) -> None:
        """Measure all samples under the model's present method."""
        for length in self.session.request.lengths:
            self._measure([(name, length) for name in self.task_names], label, place)

    def measure_more(self) -> None:
        """Measure more samples under every method until they are precise, or decide."""
        broadcast = self.session.processes.broadcast
        while imprecise := broadcast(self._imprecise()):
            self._measure_double(imprecise)
        if self.session.request.until_decided:
            while undecided := broadcast(self._undecided()):
                self._measure_double(undecided)
            # The main process alone has scores, and looked.
            self.looks = broadcast(self.looks)

    def planned(self) -> dict[tuple[str, int], list[UnscoredSample]]:
        """Return the samples that are to be measured, by task and length."""
        return {at: lm_eval_tasks.planned_samples(task) for at, task in self.tasks.items()}

    def results(self) -> list[RetrievalRecord]:
        """Return the part `retrieval` of the results."""
        request = self.session.request
        lengths, depths = list(request.lengths), list(request.depths)
        records: list[RetrievalRecord] = []
        for name, by_label in self.scores.items():
            samples = {
                label: [row for length in lengths for row in rows[length]]
                for label, rows in by_label.items()
            }
            records.append({"task": name, "lengths": lengths, "depths": depths, "samples": samples})
        return records

    def _measure_double(self, pairs: list[tuple[str, int]]) -> None:
        """Measure twice as many samples of tasks at lengths, under every method."""
        request = self.session.request
        for name, length in pairs:
            count = min(2 * self.counts[name, length], request.max_samples)
            self.counts[name, length] = count
            self.tasks[name, length] = self._build(name, length, count)
        for method in request.methods:
            with self.session.patched(method) as label:
                for length in request.lengths:
                    more = [at for at in pairs if at[1] == length]
                    self._measure(more, label, f"{label}, more samples")

    def _build(self, name: str, length: int, count: int, **control: bool) -> Any:
        request = self.session.request
        metadata = request.sample_options(chat=self.session.chat) | control
        tokenizer, depths = self.session.tokenizer, list(request.depths)
        try:
            return lm_eval_tasks.build(name, tokenizer, [length], count, depths, **metadata)[0]
        except TooShort as error:
            raise ValueError(
                f"{error}: give --lengths of at least {error.least} each, or other --tasks; "
                "rp_recall_ll asks for word pairs, which fit into a few dozen tokens"
            ) from error

    def _measure(self, pairs: list[tuple[str, int]], label: str, place: str) -> None:
        """Measure tasks at one length together, so that shared prefixes are read once."""
        if not pairs:
            return
        length = pairs[0][1]
        built = [self.tasks[at] for at in pairs]
        with self.session.timer("retrieval"):
            scores = self._score_tasks(built, f"{place}, {length:,} tokens", f"{label}-{length}")
        for (name, _), rows in zip(pairs, scores, strict=True):
            self.scores.setdefault(name, {}).setdefault(label, {})[length] = rows

    def _score_tasks(
        self, built: list[Any], place: str, name: str = ""
    ) -> list[list[SampleRecord]]:
        """Return every sample's score under the model's present method, task by task."""
        folder = self.session.request.folder / "lm_eval"
        # Without a name, lm-eval's own results are not written to a file.
        path = folder / f"{atomic_files.safe_filename(name)}.json" if name else None
        with self.session.language_model(place) as lm:
            results = lm_eval_tasks.evaluate(lm, built, path, chat=self.session.chat)
        samples = results.get("samples", {})
        each = [{"samples": {t.config.task: samples.get(t.config.task, [])}} for t in built]
        return [lm_eval_tasks.scores(one, lm.failures) for one in each]

    def _imprecise(self) -> list[tuple[str, int]]:
        """Return tasks and lengths whose interval is too wide under any of the methods."""
        precision, most = self.session.request.precision, self.session.request.max_samples
        if precision is None:
            return []
        return [
            (name, length)
            for (name, length), count in self.counts.items()
            if count < most
            and any(
                not _is_precise(rows.get(length) or [], precision)
                for rows in self.scores[name].values()
            )
        ]

    def _undecided(self) -> list[tuple[str, int]]:
        """Look at the verdict; return all tasks at the longest length if it needs more samples."""
        if not self.session.processes.is_main:
            return []
        count = self.counts[self.task_names[0], self.longest]
        looks = [*self.looks, count]
        results: Any = {
            "run": {"trained_length": self.session.trained_length, "looks": looks},
            "methods": list(self.session.methods.values()),
            "retrieval": self.results(),
        }
        stats = RunStatistics(results)
        # Where the texts are too few for any verdict, this is no look: it could not err.
        if stats.has_enough_texts:
            self.looks = looks
        if stats.is_decided or count >= self.session.request.max_samples:
            return []
        logger.info(
            "undecided by %d samples a task at %s tokens: measuring more",
            count,
            f"{self.longest:,}",
        )
        return [(name, self.longest) for name in self.task_names]


def _is_precise(rows: list[SampleRecord], precision: float) -> bool:
    scores = [row["score"] for row in rows]
    if all(score is None for score in scores):
        return True  # more of what fails would fail as well
    interval = statistics.accuracy(scores, [row["text"] for row in rows])
    return statistics.is_precise(interval, precision)


def cautions(results: RunRecord, documents: Sequence[Sequence[int]]) -> list[str]:
    """Return a sentence for each thing that the plain model does no better than chance.

    Args:
        results: The run's results; only `run`, `methods`, `perplexity` and `retrieval` are read.
        documents: The documents' tokens, in the order of the control's losses.
    """
    trained = results["run"]["trained_length"]
    plain = {method["label"] for method in results["methods"] if method["method"] is None}
    return [
        sentence
        for sentence in (
            _reading_caution(results["perplexity"], documents),
            _answering_caution(results["retrieval"], trained, plain),
        )
        if sentence is not None
    ]


def _reading_caution(
    perplexity: PerplexityRecord | None, documents: Sequence[Sequence[int]]
) -> str | None:
    control = perplexity["control"] if perplexity else None
    if not control:
        return None
    losses = [float(loss) for by_end in control["losses"] for loss in by_end.values()]
    frequencies = math.fsum(unigram_entropy(tokens) for tokens in documents) / len(documents)
    mean = math.fsum(losses) / len(losses)
    if mean < frequencies:
        return None
    return (
        f"{UNREAD}: with "
        f"{control['context']:,} tokens of context a token costs it {mean:.2f} nats, and "
        f"{frequencies:.2f} by how frequent each token is; differences of perplexity between "
        "methods mean nothing"
    )


def _answering_caution(
    retrieval: Sequence[RetrievalRecord], trained: int, plain: set[str]
) -> str | None:
    scores = [
        (score, row.get("chance", 0.0))
        for entry in retrieval
        for label, samples in entry["samples"].items()
        if label in plain
        for row in samples
        if row["length"] <= trained and (score := row["score"]) is not None
    ]
    right = math.fsum(score for score, _ in scores)
    if not scores or right > math.fsum(chance for _, chance in scores):
        return None
    return (
        f"the model answers no better than chance within its trained length of {trained:,} tokens: "
        f"{right:g} of {len(scores)} right; a longer context cannot show in these questions, ask "
        "easier ones (--tasks rp_recall_ll)"
    )


def unigram_entropy(tokens: Sequence[int]) -> float:
    """Return what a token costs in nats, given only how frequent each is among these."""
    counts, total = collections.Counter(tokens).values(), len(tokens)
    return -math.fsum(count / total * math.log(count / total) for count in counts)
