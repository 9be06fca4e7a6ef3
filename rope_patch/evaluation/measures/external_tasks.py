"""lm-eval's own tasks by name, such as `ruler`, `longbench` or `babilong`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rope_patch import tasks
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.results_schema import (
    HarnessRecord,
    MetricRecord,
    RetrievalRecord,
    SampleRecord,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils import checksums
from rope_patch.utils.errors import describe_error, did_you_mean

_TIMEOUT = 60  # seconds that a server may be silent, where a builder sets no limit itself


@dataclass(frozen=True)
class ExternalTask:
    """A task of lm-eval or of a user's folder.

    Attributes:
        name: The task's name.
        length: Tokens that its samples are made at; None if they have lengths of their own.
        task: lm-eval's task object.
    """

    name: str
    length: int | None
    task: Any

    @property
    def label(self) -> str:
        """Return the name, with the length if the task is made at one."""
        suffix = "" if self.length is None else f"{lm_eval_tasks.SUFFIX}{self.length}"
        return f"{self.name}{suffix}"


def load(
    names: list[str],
    lengths: list[int],
    tokenizer: str,
    folders: Sequence[str] = (),
    **metadata: Any,
) -> list[ExternalTask]:
    """Load tasks of lm-eval, which reads their data from its cache or downloads it as set up.

    RULER's are built here: 500 samples a length, however few are wanted, which takes lm-eval up to
    two minutes for some of them at 4,096 tokens. Ours of the same kind build what is wanted.

    Args:
        names: Tasks, groups or tags of lm-eval or of the folders.
        lengths: For tasks that are made at a length.
        tokenizer: The model's folder or name, which RULER wants.
        folders: Users' folders of tasks.
        **metadata: Further metadata for the tasks.

    Returns:
        The tasks; one that is made at a length is there once for each.

    Raises:
        ValueError: There is no such task, its data is not at hand, or it wants to sample.
    """
    if not names:
        return []  # listing all that lm-eval has takes seconds
    index = TaskIndex(folders)
    full_metadata = {"tokenizer": tokenizer, "pretrained": tokenizer, **metadata}
    # The members of a user's group need not all be made at a length.
    parts = [m for name in names for m in (index.members(name) if name in index.own else [name])]
    loaded: dict[tuple[str, int | None], Any] = {}
    for name in dict.fromkeys(parts):
        for length in lengths if index.accepts_length(name) else [None]:
            task_objects = _load_one(index, name, length, full_metadata)
            loaded |= {(task, length): task_objects[task] for task in task_objects}
    for (name, _), task in loaded.items():
        _require_greedy(name, task)
    return [ExternalTask(name, length, task) for (name, length), task in loaded.items()]


@dataclass(frozen=True)
class ExternalResult:
    """What one task gave under one method.

    Attributes:
        metrics: The metrics by name, without RULER's of lengths that were not requested.
        samples: Of a task that is made at a length, the samples with the first metric that is a
            mean of scores from 0 to 1; it is not among the metrics then.
    """

    metrics: dict[str, MetricRecord]
    samples: list[SampleRecord]


def evaluate(
    lm: LongContextLM, external: ExternalTask, limit: int | None, chat: bool = False
) -> ExternalResult:
    """Run a loaded task.

    Args:
        lm: The model, which has run no other task.
        external: From `load`.
        limit: Samples of the task; all if None.
        chat: Whether prompts are put into the tokenizer's chat template.
    """
    results = lm_eval_tasks.evaluate(lm, [external.task], limit=limit, chat=chat)
    metrics: dict[str, MetricRecord] = {}
    rows: list[SampleRecord] = []
    for key, values in results.get("results", {}).items():
        named = [(*spelled.partition(",")[::2], value) for spelled, value in values.items()]
        filters = {kind for _, kind, _ in named if kind}
        for metric, kind, value in named:
            if not kind or metric.endswith("_stderr") or value == -1:
                continue
            samples = sorted(
                (s for s in results["samples"].get(key, []) if s.get("filter", kind) == kind),
                key=lambda sample: sample["doc_id"],
            )
            # -1 is RULER's mark of samples of another length.
            samples = [sample for sample in samples if sample.get(metric) != -1]
            scores = _mean_scores(samples, metric, value)
            in_range = scores is not None and all(0 <= score <= 1 for score in scores)
            gain = results["higher_is_better"][key].get(metric) is not False
            if in_range and gain and external.length is not None and not rows:
                rows = _records(external, samples, metric, lm.failures)
                continue
            name = metric if len(filters) == 1 else f"{metric}, {kind}"
            metrics[name] = {"value": value, "stderr": _standard_error(scores)}
            metrics[name]["prompts"] = checksums.digest(
                "\n".join(str(sample["prompt_hash"]) for sample in samples), 32
            )
            if in_range:
                records = _records(external, samples, metric, lm.failures)
                metrics[name]["scores"] = [record["score"] for record in records]
                numbers = [record["text"] for record in records]
                if len(set(numbers)) < len(numbers):
                    metrics[name]["texts"] = numbers
            elif losses := _losses(samples, metric, value):
                metrics[name]["losses"] = losses
    return ExternalResult(metrics, rows)


def _mean_scores(samples: list[dict[str, Any]], metric: str, value: Any) -> list[float] | None:
    """Return the samples' scores if the metric's value is their mean."""
    scores = [sample.get(metric) for sample in samples]
    numbers = [float(score) for score in scores if isinstance(score, int | float)]
    if not scores or len(numbers) < len(scores):
        return None
    mean = math.fsum(numbers) / len(numbers)
    return numbers if math.isclose(mean, value, abs_tol=1e-12) else None


def _losses(samples: list[dict[str, Any]], metric: str, value: Any) -> list[list[float]] | None:
    """Return each sample's nats and weight if the metric's value is the perplexity of all."""
    values = [sample.get(metric) for sample in samples]
    pairs = [tuple(v) if isinstance(v, tuple | list) else (v, 1) for v in values]
    if not all(len(pair) == 2 and all(isinstance(n, int | float) for n in pair) for pair in pairs):
        return None
    losses = [[-float(nats), float(weight)] for nats, weight in pairs]
    nats, weight = (math.fsum(part) for part in zip(*losses, strict=True))
    if not weight > 0 or not nats / weight < 700:
        return None
    return losses if math.isclose(math.exp(nats / weight), value, rel_tol=1e-9) else None


def _standard_error(scores: list[float] | None) -> float | None:
    """Return the standard error of a mean; None if all scores are alike."""
    if scores is None or len(set(scores)) < 2:
        return None
    return statistics.stdev(scores) / math.sqrt(len(scores))


def _records(
    external: ExternalTask,
    samples: list[dict[str, Any]],
    metric: str,
    failures: dict[tuple[str, int], str],
) -> list[SampleRecord]:
    """Return the samples as records; each is a text of its own unless it says which."""
    errors = {number: error for (_, number), error in failures.items()}
    records: list[SampleRecord] = []
    for sample in samples:
        number = sample["doc_id"]
        doc = sample["doc"] if isinstance(sample["doc"], dict) else {}
        text, depth = (doc.get(key) for key in ("text", "depth"))
        record: SampleRecord = {
            "id": f"{external.label}/{number}",
            "text": text if type(text) is int else number,
            "length": external.length or 0,
            "depth": depth if type(depth) is int else None,
            "target_tokens": 0,
            "score": None if number in errors else float(sample[metric]),
            "log_likelihood": None,
            "prompt": sample["prompt_hash"],
        }
        if external.task.OUTPUT_TYPE == "multiple_choice" and metric.startswith("acc"):
            # Mutual information asks for each choice twice, without the question, too.
            asked = 2 if "acc_mutual_info" in sample["metrics"] else 1
            record["chance"] = asked / len(sample["filtered_resps"])
        if number in errors:
            record["error"] = errors[number]
        records.append(record)
    return records


def _load_one(
    index: TaskIndex, name: str, length: int | None, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the task objects of a name at one length, by their names."""
    from lm_eval.tasks import TaskManager

    if length is not None:
        metadata = metadata | index.length_metadata(name, length)
    if name in index.own:
        # A group may name lm-eval's tasks, too. Reading all of those takes seconds.
        lone = index.own[name].yaml_path is not None and "group" not in index.own[name].cfg
        where: dict[str, Any] = {"include_path": index.folders, "include_defaults": not lone}
        return _load_with(TaskManager(metadata=metadata, **where), name, index.roots[name])
    if length is None and "group" in (index.entry(name).cfg or {"group": name}):
        return _load_with(TaskManager(metadata=metadata), name)  # groups reach into other folders
    where = {"include_path": index.folder(name), "include_defaults": False}
    manager = TaskManager(metadata=metadata, **where)
    if length is None:
        return _load_with(manager, name)
    task_objects: dict[str, Any] = {}
    for member in index.members(name):  # one at a time, so that an error names the task
        if member == "ruler_vt":
            _require_feasible_length(length, metadata["tokenizer"])
        task_objects |= _load_with(manager, member)
    for task, task_object in task_objects.items():
        if any(doc.get("outputs") == [] for doc in task_object.eval_docs):
            raise ValueError(
                f"lm-eval's {task} makes samples without an answer at {length:,} tokens: expected "
                "a longer length, such as 4096, or our task of the same kind"
            )
    return task_objects


def _load_with(manager: Any, name: str, root: Path | None = None) -> dict[str, Any]:
    """Return a task manager's objects of a name; `root` is the user's folder that it is from."""
    try:
        with _network_timeouts():
            task_objects: dict[str, Any] = manager.load([name])["tasks"]
    except ImportError as error:
        whose = f"lm-eval's task {name!r}" if root is None else f"the task {name!r} of {root}"
        raise ValueError(
            f"{whose} needs a package that is not installed: {error}; install it, or leave the "
            "task out"
        ) from error
    except Exception as error:
        if root is not None:
            raise ValueError(
                f"the task {name!r} of {root} cannot be built: {describe_error(error)}"
            ) from error
        raise ValueError(
            f"the data of lm-eval's task {name!r} cannot be had: {describe_error(error)}. "
            "What comes from a server must be there once: let it be downloaded (unset "
            "HF_HUB_OFFLINE), or leave the task out; our own tasks (rp_ruler, rp_hard) need no data"
        ) from error
    return task_objects


@contextlib.contextmanager
def _network_timeouts() -> Iterator[None]:
    """Bound the time of what lm-eval's builders do on the network by themselves."""
    from huggingface_hub import constants

    # Some builders ask servers that know nothing of HF_HUB_OFFLINE: RULER's import downloads a
    # tokenizer of sentences for nltk, with no limit of time, and its questions come by plain HTTP.
    swaps, before = UndoLog(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    output: Any = sys.stderr  # standard output is for results
    if constants.HF_HUB_OFFLINE:
        output = io.StringIO()  # RULER prints that it downloaded even if it did not
        import requests

        swaps.set(requests, "get", _offline_error)
        if importlib.util.find_spec("nltk") is not None:
            import nltk

            # What needs no sentences works without, so this must not raise.
            swaps.set(nltk, "download", lambda *_, **__: False)
    try:
        with contextlib.redirect_stdout(output):
            yield
    finally:
        swaps.undo()
        socket.setdefaulttimeout(before)


def _offline_error(url: str, **_: Any) -> None:
    raise ConnectionError(f"HF_HUB_OFFLINE is set, so {url} was not asked")


def _require_feasible_length(length: int, tokenizer: str) -> None:
    """Raise if lm-eval's variable tracking would never finish building at this length."""
    from lm_eval.tasks.ruler import common_utils, vt_utils

    read = common_utils.get_tokenizer(tokenizer)

    def tokens(noises: int, example: bool) -> int:
        text, answer = vt_utils.generate_input_output(noises, 1, 4, is_icl=example)
        return len(read(f"{text} {answer}").input_ids)

    # lm-eval tries until a sample fits, which never happens where its smallest is too long: its
    # example is made for 500 tokens, and the least noise is 10 sentences.
    room = vt_utils.CONFIG["variable_tracking"]["tokens_to_generate"]
    example = round(1.1 * tokens(5, True)) + room  # names are random, so sizes differ a little
    least = round(1.1 * tokens(10, False)) + room + 500
    if example > 500 or length < least:
        needed = "another tokenizer" if example > 500 else f"a length of at least {least:,} tokens"
        raise ValueError(
            f"lm-eval cannot make ruler_vt at {length:,} tokens with this tokenizer, expected "
            f"{needed}: give other --lengths, leave it out, or take our rp_vt"
        )


def _require_greedy(name: str, task: Any) -> None:
    """Raise if a task samples; where do_sample is false, ignore its temperature."""
    settings = getattr(task.config, "generation_kwargs", None) or {}
    if settings.get("do_sample") is False:
        settings["temperature"] = 0.0
    if settings.get("do_sample") or settings.get("temperature"):
        raise ValueError(
            f"lm-eval's task {name!r} samples its answers (do_sample or temperature); answers here "
            "are greedy, so that the same command gives the same ones: leave it out"
        )


# Tasks that are made at a length, by lm-eval's folder, and how their metadata spells it. RULER puts
# the samples of all lengths one after another, so that a limit takes the first length's alone;
# asked for one length at a time, it gives each its share.
_LENGTH_SPELLING: dict[str, Callable[[int], Any]] = {
    "ruler": lambda length: [length],
    "babilong": lambda length: f"{length // 1024}k",
}
_LENGTH_KEYS = ("length", "max_seq_lengths")  # in a task's metadata; ours have the first


class TaskIndex:
    """The tasks, groups and tags of lm-eval and of users' folders.

    Args:
        folders: Folders of YAML files, as lm-eval's `--include_path` takes them. A task there goes
            before one of lm-eval's with the same name.

    Raises:
        ValueError: A folder that is missing, empty or not readable as tasks, or the same name in
            two of them.
    """

    def __init__(self, folders: Sequence[str] = ()) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.own: dict[str, Any] = {}
        self.roots: dict[str, Path] = {}
        for folder in self.folders:
            for name, entry in _read_folder(folder).items():
                if name in self.own:
                    raise ValueError(
                        f"--include-path: {self.roots[name]} and {folder} both have a task "
                        f"{name!r}; rename one of them"
                    )
                self.own[name], self.roots[name] = entry, folder

    def entry(self, name: str) -> Any:
        """Return lm-eval's record of a task, group or tag.

        Raises:
            ValueError: There is none of that name.
        """
        entry = self.own.get(name) or _lm_eval_records().get(name)
        if entry is None and name in {*tasks.names(), *tasks.groups()}:
            raise ValueError(
                f"{name!r} is a task of this package: name it in --tasks, not in a group of yours"
            )
        if entry is None:
            hint = did_you_mean(name, [*self.own, *_lm_eval_records()])
            raise ValueError(
                f"neither we nor lm-eval have a task {name!r}{hint}; `lm-eval ls tasks` lists "
                "lm-eval's, --include-path FOLDER adds yours"
            )
        return entry

    def members(self, name: str) -> list[str]:
        """Return the tasks of a group or tag, or the task itself.

        A group that changes the settings of its members is returned as it is.
        """
        entry = self.entry(name)
        below = (entry.cfg or {}).get("task") if entry.yaml_path else sorted(entry.tags)
        if below is None or isinstance(below, str) or not all(isinstance(m, str) for m in below):
            return [name]
        return [task for member in below for task in self.members(member)]

    def folder(self, name: str) -> Path:
        """Return the folder of a task's YAML file, or of the tasks of a group or tag."""
        entry = self.entry(name)
        if entry.yaml_path is None:  # a tag
            return self.folder(min(entry.tags))
        return Path(entry.yaml_path).parent

    def accepts_length(self, name: str) -> bool:
        """Return whether a task, or those of a group or tag of lm-eval, are made at a given length.

        A user's task is if the metadata of its YAML file have the key `length` or
        `max_seq_lengths`.

        Raises:
            ValueError: There is no such task.
        """
        if name in self.own:
            return _length_key(self.own[name]) is not None
        return self.folder(name).name in _LENGTH_SPELLING

    def length_metadata(self, name: str, length: int) -> dict[str, Any]:
        """Return the metadata with which such a task is made at a length, in tokens."""
        if name not in self.own:
            return {"max_seq_lengths": _LENGTH_SPELLING[self.folder(name).name](length)}
        key = _length_key(self.own[name])
        assert key is not None
        default = self.own[name].cfg["metadata"][key]
        return {key: [length] if isinstance(default, list) else length}


@lru_cache(maxsize=1)
def _lm_eval_records() -> dict[str, Any]:
    """Return lm-eval's records of its own tasks, which takes seconds."""
    from lm_eval.tasks import TaskManager

    records: dict[str, Any] = TaskManager().task_index
    return records


def _length_key(entry: Any) -> str | None:
    metadata = (entry.cfg or {}).get("metadata")
    keys = metadata if isinstance(metadata, dict) else {}
    return next((key for key in _LENGTH_KEYS if key in keys), None)


def _read_folder(folder: Path) -> dict[str, Any]:
    """Return lm-eval's records of a user's tasks by name; lm-eval itself skips broken files."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"--include-path: {folder} is {what}, expected a folder with YAML files of tasks as "
            "lm-eval reads them"
        )
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            raise ValueError(
                f"--include-path: {path} cannot be read as a task of lm-eval: "
                f"{describe_error(error)}"
            ) from error
    manager = TaskManager(include_path=folder, include_defaults=False)
    records: dict[str, Any] = manager.task_index
    if not records:
        raise ValueError(
            f"--include-path: {folder} has no task, expected YAML files with the key `task` or "
            "`group`"
        )
    return records


class ExternalResults:
    """The results of external tasks.

    Samples that are made at a length become those of a retrieval task, with accuracy by length,
    retention and paired tests; all other metrics become those of a harness task.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, dict[str, MetricRecord]]] = {}
        self._samples: dict[str, dict[str, list[SampleRecord]]] = {}

    def add(self, external: ExternalTask, label: str, result: ExternalResult) -> None:
        """Add what a task gave under a method.

        Args:
            external: The task, at one length if it is made at lengths.
            label: The method's name in the results.
            result: From `external_tasks.evaluate`.
        """
        if result.metrics:
            self._metrics.setdefault(external.label, {})[label] = result.metrics
        if result.samples:
            name = external.name
            if f"rp_{name}" in tasks.names():  # reports show ours without the prefix
                name = f"lm-eval {name}"
            self._samples.setdefault(name, {}).setdefault(label, []).extend(result.samples)

    def harness(self) -> list[HarnessRecord]:
        """Return the part `harness` of the results."""
        return [{"task": name, "metrics": by} for name, by in self._metrics.items()]

    def retrieval(self) -> list[RetrievalRecord]:
        """Return the tasks that are made at lengths, for the part `retrieval` of the results."""
        records: list[RetrievalRecord] = []
        for name, by_label in self._samples.items():
            rows = [row for samples in by_label.values() for row in samples]
            records.append(
                {
                    "task": name,
                    "lengths": sorted({row["length"] for row in rows}),
                    "depths": sorted({d for row in rows if (d := row["depth"]) is not None}),
                    "samples": by_label,
                }
            )
        return records
