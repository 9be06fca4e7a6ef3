"""Find out which ingredient of a recipe pays: a tiny Llama, eight times as long, on equal tokens.

What: the tiny Llama of train_tiny.py, trained on 256 tokens, is fine-tuned to 2,048 by YaRN on
documents of 64 to 2,048 tokens. Each ingredient is added alone, and several together: best-fit
packing, a curriculum of two lengths, short rows, distillation of the short rows, mixed windows,
clipped pairs, and rows of 256 tokens whose positions skip (PoSE). All see the same number of
tokens. Each is run with three seeds, which change the documents.

How, from the repository root (one thread; minutes of a CPU core for each run, and what is finished
is not run again):

    python recipes/experiments/tiny_ingredients.py

writes eval/results/tiny-ingredients: README.md with the table, and results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import train_tiny as tiny
import yaml
from extend_tiny import (
    FACTOR,
    LEARNING_RATE,
    MODEL,
    TARGET,
    TOKENS_PER_PAIR,
    TOKENS_PER_STEP,
    TRAINED,
    load_finetuned,
    write_documents,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from rope_patch.statistics.clustered_mean import clustered_mean
from rope_patch.training.settings import parse_settings
from rope_patch.training.trainer import finetune
from rope_patch.utils import atomic_files
from rope_patch.utils.installation import version

STEPS = 60
SHORTEST = 64  # tokens of a document
SEEDS = (0, 1, 2)
SEQUENCES = 48
_MEASURING_SEED = 1234  # of other documents than any run's

BASELINE = "YaRN"
_SHORT_ROWS = {"short_share": 0.25, "short_length": TRAINED}
_DISTILLED = {**_SHORT_ROWS, "distillation_weight": 1.0}
_BEST_FIT = {"packing": "best_fit"}
_MIXED = {"method": "mixed-yarn", **_SHORT_ROWS}
_CURRICULUM = "curriculum"
_TOGETHER = {**_MIXED, **_DISTILLED, **_BEST_FIT, _CURRICULUM: True}

# What each run adds to the baseline; _CURRICULUM is no key of recipes.
RUNS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "best-fit packing": _BEST_FIT,
    "curriculum": {_CURRICULUM: True},
    "PoSE": {"train_length": TRAINED, "positions": "skip", "packing": "single"},
    "clipped": {"method": "clipped-yarn"},
    "short rows": _SHORT_ROWS,
    "short rows, distilled": _DISTILLED,
    "mixed windows": _MIXED,
    "mixed windows, distilled": {**_MIXED, **_DISTILLED},
    "together": _TOGETHER,
    "together, small steps": {**_TOGETHER, "learning_rate": LEARNING_RATE / 4},
    "together, half short": {**_TOGETHER, "short_share": 0.5, "distillation_weight": 4.0},
}


def draw_lengths(tokens: int, seed: int) -> list[int]:
    """Draw lengths of documents from 64 to 2,048, of all magnitudes alike, up to so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        share = torch.rand((), generator=generator).item()
        lengths.append(int(SHORTEST * (TARGET / SHORTEST) ** share))
    return lengths


def make_recipe(name: str, seed: int, folder: Path, steps: int) -> dict[str, Any]:
    """Return a run's recipe; write its documents into the folder."""
    recipe = {
        "method": "yarn",
        "train_length": TARGET,
        "packing": "masked",
        "learning_rate": LEARNING_RATE,
        **RUNS[name],
    }
    has_stages = recipe.pop(_CURRICULUM, False)
    tokens = int(1.2 * steps * TOKENS_PER_STEP)  # more than are needed, so that none is read twice
    if recipe["train_length"] == TRAINED:  # a row is one document
        kind, lengths = "whole", [TRAINED] * (tokens // TRAINED)
    else:
        kind, lengths = "long", draw_lengths(tokens, seed)
    long = write_documents(folder / f"{kind}-{seed}-{steps}.jsonl", lengths, 2 * seed)
    if "short_share" in recipe:
        count = int(recipe["short_share"] * tokens) // TRAINED
        path = folder / f"short-{seed}-{steps}.jsonl"
        recipe["short_data"] = [str(write_documents(path, [TRAINED] * count, 2 * seed + 1))]
    recipe |= {
        "model": str(MODEL),
        "data": [str(long)],
        "factor": FACTOR,
        "per_device_train_batch_size": TOKENS_PER_STEP // recipe["train_length"],
        "max_steps": steps,
        "warmup_steps": steps // 15,
        "save_steps": steps,
        "gradient_checkpointing": False,
        "max_loss_rise": math.inf,  # of parts of documents that lack what they repeat
        "loss": "torch",
        "seed": seed,
        "use_cpu": True,
        "output_dir": str(folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"),
    }
    if has_stages:
        middle = TARGET // 4
        recipe |= {"max_steps": steps // 2, "save_steps": steps // 2}
        recipe["stages"] = [
            {
                "factor": middle // TRAINED,
                "train_length": middle,
                "per_device_train_batch_size": TOKENS_PER_STEP // middle,
            },
            {"factor": FACTOR},
        ]
    return recipe


def run(name: str, seed: int, folder: Path, steps: int, base: list[float]) -> dict[str, float]:
    """Train and measure, or return what an earlier call measured.

    Args:
        name: Of `RUNS`.
        seed: Of the documents.
        folder: Where runs are kept.
        steps: Optimizer steps.
        base: Nats of the original model on short documents; see `short_nats`.
    """
    recipe = make_recipe(name, seed, folder, steps)
    out = Path(recipe["output_dir"])
    measured_file = out / "measured.json"
    if not measured_file.is_file():
        recipe_file = folder / f"{out.name}.yaml"
        atomic_files.atomic_write(recipe_file, yaml.safe_dump(recipe, sort_keys=False))
        settings, _ = parse_settings(["--config", str(recipe_file), "--resume", "auto"])
        model_folder = finetune(settings)
        assert model_folder is not None
        measured = measure(load_finetuned(model_folder), base)
        atomic_files.write_json(measured_file, measured)
    return json.loads(measured_file.read_text())


def measure(model: PreTrainedModel, base: list[float]) -> dict[str, float]:
    """Return recall at 256 and 2,048, the short price, and the perplexity of far repetitions."""
    nats = short_nats(model)
    differences = [ours - theirs for ours, theirs in zip(nats, base, strict=True)]
    return {
        "short price": math.expm1(sum(differences) / len(differences)),
        f"recall, {TRAINED:,}": tiny.recall_accuracy(model, TRAINED, SEQUENCES),
        f"recall, {TARGET:,}": tiny.recall_accuracy(model, TARGET, SEQUENCES),
        f"perplexity, {TARGET:,}": math.exp(sum(document_nats(model, [TARGET] * 12, start=1)) / 12),
    }


def short_nats(model: PreTrainedModel) -> list[float]:
    """Return the nats per scored token of short documents, half of them of each task."""
    return document_nats(model, [TRAINED] * 2 * SEQUENCES)


@torch.no_grad()
def document_nats(model: PreTrainedModel, lengths: list[int], start: int = 0) -> list[float]:
    """Return the nats per scored token of each document that no run trains on.

    Args:
        model: The model.
        lengths: Of the documents.
        start: 1 for repetitions alone, 0 for both tasks.
    """
    generator = torch.Generator().manual_seed(_MEASURING_SEED)
    nats = []
    for number, length in enumerate(lengths):
        if start or number % 2:
            ids, labels = tiny.repeat_batch(generator, 1, length)
        else:
            ids, labels = tiny.recall_batch(generator, 1, length, length // TOKENS_PER_PAIR)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        scored = labels[0, 1:] != -100
        loss = torch.nn.functional.cross_entropy(logits[scored], labels[0, 1:][scored])
        nats.append(loss.item())
    return nats


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return means over seeds with their intervals, and differences to the baseline, in Markdown.

    A difference is of runs on the same documents.
    """
    names = list(next(iter(results.values()))[0])
    lines = [
        "| | seeds | " + " | ".join(names) + " | short price, difference to YaRN |",
        "|:--|--:|" + "--:|" * (len(names) + 1),
    ]
    for run_name, runs in results.items():
        cells = [str(len(runs))]
        cells += [_mean(name, [result[name] for result in runs]) for name in names]
        price = [result["short price"] for result in runs]
        base = [result["short price"] for result in results[BASELINE][: len(runs)]]
        gains = [ours - theirs for ours, theirs in zip(price, base, strict=True)]
        cells.append("" if run_name == BASELINE else _mean("short price", gains))
        lines.append(f"| {run_name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(name: str, values: list[float]) -> str:
    """Return a mean and its 95% interval, by Student's t on the seeds."""
    interval = clustered_mean(values, range(len(values))).mean
    show = {"short price": "{:+.1%}", f"perplexity, {TARGET:,}": "{:.3g}"}.get(name, "{:.3f}")
    mean = show.format(interval.estimate)
    if not math.isfinite(interval.low):
        return mean
    return f"{mean} ({show.format(interval.low)} to {show.format(interval.high)})"


def render_readme(results: dict[str, list[dict[str, float]]], command: str, steps: int) -> str:
    """Return the README: the table and its definitions."""
    return f"""# Which ingredient pays: a tiny Llama, eight times as long

The model of `recipes/experiments/train_tiny.py` (361k parameters, trained on {TRAINED} tokens at
once) is fine-tuned to {TARGET:,} tokens on documents of {SHORTEST} to {TARGET:,}. Every run sees
{steps * TOKENS_PER_STEP:,} tokens ({steps} steps of {TOKENS_PER_STEP:,}), with AdamW at
{LEARNING_RATE:g}, falling to zero. Seeds change the documents.

{table(results)}

Means over seeds with 95% intervals by Student's t, which are wide for three seeds.

- **YaRN**: rows of {TARGET:,} tokens, documents one after another, each sees itself alone. Every
  other line adds what it says to this.
- **curriculum**: the first half of the steps in rows of {TARGET // 4}, with YaRN of factor
  {FACTOR // 4}.
- **PoSE**: rows of {TRAINED} tokens, a document each, whose positions skip up to {TARGET:,}.
- **short rows**: a quarter of the rows are of documents of {TRAINED} tokens; **distilled**: the
  loss there is the divergence from the original model.
- **together**: mixed windows, distilled, best-fit packing and the curriculum; **small steps**: at
  a quarter of the learning rate; **half short**: half of the rows are short, and the divergence
  counts four times.
- **short price**: how much larger the perplexity of {2 * SEQUENCES} short documents ({TRAINED}
  tokens, half recall, half repetition) is than the original model's.
- **recall**: the share of {8 * SEQUENCES} values that the model gives for their keys.
- **perplexity**: of the second occurrence of a segment of a third of the length. A model that
  looks back needs 1, one that guesses some 300.

All runs train on the tasks that are measured, on other documents. This shows nothing of how
ingredients rank on language.

Made by `{command}` with torch {torch.__version__} and transformers {version("transformers")}.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; run what is missing, measure, write, and print the table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("eval/results/tiny-ingredients"))
    parser.add_argument("--work", type=Path, default=Path("out/tiny-ingredients"))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    base = short_nats(AutoModelForCausalLM.from_pretrained(MODEL).eval())
    options.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {}
    names = [BASELINE, *(name for name in options.runs if name != BASELINE)]
    for seed in options.seeds:
        for name in names:
            result = run(name, seed, options.work, options.steps, base)
            results.setdefault(name, []).append(result)
            print(f"{name}, seed {seed}: {result}", file=sys.stderr)
    command = shlex.join(["python", "recipes/experiments/tiny_ingredients.py", *arguments])
    text = render_readme(results, command, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(options.out / "results.json", {"command": command, "results": results})
    atomic_files.atomic_write(options.out / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
