"""Run small evaluations of the tiny trained model, here or in a process that is killed."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch

from helpers.processes import FRESH
from rope_patch.evaluation import EvalRequest, evaluate
from rope_patch.inference import AnswerStore
from rope_patch.utils import atomic_files

ASSETS = Path(__file__).parents[1] / "assets"
TINY = str(ASSETS / "tiny-llama")
TEXT = str(ASSETS / "start-of-emma.txt")  # the novel takes two seconds to tokenize
TASKS = ("rp_nonliteral", "rp_json_kv_ll", "perplexity", "rp_short_cloze")


def request(folder, **changes):
    """Return a request for two methods, two lengths, and two depths of one text each."""
    default = EvalRequest(
        model=TINY,
        methods=("none", "yarn"),
        factor=4,
        lengths=(336, 448),
        depths=(20, 80),
        per_text=2,
        tasks=TASKS,
        texts=(TEXT,),
        window=32,
        short_samples=3,
        folder=folder,
    )
    return replace(default, **changes)


def measured_numbers(results):
    """Return the results that neither interruptions nor the number of processes may change."""
    return {
        part: results[part] for part in ("methods", "perplexity", "retrieval", "control", "short")
    }


def answer_lines(folder):
    """Return (key, is an error) for each complete line of all answer files."""
    answers = []
    for path in sorted((folder / "cache").glob("answers-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut by a kill
            answers.append((entry["key"], "error" in entry["answer"]))
    return answers


def run_until_killed(request, answers=None, pieces=None, run=evaluate):
    """Run an evaluation that is killed after it wrote `answers` answers or `pieces` pieces."""
    process = FRESH.Process(target=_evaluate_until, args=(request, answers, pieces, run))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def _evaluate_until(request, answers, pieces, run):
    torch.set_num_threads(1)
    _kill_after(AnswerStore, "put", answers)
    _kill_after(atomic_files, "write_json", pieces)
    run(request)


def _kill_after(owner, name, limit):
    """Kill this process after the method's call number `limit`."""
    original, calls = getattr(owner, name), []

    def count_and_call(*args):
        original(*args)
        calls.append(1)
        if len(calls) == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, count_and_call)
