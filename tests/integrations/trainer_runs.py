"""Tiny runs of transformers' and TRL's trainers on a model that RopePatchCallback patches."""

from pathlib import Path

import datasets
import torch
import transformers
from safetensors.torch import load_file

import rope_patch

ASSETS = Path(__file__).parents[1] / "assets"
TINY = ASSETS / "tiny-llama"
TRAINED, FACTOR = 256, 2
TARGET = FACTOR * TRAINED
STEPS = 4
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
METHOD = {"method": "yarn", "factor": FACTOR, "trained_length": TRAINED}


def read_model():
    """Return the tiny Llama as transformers loads it, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def read_tokenizer():
    """Return its tokenizer, with a token for padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenized_rows(lengths=(400, 60, 300, 500, 90, 350, 200, 450), vocabulary=400):
    """Return a dataset of tokenized rows, of fixed random tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def settings(folder, kind=transformers.TrainingArguments, **changes):
    """Return arguments of a run of STEPS steps with a checkpoint after each second one."""
    defaults = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "save_strategy": "steps",
        "seed": 7,
        **QUIET,
    }
    return kind(**{**defaults, **changes})


def weights(folder):
    """Return the tensors of a saved model or adapter."""
    (path,) = (
        p for p in Path(folder).glob("*.safetensors") if p.name.endswith("model.safetensors")
    )
    return load_file(path)


def assert_same_weights(first, second):
    """Assert that two folders hold the same tensors, to the bit."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@torch.no_grad()
def logits(model, length=TARGET - 12):
    """Return a model's logits for the same tokens every time, `[1, S, vocab]`."""
    ids = torch.randint(10, 400, (1, length), generator=torch.Generator().manual_seed(3))
    return model.eval()(input_ids=ids, use_cache=False).logits


def losses(trainer):
    """Return the losses that a trainer has logged, by step."""
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def callback(**changes):
    """Return the callback of METHOD, with changes."""
    return rope_patch.RopePatchCallback(**{**METHOD, **changes})
