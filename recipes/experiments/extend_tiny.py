"""Extend a tiny trained model eight times by each kind of recipe, on equal tokens, and measure it.

What: the tiny Llama of train_tiny.py, which recalls key-value pairs over 256 tokens, is fine-tuned
to 2,048 by position interpolation, ABF, YaRN, mixed windows and DroPE, on rows of 256 whose
positions reach 2,048, and, as a control, with its rotation as it is. Each sees the same number of
tokens of the two tasks it was trained on, with the same learning rate. Before and after, at short
and at long lengths, it is asked for the values of 8 keys (recall), and for a segment that occurs a
second time (perplexity).

How, from the repository root (deterministic, one thread; 2 to 5 minutes of a CPU core a recipe):

    python recipes/experiments/extend_tiny.py

writes eval/results/tiny-extended: README.md with the table, results.json, and the loss curves.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import train_tiny as tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

import rope_patch
from rope_patch.training.monitor import LOG
from rope_patch.training.settings import parse_settings
from rope_patch.training.trainer import finetune
from rope_patch.utils import atomic_files
from rope_patch.utils.installation import version

MODEL = Path("tests/assets/tiny-llama")
FACTOR = 8
TRAINED = tiny.TRAINED_LENGTH
TARGET = FACTOR * TRAINED
LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS_PER_STEP = 8192
STEPS = 300
TOKENS_PER_PAIR = 32  # as in pretraining: 8 pairs in 256 tokens
LEARNING_RATE = 1e-3
SEQUENCES, SEED = 48, 1234
FOLDER_NAME = str.maketrans({" ": "-", ",": None, ":": None})

# Settings of each recipe.
RECIPES: dict[str, dict[str, Any]] = {
    "control: as it is": {"method": "none"},
    "position interpolation": {"method": "linear", "factor": FACTOR},
    "ABF": {"method": "abf", "factor": FACTOR},
    "YaRN": {"method": "yarn", "factor": FACTOR},
    "mixed windows (YaRN)": {"method": "mixed-yarn", "factor": FACTOR, "short_share": 0.4},
    "DroPE": {"method": "nope", "train_length": TRAINED},
    "PoSE, YaRN": {
        "method": "yarn", "factor": FACTOR, "train_length": TRAINED, "positions": "skip"
    },
    "PoSE, position interpolation": {
        "method": "linear", "factor": FACTOR, "train_length": TRAINED, "positions": "skip"
    },
    "leaky: the same rotation": {
        "method": "none", "factor": FACTOR, "train_length": TRAINED, "positions": "leaky"
    },
}  # fmt: skip


def documents(lengths: Sequence[int], seed: int) -> Iterator[dict[str, list[int]]]:
    """Yield recall and repetition documents alternately, of these lengths with the end token."""
    generator = torch.Generator().manual_seed(seed)
    for number, length in enumerate(lengths):
        if number % 2:
            ids, labels = tiny.repeat_batch(generator, 1, length - 1)
        else:
            pairs = length // TOKENS_PER_PAIR
            ids, labels = tiny.recall_batch(generator, 1, length - 1, pairs)
        yield {"input_ids": ids[0].tolist(), "labels": labels[0].tolist()}


def write_documents(path: Path, lengths: Sequence[int], seed: int) -> Path:
    """Write documents as JSON lines, unless the file exists."""
    if not path.is_file():
        lines = (json.dumps(record) + "\n" for record in documents(lengths, seed))
        atomic_files.atomic_write(path, "".join(lines))
    return path


def run_recipe(name: str, folder: Path, steps: int) -> tuple[Path, float]:
    """Run a recipe, unless it is finished already.

    Returns:
        The model's folder, and the minutes of training.
    """
    start_time = time.monotonic()
    recipe = {"train_length": TARGET, **RECIPES[name]}
    length = recipe["train_length"]
    rows = TOKENS_PER_STEP // length
    # Two documents more than rows, so that no process reads one twice.
    long = write_documents(folder / f"long-{length}.jsonl", [length] * (steps * rows + 2), SEED)
    if "short_share" in recipe:
        short = steps * TOKENS_PER_STEP // TRAINED
        path = write_documents(folder / f"long-{TRAINED}.jsonl", [TRAINED] * (short + 2), SEED)
        recipe |= {"short_data": path, "short_length": TRAINED}
    recipe |= {
        "model": MODEL,
        "data": long,
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": 20,
        "save_steps": steps,
        "gradient_checkpointing": False,
        "loss": "torch",
        "use_cpu": True,
        "resume": "auto",
        "output_dir": folder / name.split(" (")[0].translate(FOLDER_NAME),
    }
    settings, _ = parse_settings(
        [word for key, value in recipe.items() for word in (f"--{key}", str(value))]
    )
    model_folder = finetune(settings)
    assert model_folder is not None
    minutes_file = model_folder.parent / "minutes"
    if not minutes_file.is_file():
        atomic_files.atomic_write(minutes_file, f"{(time.monotonic() - start_time) / 60:.1f}\n")
    return model_folder, float(minutes_file.read_text())


@torch.no_grad()
def repeat_perplexity(model: PreTrainedModel, length: int, sequences: int) -> float:
    """Return the perplexity of a segment's second occurrence, a third of the length."""
    generator = torch.Generator().manual_seed(SEED)
    input_ids, labels = tiny.repeat_batch(generator, sequences, length)
    total, count = 0.0, 0
    for ids, truth in zip(input_ids, labels, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        scored = truth[1:] != -100
        losses = torch.nn.functional.cross_entropy(
            logits[scored], truth[1:][scored], reduction="sum"
        )
        total, count = total + losses.item(), count + int(scored.sum())
    return math.exp(total / count)


def measure(model: PreTrainedModel, sequences: int) -> dict[str, dict[int, float]]:
    """Return recall and perplexity at all lengths."""
    return {
        "recall": {n: tiny.recall_accuracy(model, n, sequences, seed=SEED) for n in LENGTHS},
        "perplexity": {n: repeat_perplexity(model, n, sequences // 4) for n in LENGTHS},
    }


def load_patched_base(name: str) -> PreTrainedModel:
    """Return the model that a recipe starts from: patched, untrained."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    request = {key: RECIPES[name][key] for key in ("method", "factor") if key in RECIPES[name]}
    if request["method"] != "none":
        rope_patch.patch(model, **request)
    return model.eval()


def load_finetuned(folder: Path) -> PreTrainedModel:
    """Return a fine-tuned model, with its patch if it has one."""
    if (folder / "rope_patch.json").is_file():
        return rope_patch.load(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results before and after training, as Markdown."""
    columns = [("recall", n) for n in LENGTHS] + [("perplexity", n) for n in LENGTHS]
    lines = [
        "| | " + " | ".join(f"{measure_name}, {n:,}" for measure_name, n in columns) + " |",
        "|:--|" + "--:|" * len(columns),
    ]
    for name, result in results.items():
        for stage in ("before", "after"):
            if stage not in result:
                continue
            numbers = [
                _short(measure_name, result[stage][measure_name][n]) for measure_name, n in columns
            ]
            lines.append(f"| {name}, {stage} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def _short(measure_name: str, number: float) -> str:
    return f"{number:.3f}" if measure_name == "recall" else f"{number:.3g}"


def render_readme(
    results: dict[str, dict[str, Any]], command: str, steps: int, sequences: int
) -> str:
    """Return the README: the table and its definitions."""
    minutes = [result["minutes"] for result in results.values() if "minutes" in result]
    return f"""# A tiny Llama, extended eight times by each kind of recipe

The model of `recipes/experiments/train_tiny.py` (361k parameters, trained on {TRAINED} tokens at
once) is fine-tuned to {TARGET:,} tokens. Every recipe sees the same {steps * TOKENS_PER_STEP:,}
tokens ({steps} steps of {TOKENS_PER_STEP:,}; DroPE, PoSE and leaky in rows of {TRAINED} tokens,
which is their point), with AdamW at {LEARNING_RATE:g}, falling to zero. {max(minutes):.0f} minutes
of one CPU core at most.

- **recall**: the share of {8 * sequences} values that the model gives for their keys, 8 pairs in a
  sequence; plus or minus about {math.sqrt(0.8 * 0.2 / (8 * sequences)):.2f} (a standard error at
  0.8).
- **perplexity**: of the second occurrence of a segment of a third of the length, {sequences // 4}
  sequences. A model that looks back needs 1, one that guesses some 300.
- **before**: the method's rotation put on, no training.
- **control**: the rotation as it is, trained on the same tokens and lengths.

{table(results)}

All recipes train on the tasks that are measured, on other sequences, so this shows what a recipe
makes possible in so few steps, and nothing of how it ranks on language. One seed each.

Made by `{command}` with torch {torch.__version__} and transformers {version("transformers")};
results.json has the numbers, NAME.jsonl the loss curves.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; run missing recipes, measure, write, and print the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("eval/results/tiny-extended"))
    parser.add_argument("--work", type=Path, default=Path("out/tiny-extended"))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    results: dict[str, dict[str, Any]] = {"as it is": {"before": measure(plain, options.sequences)}}
    for name in options.recipes:
        model_folder, minutes = run_recipe(name, options.work, options.steps)
        print(f"{name}: {minutes:.1f} minutes", file=sys.stderr)
        result = {
            "minutes": minutes,
            "after": measure(load_finetuned(model_folder), options.sequences),
        }
        if RECIPES[name]["method"] != "none":
            result = {"before": measure(load_patched_base(name), options.sequences), **result}
        results[name] = result
        options.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(model_folder.parent / LOG, options.out / f"{model_folder.parent.name}.jsonl")
    command = shlex.join(["python", "recipes/experiments/extend_tiny.py", *arguments])
    text = render_readme(results, command, options.steps, options.sequences)
    atomic_files.write_json(options.out / "results.json", {"command": command, "results": results})
    atomic_files.atomic_write(options.out / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
