"""RetrievalStatistics: accuracy, retention and tests between methods, from samples' scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rope_patch import statistics
from rope_patch.evaluation.report.table import COLOURS, PLAIN, one_line
from rope_patch.evaluation.request import SERVED
from rope_patch.evaluation.results_schema import (
    ControlKind,
    QuestionControlRecord,
    RunMetadata,
    RunRecord,
    SampleRecord,
    ServerRecord,
    UnscoredSample,
    UsableRecord,
)
from rope_patch.statistics import Interval, PairedTest, UsableLength
from rope_patch.tasks import CHOICE, LIKELIHOOD, groups, question_of, text_of

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[Any, _P], _Result]
Bounds = Callable[[float, float, float], Interval]  # of a share: hits, samples, confidence


def cached_method(method: _Method[_P, _Result]) -> _Method[_P, _Result]:
    """Compute a method's result once for each object and arguments: bootstraps are slow.

    Results are forgotten with their object; `functools.cache` at a method would keep all objects.
    """
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def cached(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        results: dict[Hashable, _Result] = vars(self).setdefault(name, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return cached


class RunResults:
    """One run's results.

    Attributes:
        results: The run's results.
        run: Where and how it ran.
        labels: The methods' labels in order.
        plain: The label of the plain model; None if it did not run.
        plain_name: What the plain model is called: a server's model is as it was started.
        patched: The other labels.
        trained_length: The trained length in tokens.
    """

    def __init__(self, results: RunRecord) -> None:
        self.results = results
        self.run: RunMetadata = results["run"]
        self.trained_length = int(self.run["trained_length"])
        methods = results["methods"]
        self.labels: list[str] = [m["label"] for m in methods]
        plain = [m["label"] for m in methods if m.get("method") is None]
        self.plain: str | None = plain[0] if plain else None
        self.is_served = "server" in self.run
        self.plain_name = "plain model"
        if self.is_served:
            self.plain_name = "served model" if self.plain == SERVED else f"server {self.plain}"
        self.patched = [label for label in self.labels if label != self.plain]

    @cached_property
    def names(self) -> dict[str, str]:
        """Return how each label reads in a sentence."""
        return {
            label: self.plain_name
            if label == self.plain
            else f"{'server ' if label in self.servers else ''}{one_line(label)}"
            for label in self.labels
        }

    @property
    def servers(self) -> Mapping[str, ServerRecord]:
        """Return the servers by label; "" for the only one, none for models in this process."""
        several = self.run.get("servers")
        return several or ({"": self.run["server"]} if self.is_served else {})

    @cached_property
    def colour_names(self) -> dict[str, str]:
        """Return the colour's name of each label: `plain` without a method, else m0, m1, ..."""
        colours = {label: f"m{i % COLOURS}" for i, label in enumerate(self.patched)}
        return {label: colours.get(label, PLAIN) for label in self.labels}


THRESHOLD = statistics.USABLE_SHARE
RULER_THRESHOLD = 0.856  # RULER's: what Llama-2-7B reaches at 4,096 tokens
_RULER = {
    f"rp_{name}"
    for name in (
        *("niah_single_1", "niah_single_2", "niah_single_3"),
        *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )
}

RULER_TASKS = len(_RULER)


class ScoredSample(UnscoredSample):
    """A sample that did not fail.

    Attributes:
        task: The task's name.
        score: 0 to 1.
    """

    task: str
    score: float


@dataclass(frozen=True)
class TaskAccuracy:
    """A task at a length, under one method.

    Attributes:
        task: The task's name.
        length: Tokens.
        accuracy: The mean score.
        chance: What a guess gets; 0 where answers cannot be guessed.
        texts: The texts that the samples share.
    """

    task: str
    length: int
    accuracy: Interval
    chance: float
    texts: int

    def as_if(self, texts: int) -> TaskAccuracy:
        """Return the same accuracy on so many texts at least, with exact bounds."""
        if texts <= self.texts:
            return self
        accuracy = statistics.grown(self.accuracy, texts / self.texts)
        return replace(self, accuracy=accuracy, texts=texts)

    @property
    def above_chance(self) -> Interval:
        """Return the accuracy less what a guess gets."""
        return statistics.above_chance(self.accuracy, self.chance)


class RetrievalStatistics(RunResults):
    """Accuracies of one run.

    Attributes:
        tasks: Names of the tasks that have samples.
    """

    def __init__(self, results: RunRecord) -> None:
        super().__init__(results)
        self._tasks = {
            entry["task"]: entry
            for entry in results.get("retrieval") or []
            if any((entry.get("samples") or {}).values())
        }
        self.tasks: list[str] = list(self._tasks)

    @cached_property
    def averaged_tasks(self) -> list[str]:
        """Return the tasks that means over tasks are made of, all scored in one way.

        A task and its twins ask the same questions: written answers are averaged where there are
        some, else likelihoods, else choices. Pooling them would count one question twice, and mix
        scores with and without chance.
        """
        twins = (LIKELIHOOD, CHOICE)
        written = [name for name in self.tasks if not name.endswith(twins)]
        by_suffix = ([name for name in self.tasks if name.endswith(suffix)] for suffix in twins)
        return written or next(filter(None, by_suffix), [])

    @cached_property
    def lengths(self) -> list[int]:
        """Return every length that some task was run at."""
        return sorted({int(n) for task in self._tasks.values() for n in task["lengths"]})

    def depths(self, task: str) -> list[int]:
        """Return a task's answer depths, in percent; none where answers are everywhere."""
        return sorted(
            {
                depth
                for samples in self._tasks[task]["samples"].values()
                for s in samples
                if (depth := s.get("depth")) is not None
            }
        )

    def samples(
        self,
        label: str,
        task: str | None = None,
        lengths: tuple[int, ...] | None = None,
        depth: int | None = None,
    ) -> list[ScoredSample]:
        """Return a method's scored samples, of one task or all, at some lengths or all."""
        return [
            sample
            for name in (self.tasks if task is None else [task])
            for sample in scored_samples(name, self._tasks[name]["samples"].get(label) or [])
            if lengths is None or sample["length"] in lengths
            if depth in (None, sample.get("depth"))
        ]

    @cached_method
    def accuracy(
        self,
        label: str,
        task: str | None = None,
        lengths: tuple[int, ...] | None = None,
        depth: int | None = None,
    ) -> Interval | None:
        """Return the mean score, each task at each length counting the same.

        Samples of one text are a cluster. Over all tasks it is the mean of those in
        `averaged_tasks`, however many samples each has. None without samples.
        """
        cells = self._cells(label, task, lengths, depth)
        return statistics.stratified_mean([c.accuracy for c in cells]) if cells else None

    def _cells(
        self,
        label: str,
        task: str | None = None,
        lengths: tuple[int, ...] | None = None,
        depth: int | None = None,
        bounds: Bounds = statistics.wilson,
    ) -> list[TaskAccuracy]:
        """Return the measured tasks at their lengths, each with its accuracy."""
        return [
            cell
            for name in (self.averaged_tasks if task is None else [task])
            for cell in _cells_by_length(name, self.samples(label, name, lengths, depth), bounds)
        ]

    @cached_method
    def _exact_cells(self, label: str, length: int) -> list[TaskAccuracy]:
        """Return the averaged tasks at one length, with exact bounds of accuracy."""
        return self._cells(label, lengths=(length,), bounds=statistics.clopper_pearson)

    @cached_property
    def lengths_within_training(self) -> tuple[int, ...]:
        """Return the lengths up to the trained one."""
        return tuple(length for length in self.lengths if length <= self.trained_length)

    @cached_property
    def lengths_beyond_training(self) -> tuple[int, ...]:
        """Return the lengths beyond the trained one."""
        return tuple(length for length in self.lengths if length > self.trained_length)

    @cached_property
    def families(self) -> dict[str, list[str]]:
        """Return the averaged tasks of each group of tasks that has some, by the group's name."""
        families = {}
        for group, members in groups().items():
            questions = {question_of(task) for task in members}
            of = [task for task in self.averaged_tasks if question_of(task) in questions]
            # Groups of twins ask what other groups ask.
            if of and not all(task.endswith((LIKELIHOOD, CHOICE)) for task in members):
                families[group] = of
        return families

    @cached_property
    def reference_length(self) -> int | None:
        """Return the shortest length, where the plain model's score is what is to be kept.

        None if the plain model was not measured within its trained length.
        """
        within = self.lengths_within_training if self.plain is not None else ()
        return next((n for n in within if self._cells(self.plain or "", lengths=(n,))), None)

    @cached_method
    def retention(
        self, label: str, length: int, family: str | None = None, texts: int = 0
    ) -> Interval | None:
        """Return accuracy at a length over the plain model's at the shortest one.

        Of both, what a guess gets is taken off, task by task; the tasks are those that both were
        measured on. The bounds are exact, where Wilson's would call a length usable or lost too
        often; all is kept where the plain model is compared with itself. None where one of them
        was not measured, or the plain model is not surely better than guessing.

        Args:
            label: The method.
            length: Tokens.
            family: One of `families`; all averaged tasks if None.
            texts: As if each task had so many texts at least, with the same scores.
        """
        if self.reference_length is None or self.plain is None:
            return None
        at: list[dict[str, TaskAccuracy]] = []
        for method, tokens in ((label, length), (self.plain, self.reference_length)):
            of = self.averaged_tasks if family is None else self.families[family]
            cells = self._exact_cells(method, tokens)
            at.append({cell.task: cell.as_if(texts) for cell in cells if cell.task in of})
        shared = at[0].keys() & at[1].keys()
        if not shared:
            return None
        above, base_above = (
            statistics.stratified_mean([cells[task].above_chance for task in sorted(shared)])
            for cells in at
        )
        if not base_above.low > 0:
            return None
        if length == self.reference_length and self._answers_as_plain(label, length):
            return replace(base_above, estimate=1.0, low=1.0, high=1.0)
        return statistics.retention(above, base_above)

    def _answers_as_plain(self, label: str, length: int) -> bool:
        """Return whether a method leaves texts of a length as they are, bit for bit."""
        answers = [
            {
                (s["task"], s["id"]): (s["score"], s["log_likelihood"])
                for s in self.samples(each, lengths=(length,))
            }
            for each in (label, str(self.plain))
        ]
        has_all = all(nats is not None for _, nats in answers[0].values())
        return label == self.plain or (answers[0] == answers[1] and has_all)

    @cached_method
    def usable_length(self, label: str, family: str | None = None) -> UsableLength | None:
        """Return the longest length up to which a method keeps 85% of the short-context score.

        Args:
            label: The method.
            family: One of `families`; all averaged tasks if None.

        Returns:
            The length with its interval; None where nothing can be kept, see `nothing_to_keep`.
        """
        kept = {n: i for n in self.lengths if (i := self.retention(label, n, family)) is not None}
        if not kept:
            return None
        return statistics.name_texts_needed(
            statistics.usable_length(kept, THRESHOLD),
            THRESHOLD,
            lambda length, texts: self.retention(label, length, family, texts),
        )

    def usable_records(self) -> dict[str, dict[str, UsableRecord]]:
        """Return the usable lengths that are known, by method and group of tasks, as plain data."""
        families = {"all": None, **{name: name for name in self.families}}
        return {
            label: {
                name: {
                    "estimate": usable.estimate,
                    "low": usable.low,
                    "high": usable.high,
                    "lengths": list(usable.lengths),
                    "texts_needed": usable.texts_needed,
                }
                for name, family in families.items()
                if (usable := self.usable_length(label, family)) is not None
            }
            for label in self.labels
        }

    @property
    def nothing_to_keep(self) -> str:
        """Return why no method has a usable length."""
        if self.plain is None:
            return "no plain model to compare to"
        if not self.lengths_within_training:
            return "no length within the trained one was measured, to compare to"
        if self.reference_length is None:
            return "not measured"
        return (
            f"at {self.reference_length:,} tokens, the shortest measured, the {self.plain_name} is "
            "not surely better than guessing, so there is nothing to keep"
        )

    @cached_property
    def has_ruler(self) -> bool:
        """Return whether all of RULER's 13 tasks ran, with written answers as RULER scores them."""
        return set(self.tasks) >= _RULER

    def ruler_average(
        self, label: str, length: int, bounds: Bounds = statistics.wilson
    ) -> Interval | None:
        """Return the RULER-like mean of 13 tasks, which count the same; None if any is missing."""
        measured = sorted(_RULER & set(self.tasks))
        cells = [c for name in measured for c in self._cells(label, name, (length,), bounds=bounds)]
        if len(cells) < len(_RULER):
            return None
        return statistics.stratified_mean([c.accuracy for c in cells])

    def ruler_usable_length(self, label: str) -> UsableLength | None:
        """Return the usable length by RULER's threshold: a RULER-like mean of 85.6% at least."""
        averages = {
            length: average
            for length in self.lengths
            if (average := self.ruler_average(label, length, statistics.clopper_pearson))
        }
        return statistics.usable_length(averages, RULER_THRESHOLD) if averages else None

    def ruler_weighted_average(self, label: str, *, increasing: bool) -> float | None:
        """Return a mean weighted as in RULER: lengths weigh 1, 2, 3, ... or the reverse."""
        accuracies = [self.accuracy(label, lengths=(length,)) for length in self.lengths]
        if len(accuracies) < 2 or any(interval is None for interval in accuracies):
            return None
        weights = range(1, len(accuracies) + 1) if increasing else range(len(accuracies), 0, -1)
        return sum(
            w * i.estimate for w, i in zip(weights, accuracies, strict=True) if i is not None
        ) / sum(weights)

    def paired_scores(
        self,
        label: str,
        other: str,
        task: str | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[list[float], list[float], list[ScoredSample]]:
        """Return scores of the samples that both methods have, in one order, and these samples."""
        mine, theirs = (
            {
                (s["task"], s["id"]): s
                for name in (self.averaged_tasks if task is None else [task])
                for s in self.samples(method, name, lengths)
            }
            for method in (label, other)
        )
        shared = [key for key in mine if key in theirs]
        a = [mine[key]["score"] for key in shared]
        b = [theirs[key]["score"] for key in shared]
        return a, b, [mine[key] for key in shared]

    @cached_method
    def difference(
        self,
        label: str,
        other: str,
        task: str | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> PairedTest | None:
        """Return the difference of accuracy with its test; None without shared samples.

        Each task at each length counts the same, as in `accuracy`.
        """
        a, b, samples = self.paired_scores(label, other, task, lengths)
        if not a:
            return None
        strata = [(s["task"], s["length"]) for s in samples]
        return statistics.mcnemar(a, b, _clusters(samples), strata)

    def answer_nll(
        self,
        label: str,
        lengths: tuple[int, ...],
        task: str | None = None,
        depth: int | None = None,
    ) -> float | None:
        """Return nats per token of the right answers; None where they were not measured."""
        samples = self.samples(label, task, lengths, depth)
        measured = [
            (float(nats), s.get("target_tokens") or 0)
            for s in samples
            if (nats := s.get("log_likelihood")) is not None
        ]
        tokens = sum(count for _, count in measured)
        return -sum(nats for nats, _ in measured) / tokens if tokens else None

    @cached_property
    def failures(self) -> list[tuple[str, str, str, str]]:
        """Return the samples without a score: task, method, sample and the reason."""
        return [
            (name, label, str(sample.get("id", "")), str(sample.get("error") or "no score"))
            for name, entry in self._tasks.items()
            for label in self.labels
            for sample in entry["samples"].get(label) or []
            if _score(sample) is None
        ]

    def control_records(self, kind: ControlKind) -> list[QuestionControlRecord]:
        """Return the records of a control; older results have no kind, and "no answer" alone."""
        records = self.results.get("control") or []
        return [record for record in records if record.get("kind", "no answer") == kind]

    @cached_method
    def controls(self, kind: ControlKind) -> list[TaskAccuracy]:
        """Return the accuracy of each task's control."""
        return [
            cell
            for record in self.control_records(kind)
            for cell in _cells_by_length(
                record["task"],
                scored_samples(
                    record["task"], [s for of in record["samples"].values() for s in of]
                ),
            )
        ]


def _cells_by_length(
    task: str, samples: list[ScoredSample], bounds: Bounds = statistics.wilson
) -> Iterator[TaskAccuracy]:
    """Yield a task's accuracy at each of its lengths."""
    for length in sorted({s["length"] for s in samples}):
        here = [s for s in samples if s["length"] == length]
        chance = sum(s.get("chance") or 0.0 for s in here) / len(here)
        clusters = _clusters(here)
        accuracy = statistics.accuracy([s["score"] for s in here], clusters, bounds=bounds)
        yield TaskAccuracy(task, length, accuracy, chance, len(set(clusters)))


def scored_samples(task: str, samples: Sequence[SampleRecord]) -> list[ScoredSample]:
    """Return the samples that did not fail, with their task."""
    return [
        {**sample, "task": task, "score": score}
        for sample in samples
        if (score := _score(sample)) is not None
    ]


def _score(sample: SampleRecord) -> float | None:
    score = sample.get("score")
    return None if score is None or sample.get("error") else float(score)


def _clusters(samples: list[ScoredSample]) -> list[int]:
    """Return numbers that samples of the same text share, also across tasks that ask about it."""
    texts = [(text_of(s["task"]), s["length"], s.get("text", s["id"])) for s in samples]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return [number[text] for text in texts]


K = TypeVar("K")


class ComparisonStatistics(RetrievalStatistics):
    """Tests between the methods of one run.

    A family of tests is all methods at one length, by one measure. Single tasks and shorter lengths
    are not tested, or some of so many cells would seem significant by chance.
    """

    def accuracy_comparisons(
        self, length: int | None = None
    ) -> dict[str, tuple[PairedTest, float]]:
        """Return each method's difference from the plain model, and its p after Holm.

        Of the mean over tasks at a length. The family is all methods there.

        Args:
            length: Tokens; the longest length unless given.
        """
        if self.plain is None or not self.lengths:
            return {}
        at = (self.lengths[-1] if length is None else length,)
        tests = {
            label: test
            for label in self.patched
            if (test := self.difference(label, self.plain, None, at)) is not None
        }
        adjusted = self.adjust({label: test.p_value for label, test in tests.items()}, length)
        return {label: (test, adjusted[label]) for label, test in tests.items()}

    def best_by_accuracy(self) -> tuple[str, float] | None:
        """Return the best patched method at the longest length, and p that another is as good.

        That is the largest p against the other patched methods after Holm; they are the family.
        None with fewer than two.
        """
        length = (self.lengths or [0])[-1]
        scores = {
            label: accuracy.estimate
            for label in self.patched
            if (accuracy := self.accuracy(label, None, (length,))) is not None
        }
        if len(scores) < 2:
            return None
        best = max(scores, key=lambda label: scores[label])
        tests = {
            label: test.p_value
            for label in scores
            if label != best and (test := self.difference(best, label, None, (length,)))
        }
        return best, max(self.adjust(tests).values(), default=1.0)

    @property
    def looks(self) -> int:
        """Return how many times the run looked at its samples of the longest length."""
        return len(self.run.get("looks") or [])

    def look_factor(self, length: int | None = None) -> int:
        """Return what p-values at a length are multiplied by, for looks at a run that grew.

        Args:
            length: Tokens; the longest length unless given, where alone a run grows.
        """
        if length is not None and length not in self.lengths[-1:]:
            return 1
        return statistics.look_factor(self.looks)

    def adjust(self, p_values: dict[K, float], length: int | None = None) -> dict[K, float]:
        """Return the p-values of one family, adjusted by Holm and for looks.

        Args:
            p_values: Of all methods at one length.
            length: Tokens; the longest length unless given.
        """
        adjusted = statistics.holm(list(p_values.values()))
        factor = self.look_factor(length)
        return {key: min(1.0, factor * p) for key, p in zip(p_values, adjusted, strict=True)}
