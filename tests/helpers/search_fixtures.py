"""Run small searches on the tiny trained models, here or in a process that is killed."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from train_tiny import recall_batch
from transformers import AutoModelForCausalLM

from helpers.processes import FRESH
from rope_patch.inference import from_labelled_tensors
from rope_patch.runs import JournalFile
from rope_patch.searching import STRATEGIES, Candidate, search

ASSETS = Path(__file__).parents[1] / "assets"
TRAINED = 256
LENGTH = 512


def load(name="llama"):
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{name}")


def questions(length=LENGTH, count=8, seed=1, pairs=8):
    """Return samples: keys and values in filler, then the keys whose values are asked for."""
    return from_labelled_tensors(
        *recall_batch(torch.Generator().manual_seed(seed), count, length, pairs)
    )


def write_samples(path, samples):
    """Write samples as training data; return the path."""
    lines = []
    for sample in samples:
        labels = [-100] * len(sample.ids)
        for position in sample.positions:
            labels[position] = sample.ids[position]
        lines.append(json.dumps({"input_ids": sample.ids, "labels": labels}))
    path.write_text("\n".join(lines) + "\n")
    return path


def stretch_candidate(power, top=2.0, attention_factor=None):
    """Return a candidate whose stretch rises to `top` over the tiny models' 16 pairs."""
    options = {"long_factor": [top ** ((pair / 15) ** power) for pair in range(16)]}
    if attention_factor is not None:
        options["attention_factor"] = attention_factor
    return Candidate(f"power {power:g}", "longrope", options)


def walk(space, budget, seed, *, step=0.7):
    """Propose candidates that depend on all earlier fitnesses: step on from the best power."""
    power, best = 1.0 + 0.01 * seed, float("inf")
    for number in range(budget):
        candidate = power + step * (-1) ** number / (1 + number)
        fitness = yield stretch_candidate(candidate, top=space.factor)
        if fitness < best:
            power, best = candidate, fitness


def make_walk(propose=walk, **changes):
    """Return a strategy for `STRATEGIES["walk"]`; resumable like the scan that it replaces."""
    return replace(STRATEGIES["yarn-rcd"], propose=propose, **changes)


def arguments(**changes):
    """Return arguments of a search by the strategy "walk"."""
    default = {
        "length": LENGTH,
        "method": "walk",
        "budget": 6,
        "samples": questions(count=4),
        "held_out": questions(count=4, seed=2),
        "short": questions(TRAINED, 4, seed=3),
        "progress": False,
    }
    return default | changes


def journal_keys(folder):
    """Return the keys of a journal's complete lines; the text after the last newline is not one."""
    complete = (folder / "state.jsonl").read_text().split("\n")[1:-1]
    return [json.loads(line)["key"] for line in complete]


def search_numbers(result):
    """Return the results that neither kills nor the number of processes may change."""
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in result.history]
    return history, result.arguments(), result.held_out


def run_until_killed(after, torn=False, **arguments):
    """Run a search that is killed after `after` measurements; `torn` leaves half of the next."""
    process = FRESH.Process(target=_search_until, args=(after, torn, arguments))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def _search_until(after, torn, arguments):
    torch.set_num_threads(1)
    append, calls = JournalFile.append, []

    def count_and_append(self, *entries):
        if len(calls) == after:
            if torn:
                line = json.dumps(entries[-1]).encode()
                with self.path.open("ab") as file:
                    file.write(line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(entries)
        append(self, *entries)

    JournalFile.append = count_and_append
    STRATEGIES["walk"] = make_walk()
    search(load(), **arguments)


def search_and_report(**arguments):
    """Return the numbers of a search, as one of several processes that search together."""
    STRATEGIES["walk"] = make_walk()
    return search_numbers(search(load(), **arguments))
