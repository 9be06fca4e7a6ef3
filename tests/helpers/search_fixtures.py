"""Small searches on the tiny trained models, in this process and in ones that can be killed."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from train_tiny import recall_batch
from transformers import AutoModelForCausalLM

from helpers.processes import FORK
from rope_patch.inference.samples import from_labelled_tensors
from rope_patch.searching import pipeline
from rope_patch.searching.candidates import Candidate
from rope_patch.searching.journal import JOURNAL_FILE
from rope_patch.searching.pipeline import search
from rope_patch.searching.strategies.registry import Strategy
from rope_patch.utils.journal import JournalFile

ASSETS = Path(__file__).parents[1] / "assets"
TRAINED = 256
LENGTH = 512


def load(name="llama"):
    return AutoModelForCausalLM.from_pretrained(ASSETS / f"tiny-{name}")


def questions(length=LENGTH, count=8, seed=1, pairs=8):
    """Keys and values in filler, and the keys asked for at the end."""
    return from_labelled_tensors(
        *recall_batch(torch.Generator().manual_seed(seed), count, length, pairs)
    )


def stretched(power, top=2.0, attention_factor=None):
    """A stretch that rises to `top`, of the 16 pairs of the tiny models."""
    options = {"long_factor": [top ** ((pair / 15) ** power) for pair in range(16)]}
    if attention_factor is not None:
        options["attention_factor"] = attention_factor
    return Candidate(f"power {power:g}", "longrope", options)


def walk(space, budget, seed, *, step=0.7):
    """A stand-in that depends on all fitnesses before: it goes on from the better one of two."""
    power, best = 1.0 + 0.01 * seed, float("inf")
    for number in range(budget):
        tried = power + step * (-1) ** number / (1 + number)
        fitness = yield stretched(tried, top=space.factor)
        if fitness < best:
            power, best = tried, fitness


WALK = Strategy(walk, "", "", searches_attention_factor=False, resumable=True)


def arguments(**changes):
    """Of a search by `WALK`, which `registered` knows as "walk"."""
    given = {
        "length": LENGTH,
        "method": "walk",
        "budget": 6,
        "samples": questions(count=4),
        "held_out": questions(count=4, seed=2),
        "short": questions(TRAINED, 4, seed=3),
        "progress": False,
    }
    return given | changes


def registered(propose=None, **changes):
    """The strategies, with the stand-in among them."""
    walking = WALK if propose is None else replace(WALK, propose=propose)
    return pipeline.STRATEGIES | {"walk": replace(walking, **changes)}


def lines(folder):
    """The keys of all whole lines of a state."""
    found = (
        (folder / JOURNAL_FILE).read_text().split("\n")[1:-1]
    )  # behind the last end is half a line
    return [json.loads(line)["key"] for line in found]


def numbers(found):
    """What must be the same however often a search was killed, and by however many processes."""
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in found.history]
    return history, found.arguments(), found.held_out


def killed(after, torn=False, **given):
    """Runs a search that is killed when it would write so many measurements and one more."""
    process = FORK.Process(target=_until, args=(after, torn, given))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def _until(after, torn, given):
    append, calls = JournalFile.append, []

    def counted(self, *entries):
        if len(calls) == after:
            if torn:
                line = json.dumps(entries[-1]).encode()
                with self.path.open("ab") as file:
                    file.write(line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(entries)
        append(self, *entries)

    JournalFile.append = counted
    pipeline.STRATEGIES = registered()
    search(load(), **given)


def one_of(**given):
    """What one of several processes that search together says of it."""
    pipeline.STRATEGIES = registered()
    return numbers(search(load(), **given))
