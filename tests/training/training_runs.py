"""Tiny runs of the recipes, in this process or in one that can be killed."""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from rope_patch import cli
from rope_patch.training import settings

RECIPES = {"finetune": "rope_patch.training.trainer", "loop": "rope_patch.training.loop"}
STEPS = 6
ASSETS = Path(__file__).parent.parent / "assets"
TINY = {
    "model": ASSETS / "tiny-llama",
    "method": "yarn",
    "factor": 2,
    "train_length": 256,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_steps": 2,
    "save_total_limit": 3,
    "ignore_plan": True,
    "use_cpu": True,
}
# Changes to TINY under which a run has to go on exactly.
VARIANTS = {
    "plain": {},
    "lora": {"lora_rank": 4},
    "packed": {
        "method": "mixed-yarn",
        "packing": "masked",
        "shuffle_window": 8,
        "short_share": 0.5,
    },
}


def arguments(folder, config=None, **changed):
    """Return a recipe's command line: TINY or a config file, with changes."""
    said = TINY | {"data": documents(folder.parent)} if config is None else {"config": config}
    said |= {"output_dir": folder, **changed}
    return [f"--{key}={value}" for key, value in said.items() if value is not None]


def documents(folder):
    """Write fixed documents of 40 to 2,000 tokens; return their file."""
    path = folder / "documents.jsonl"
    if not path.exists():
        random = Random(0)
        lengths = [random.choice([40, 100, 300, 2000]) for _ in range(60)]
        rows = [[random.randrange(10, 400) for _ in range(length)] for length in lengths]
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def run(recipe, folder, **changed):
    """Run `finetune` or `loop` in this process; return the finished model's folder."""
    module = importlib.import_module(RECIPES[recipe])
    return getattr(module, recipe)(settings.parse(arguments(folder, **changed))[0])


class Child:
    """A recipe's run in a process of its own.

    Args:
        recipe: finetune or loop.
        folder: Of the run; what it says on stderr is put beside it.
        trap: Called in the process before it starts.
        **changed: Changes to TINY.
    """

    def __init__(self, recipe, folder, trap=None, **changed):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(RECIPES.values()))
        self.said_to = folder.parent / f"{folder.name}.stderr"
        self.process = context.Process(
            target=_in_child, args=(recipe, arguments(folder, **changed), trap, self.said_to)
        )
        self.process.start()

    def ended(self):
        """Wait for the end; return the exit code and the stderr lines without progress."""
        self.process.join(120)
        said = self.said_to.read_text().replace("\r", "\n").splitlines()
        return self.process.exitcode, [line for line in said if "step/s" not in line]

    def killed_when(self, ready):
        """Kill the process as soon as `ready()`."""
        limit = time.monotonic() + 120
        while not ready():
            assert self.process.is_alive(), self.said_to.read_text()
            assert time.monotonic() < limit
            time.sleep(0.005)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def _in_child(recipe, given, trap, said_to):
    with said_to.open("w") as said:
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    if trap is not None:
        trap()
    module = importlib.import_module(RECIPES[recipe])
    cli.run(lambda: module.main(given))


class Hang:
    """Make the write of a checkpoint hang at a moment.

    Args:
        moment: See MOMENTS.
        checkpoint: The checkpoint's name.
        flag: A file that appears then.
    """

    MOMENTS = (
        "weights",
        "optimizer",
        "before the manifest",
        "before the move",
        "old ones go",
    )

    def __init__(self, moment, checkpoint, flag):
        self.moment, self.checkpoint, self.flag = moment, checkpoint, flag

    def __call__(self):
        """Set the trap in this process."""
        write, serialize, save = Path.write_text, safetensors.torch.serialize_file, torch.save
        rename, remove = Path.rename, shutil.rmtree

        def serialize_file(tensors, filename, *args, **kwargs):
            serialize(tensors, filename, *args, **kwargs)
            self.cut("weights", filename)

        def torch_save(what, path, *args, **kwargs):
            save(what, path, *args, **kwargs)
            if "optimizer" in str(getattr(path, "name", path)):
                self.cut("optimizer", path)

        def write_text(path, text, *args, **kwargs):
            if path.name == "whole.json":
                self.reached("before the manifest", path)
            return write(path, text, *args, **kwargs)

        def move(path, target):
            if path.name == self.checkpoint:
                self.reached("before the move", path)
            return rename(path, target)

        def rmtree(path, *args, **kwargs):
            weights = Path(path) / "model.safetensors"
            old = Path(path).name == "checkpoint-2" and weights.exists()
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

    def cut(self, moment, path):
        """Hang with half of a file, at the right moment and checkpoint."""
        path = Path(path if isinstance(path, str | Path) else path.name)
        if self.moment == moment and self.checkpoint in str(path):
            os.truncate(path, path.stat().st_size // 2)
            self.flag.touch()
            time.sleep(600)

    def reached(self, moment, path):
        """Hang at the right moment and checkpoint."""
        if self.moment == moment and self.checkpoint in str(path):
            self.flag.touch()
            time.sleep(600)


def curve(folder):
    """Return every step's logged number, loss and gradient norm."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def tensors(folder):
    """Return the weights in a folder."""
    return load_file(folder / "model.safetensors")


def equal_tensors(one, other):
    """Return whether two folders hold the same weights, bit for bit."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def require_same(folder, truth, steps=STEPS):
    """Fail unless two runs have the same losses, norms and finished weights."""
    assert [step for step, *_ in curve(folder)] == list(range(1, steps + 1))
    assert curve(folder) == curve(truth)
    assert equal_tensors(folder / "model", truth / "model")


def stopped(truth, folder, after):
    """Copy a run as if it was killed some steps after its last checkpoint."""
    shutil.copytree(truth, folder)
    shutil.rmtree(folder / "model")
    for step in range(after + 1, STEPS + 1):
        shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
    return folder


_made = {}


@pytest.fixture
def truth(tmp_path_factory):
    """Return `truth(recipe, variant)`: an uninterrupted run's folder, run once a session."""

    def make(recipe, variant="plain", **changed):
        key = (recipe, variant)
        if key not in _made:
            folder = tmp_path_factory.mktemp(f"{recipe}-{variant}") / "run"
            run(recipe, folder, **VARIANTS.get(variant, {}), **changed)
            _made[key] = folder
        return _made[key]

    return make


class Poison:
    """Make a model's embedding of a token NaN.

    Args:
        recipe: The recipe that is to get it.
        token: The token's id.
    """

    def __init__(self, recipe, token):
        self.recipe, self.token = recipe, token

    def __call__(self):
        """Poison the models that this process will train."""
        module = importlib.import_module(RECIPES[self.recipe])
        prepare = module.prepare

        def hook(embedding, inputs, output):
            return output.masked_fill((inputs[0] == self.token)[..., None], float("nan"))

        def poisoned(settings):
            prepared = prepare(settings)
            prepared.model.get_input_embeddings().register_forward_hook(hook)
            return prepared

        module.prepare = poisoned
