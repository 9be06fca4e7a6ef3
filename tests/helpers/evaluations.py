"""Small evaluations of the tiny trained model, in this process and in ones that can be killed."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

from helpers.processes import FORK
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.evaluation.request import EvalRequest
from rope_patch.inference.answers import AnswerStore
from rope_patch.utils import atomic_files

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
TASKS = ("rp_niah_single_2", "rp_json_kv_ll", "perplexity", "rp_short_cloze")


def request(folder, **changes):
    """Two methods, two lengths, two depths of one text each."""
    asked = EvalRequest(
        model=TINY,
        methods=("none", "yarn"),
        factor=4,
        lengths=(336, 448),
        depths=(20, 80),
        per_text=2,
        tasks=TASKS,
        window=32,
        short_samples=3,
        folder=folder,
    )
    return replace(asked, **changes)


def numbers(results):
    """What has to be the same whenever and by however many processes it is measured."""
    return {
        part: results[part] for part in ("methods", "perplexity", "retrieval", "control", "short")
    }


def lines(folder):
    """Every whole line of all files of answers: keys, and whether it is a failure."""
    found = []
    for path in sorted((folder / "cache").glob("answers-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut by a kill
            found.append((entry["key"], "error" in entry["answer"]))
    return found


def killed(asked, answers=None, pieces=None):
    """Runs an evaluation that is killed after so many answers or pieces were written."""
    process = FORK.Process(target=_until, args=(asked, answers, pieces))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _until(asked, answers, pieces):
    _count(AnswerStore, "put", answers)
    _count(atomic_files, "write_json", pieces)
    evaluate(asked)


def _count(owner, name, most):
    """Kills this process after so many calls."""
    original, calls = getattr(owner, name), []

    def counted(*args):
        original(*args)
        calls.append(1)
        if len(calls) == most:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, counted)
