"""lm-eval's own tasks by name, such as `ruler`, `longbench` or `babilong`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import socket
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks
from rope_patch.evaluation.results_schema import MetricRecord
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import describe_error, did_you_mean

# Tasks that are made at a length, by lm-eval's folder, and how their metadata spells it. RULER puts
# the samples of all lengths one after another, so that a limit takes the first length's alone;
# asked for one length at a time, it gives each its share.
_LENGTH_SPELLING: dict[str, Callable[[int], Any]] = {
    "ruler": lambda length: [length],
    "babilong": lambda length: f"{length // 1024}k",
}
_TIMEOUT = 60  # seconds without an answer from a server, where a builder sets no limit itself


def load(
    names: list[str], lengths: list[int], tokenizer: str, **metadata: Any
) -> list[tuple[str, Any]]:
    """Load tasks of lm-eval, which reads their data from its cache or downloads it as set up.

    RULER's are built here: 500 samples a length, however few are wanted, which takes lm-eval up to
    two minutes for some of them at 4,096 tokens. Ours of the same kind build what is wanted.

    Args:
        names: Tasks, groups or tags of lm-eval.
        lengths: For tasks that are made at a length.
        tokenizer: The model's folder or name, which RULER wants.
        **metadata: Further metadata for the tasks.

    Returns:
        Names and task objects; a task that is made at a length is there once for each.

    Raises:
        ValueError: lm-eval has no such task, its data is not at hand, or it wants to sample.
    """
    if not names:
        return []  # listing all that lm-eval has takes seconds
    full_metadata = {"tokenizer": tokenizer, "pretrained": tokenizer, **metadata}
    loaded: dict[str, Any] = {}
    for name in names:
        for length in lengths if accepts_length(name) else [None]:
            suffix = "" if length is None else f"{lm_eval_tasks.SUFFIX}{length}"
            task_objects = _load_one(name, length, full_metadata)
            loaded |= {f"{task}{suffix}": task_objects[task] for task in task_objects}
    for name, task in loaded.items():
        _require_greedy(name, task)
    return list(loaded.items())


def accepts_length(name: str) -> bool:
    """Return whether lm-eval makes a task, or those of a group or tag, at a given length.

    Raises:
        ValueError: lm-eval has no such task.
    """
    return _task_folder(name).name in _LENGTH_SPELLING


def length_metadata(name: str, length: int) -> dict[str, Any]:
    """Return the metadata with which lm-eval makes such a task at a length, in tokens."""
    return {"max_seq_lengths": _LENGTH_SPELLING[_task_folder(name).name](length)}


def evaluate(
    lm: LongContextLM, loaded: list[tuple[str, Any]], limit: int | None, chat: bool = False
) -> dict[str, dict[str, MetricRecord]]:
    """Run loaded tasks.

    Args:
        lm: The model.
        loaded: From `load`.
        limit: Samples of each task, and of each length; all if None.
        chat: Whether prompts are put into the tokenizer's chat template.

    Returns:
        The metrics by task and name, without RULER's metrics of lengths that were not requested.
    """
    measured: dict[str, dict[str, MetricRecord]] = {}
    for name, task in loaded:
        results = lm_eval_tasks.evaluate(lm, [task], limit=limit, chat=chat)
        for key, row in results.get("results", {}).items():
            metrics: dict[str, MetricRecord] = {}
            for spelled, value in row.items():
                metric, _, kind = spelled.partition(",")
                if kind and not metric.endswith("_stderr") and value != -1:
                    error = _standard_error(results["samples"].get(key, []), metric, value)
                    metrics[metric] = {"value": value, "stderr": error}
            measured[name] = metrics
    return measured


def _standard_error(samples: list[dict[str, Any]], metric: str, value: Any) -> float | None:
    """Return the standard error of a mean; -1 is RULER's mark of samples of another length."""
    scores = [sample.get(metric, -1) for sample in samples]
    if not all(isinstance(score, int | float) for score in scores):
        return None
    scores = [score for score in scores if score != -1]
    if len(set(scores)) < 2 or not math.isclose(sum(scores) / len(scores), value):
        return None
    spread = sum((score - value) ** 2 for score in scores) / (len(scores) - 1)
    return math.sqrt(spread / len(scores))


@lru_cache(maxsize=1)
def _task_index() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _task_folder(name: str) -> Path:
    """Return lm-eval's folder of a task, or of the tasks of a group or tag."""
    entry = _task_index().task_index.get(name)
    if entry is None:
        hint = did_you_mean(name, _task_index().all_tasks)
        raise ValueError(
            f"neither we nor lm-eval have a task {name!r}{hint}; `lm-eval ls tasks` lists lm-eval's"
        )
    if entry.yaml_path is None:  # a tag
        return _task_folder(min(entry.tags))
    return Path(entry.yaml_path).parent


def _member_tasks(name: str) -> list[str]:
    """Return the tasks of a group or tag, or the task itself."""
    entry = _task_index().task_index[name]
    below = (entry.cfg or {}).get("task") if entry.yaml_path else sorted(entry.tags)
    if below is None or isinstance(below, str):
        return [name]
    return [task for member in below for task in _member_tasks(member)]


def _load_one(name: str, length: int | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the task objects of a name at one length, by their names."""
    from lm_eval.tasks import TaskManager

    if length is None and "group" in (_task_index().task_index[name].cfg or {"group": name}):
        return _load_with(TaskManager(metadata=metadata), name)  # groups reach into other folders
    where: dict[str, Any] = {"include_path": _task_folder(name), "include_defaults": False}
    if length is None:
        return _load_with(TaskManager(metadata=metadata, **where), name)
    metadata = metadata | length_metadata(name, length)
    manager = TaskManager(metadata=metadata, **where)
    task_objects: dict[str, Any] = {}
    for member in _member_tasks(name):  # one at a time, so that an error names the task
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


def _load_with(manager: Any, name: str) -> dict[str, Any]:
    try:
        with _network_timeouts():
            task_objects: dict[str, Any] = manager.load([name])["tasks"]
    except ImportError as error:
        raise ValueError(
            f"lm-eval's task {name!r} needs a package that is not installed: {error}; "
            "install it, or leave the task out"
        ) from error
    except Exception as error:
        raise ValueError(
            f"the data of lm-eval's task {name!r} cannot be had: {describe_error(error)}. "
            "What comes from a server must be there once: let it be downloaded (unset "
            "HF_HUB_OFFLINE), or leave the task out; our own tasks (rp_ruler, rp_hard) need no data"
        ) from error
    return task_objects


@contextlib.contextmanager
def _network_timeouts() -> Iterator[None]:
    """Bound the time of what lm-eval's builders do on the network by themselves.

    Some ask servers that know nothing of HF_HUB_OFFLINE: RULER's import downloads a tokenizer of
    sentences for nltk, with no limit of time, and its questions come by plain HTTP.
    """
    from huggingface_hub import constants

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
    """Raise if lm-eval's variable tracking would never finish building at this length.

    It tries until a sample fits, which never happens where its smallest is too long: its example is
    made for 500 tokens, and the least noise is 10 sentences.
    """
    from lm_eval.tasks.ruler import common_utils, vt_utils

    read = common_utils.get_tokenizer(tokenizer)

    def tokens(noises: int, example: bool) -> int:
        text, answer = vt_utils.generate_input_output(noises, 1, 4, is_icl=example)
        return len(read(f"{text} {answer}").input_ids)

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
