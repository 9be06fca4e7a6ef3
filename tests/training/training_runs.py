"""Tiny runs of the recipes, in this process or in a child that can be killed."""

import importlib
import json
import os
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch
from helpers.processes import FRESH
from safetensors.torch import load_file

from rope_patch import cli
from rope_patch.tasks import read_text
from rope_patch.training import parse_settings, read_log

RECIPES = {"finetune": "rope_patch.training.trainer", "loop": "training_loop"}
# The loop takes the Trainer's steps to the bit (test_trainer_and_loop.py), by the same parts.
BOTH = ["finetune", pytest.param("loop", marks=pytest.mark.slow)]
STEPS = 3
LENGTH = 64
ASSETS = Path(__file__).parent.parent / "assets"
TINY = {
    "model": ASSETS / "tiny-llama",
    "method": "yarn",
    "factor": 2,
    "train_length": LENGTH,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_steps": 1,
    "save_total_limit": 3,
    "ignore_plan": True,
    "use_cpu": True,
}
# Changes to TINY under which a run has to resume exactly.
VARIANTS = {
    "plain": {},
    "constant": {"lr_scheduler_type": "constant"},  # rates that do not depend on max_steps
    "lora": {"lora_rank": 4},
    "distilled": {
        "method": "mixed-yarn",
        "packing": "masked",
        "shuffle_window": 8,
        "short_share": 0.5,
        "distillation_weight": 1.0,
        "lora_rank": 4,
    },
    "woven": {
        "data": "novel",
        "train_length": 768,
        "packing": "best_fit",
        "packing_window": 5,  # of the 6 rows: the checkpoint of the second step is within one
        "compression_ratio": [0.2, 0.9],
        "aggregation_share": 1.0,
        "short_share": 0.25,
        "per_device_train_batch_size": 1,
    },
}


def arguments(folder, config=None, **changes):
    """Return a recipe's command line: TINY or a config file, with changes."""
    options = TINY | {"data": documents(folder.parent)} if config is None else {"config": config}
    options |= {"output_dir": folder, **changes}
    if options.get("data") == "novel":
        options["data"] = novel(folder.parent)
    words = []
    for key, value in options.items():
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            words.append(f"--{key}={value}")
    return words


def documents(folder):
    """Write fixed documents of 40 to 2,000 tokens; return their file."""
    path = folder / "documents.jsonl"
    if not path.exists():
        path.write_text(_random_documents())
    return path


@cache
def _random_documents():
    random = Random(0)
    lengths = [random.choice([40, 100, 300, 2000]) for _ in range(60)]
    rows = [[random.randrange(10, 400) for _ in range(length)] for length in lengths]
    return "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)


def novel(folder):
    """Write a part of a novel as documents of several lengths; return their file."""
    path, text = folder / "novel.jsonl", read_text("emma")[5000:]
    lines = []
    for size in [2600, 9000, 1500, 4000, 300, 7000, 2000]:
        lines.append(json.dumps({"text": text[:size]}) + "\n")
        text = text[size:]
    path.write_text("".join(lines))
    return path


def settings_of(folder, config=None, **changes):
    """Return the settings of TINY or of a config file, with changes."""
    return parse_settings(arguments(folder, config, **changes))[0]


def run(recipe, folder, **changes):
    """Run `finetune` or `loop` in this process; return the finished model's folder."""
    module = importlib.import_module(RECIPES[recipe])
    return getattr(module, recipe)(settings_of(folder, **changes))


class Child:
    """A recipe's run in a process of its own.

    Args:
        recipe: finetune or loop.
        folder: The run's folder; its stderr is written beside it.
        trap: Called in the process before the run starts.
        **changes: Changes to TINY.
    """

    def __init__(self, recipe, folder, trap=None, **changes):
        self.stderr_path = folder.parent / f"{folder.name}.stderr"
        self.process = FRESH.Process(
            target=_in_child, args=(recipe, arguments(folder, **changes), trap, self.stderr_path)
        )
        self.process.start()

    def wait(self):
        """Wait for the end; return the exit code and the stderr lines without progress."""
        self.process.join(120)
        lines = self.stderr_path.read_text().replace("\r", "\n").splitlines()
        return self.process.exitcode, [line for line in lines if "step/s" not in line]

    def kill_when(self, ready):
        """Kill the process as soon as `ready()`."""
        limit = time.monotonic() + 120
        while not ready():
            assert self.process.is_alive(), self.stderr_path.read_text()
            assert time.monotonic() < limit
            time.sleep(0.005)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def _in_child(recipe, command, trap, stderr_path):
    with stderr_path.open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    torch.set_num_threads(1)
    if trap is not None:
        trap()
    module = importlib.import_module(RECIPES[recipe])
    cli.run(lambda: module.main(command))


class Hang:
    """Make the write of a checkpoint hang at a moment.

    Args:
        moment: weights, optimizer, before the manifest, before the move or old ones go.
        checkpoint: The checkpoint's name.
        flag: A file that appears at that moment.
    """

    def __init__(self, moment, checkpoint, flag):
        self.moment, self.checkpoint, self.flag = moment, checkpoint, flag

    def __call__(self):
        """Set the trap in this process."""
        write, serialize, save = Path.write_text, safetensors.torch.serialize_file, torch.save
        rename, remove = Path.rename, shutil.rmtree

        def serialize_file(tensors, filename, *args, **kwargs):
            serialize(tensors, filename, *args, **kwargs)
            self.hang_in_file("weights", filename)

        def torch_save(obj, path, *args, **kwargs):
            save(obj, path, *args, **kwargs)
            if "optimizer" in str(getattr(path, "name", path)):
                self.hang_in_file("optimizer", path)

        def write_text(path, text, *args, **kwargs):
            if path.name == "whole.json":
                self.hang_at("before the manifest", path)
            return write(path, text, *args, **kwargs)

        def move(path, target):
            if path.name == self.checkpoint:
                self.hang_at("before the move", path)
            return rename(path, target)

        def rmtree(path, *args, **kwargs):
            weights = Path(path) / "model.safetensors"
            old = Path(path).name == "checkpoint-1" and weights.exists()
            if self.moment == "old ones go" and old:
                weights.unlink()
                self.flag.touch()
                time.sleep(600)
            return remove(path, *args, **kwargs)

        Path.write_text, Path.rename = write_text, move
        safetensors.torch.serialize_file, torch.save, shutil.rmtree = (
            serialize_file,
            torch_save,
            rmtree,
        )

    def hang_in_file(self, moment, path):
        """Hang with half of a file, at the right moment and checkpoint."""
        path = Path(path if isinstance(path, str | Path) else path.name)
        if self.moment == moment and self.checkpoint in str(path):
            os.truncate(path, path.stat().st_size // 2)
            self.flag.touch()
            time.sleep(600)

    def hang_at(self, moment, path):
        """Hang at the right moment and checkpoint."""
        if self.moment == moment and self.checkpoint in str(path):
            self.flag.touch()
            time.sleep(600)


def curve(folder):
    """Return every step's logged number, loss and gradient norm."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_log(folder)]


def tensors(folder):
    """Return the weights in a folder."""
    return load_file(folder / "model.safetensors")


def equal_tensors(one, other):
    """Return whether two folders hold the same weights, bit for bit."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def require_same(folder, reference, steps=STEPS):
    """Fail unless two runs have the same losses, norms and finished weights."""
    assert [step for step, *_ in curve(folder)] == list(range(1, steps + 1))
    assert curve(folder) == curve(reference)
    assert equal_tensors(folder / "model", reference / "model")


def copy_stopped_run(reference, folder, after):
    """Copy a run as if it was killed some steps after its last checkpoint."""
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "model")
    for step in range(after + 1, STEPS + 1):
        shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
    return folder


class Poison:
    """Make a model's embedding of a token NaN.

    Args:
        recipe: The recipe whose model is poisoned.
        token: The token's id.
    """

    def __init__(self, recipe, token):
        self.recipe, self.token = recipe, token

    def __call__(self):
        """Poison the models that this process will train."""
        module = importlib.import_module(RECIPES[self.recipe])
        prepare_model = module.prepare_model

        def hook(embedding, inputs, output):
            return output.masked_fill((inputs[0] == self.token)[..., None], float("nan"))

        def prepare_poisoned(settings):
            prepared = prepare_model(settings)
            prepared.model.get_input_embeddings().register_forward_hook(hook)
            return prepared

        module.prepare_model = prepare_poisoned
