"""Measure what each method makes of the tiny models' recall: in one pass, and with cached keys.

What: the models of train_tiny.py, trained on 256 tokens, are asked 8 keys a sequence at up to 2,048
tokens. One pass shows what a method is worth at a length; decoding with a cache shows how much of
that is left in use. Methods that follow the length are decoded once more with stale keys: cached
keys keep the rotation that they were cached with, as in transformers.

How, from the repository root (deterministic on its one thread, 20 minutes of one CPU core):

    python recipes/experiments/measure_tiny.py

writes eval/results/tiny: README.md with tables and definitions, and results.json.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import train_tiny as tiny
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import rope_patch
from rope_patch.patching.dynamic.hooks import LengthHooks
from rope_patch.statistics.intervals import accuracy
from rope_patch.transformers_api.forwards import cache_arguments
from rope_patch.utils import atomic_files
from rope_patch.utils.installation import version

ONE_PASS_LENGTHS = (256, 512, 1024, 2048)
DECODED_LENGTHS = (512, 1024)
STEP = 4  # tokens decoded at once, teacher forced
PAIRS, SEED = 8, 1234
GOOD = 0.9  # recall that counts as good
STATIC = ("linear", "ntk", "ntk-by-parts", "yarn", "llama3")
DYNAMIC = ("dynamic-linear", "dynamic-ntk-by-parts", "dynamic-yarn", "dynamic-llama3")
LONGROPE, EXACT = "longrope", "dynamic, growth exact"
LARGEST_FACTOR = ONE_PASS_LENGTHS[-1] / tiny.TRAINED_LENGTH
# Position maps, which need no factor; with their defaults.
MAPS = ("rerope", "leaky-rerope", "self-extend", "jet-long", "dca", "lampe", "lm-infinite")
UNTEMPERED = ("rerope", "self-extend", "jet-long", "dca")
# Transformers has these itself: their stale keys are the real thing.
NATIVE = (LONGROPE, EXACT)

Row = dict[str, dict[int, float]]  # group of columns: length: number


def requests(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return the keywords of `rope_patch.patch` per table row; none for the plain model.

    LongRoPE gets YaRN's stretches beyond the trained length, none below, and no attention factor,
    so that it shows only the effect of the switch between two sets.
    """
    with rope_patch.patch(model, "yarn", factor=tiny.FACTOR) as yarn:
        ((layer_type, geometry),) = yarn.geometries.items()
        stretch = (geometry.inv_freq() / yarn.frequencies[layer_type].inv_freq).tolist()
    longrope = {"factor": tiny.FACTOR, "long_factor": stretch, "attention_factor": 1.0}
    return {
        "plain": {},
        **{f"{name} ×{tiny.FACTOR:g}": {"method": name, "factor": tiny.FACTOR} for name in STATIC},
        LONGROPE: {"method": "longrope", **longrope},
        "dynamic": {"method": "dynamic"},
        EXACT: {"method": "dynamic", "growth": "exact"},
        **{name: {"method": name} for name in DYNAMIC},
        f"yarn ×{LARGEST_FACTOR:g}": {"method": "yarn", "factor": LARGEST_FACTOR},
        **{name: {"method": name} for name in MAPS},
        f"string on yarn ×{LARGEST_FACTOR:g}": {
            "method": "string",
            "on": f"yarn:{LARGEST_FACTOR:g}",
        },
        **{
            f"{name}, no temperature": {"method": name, "temperature": "none"}
            for name in UNTEMPERED
        },
    }


@contextlib.contextmanager
def without_key_rerotation(model: PreTrainedModel, native: bool) -> Iterator[PreTrainedModel]:
    """Yield a patched model, or transformers' equivalent, that does not re-rotate cached keys.

    Transformers has only two of the methods. For the others the patch stays, without the
    re-rotation of keys.
    """
    if native:
        # Unpatched, with the patched model's config. A new one each time, because transformers'
        # dynamic scaling keeps state from one sequence to the next.
        twin = type(model)(copy.deepcopy(model.config))
        twin.load_state_dict(model.state_dict())
        yield twin.eval()
    else:
        with mock.patch.object(LengthHooks, "_rerotate"):
            yield model


@torch.no_grad()
def decode(model: PreTrainedModel, input_ids: torch.Tensor, step: int = STEP) -> torch.Tensor:
    """Return logits `[B, S, V]`: the trained length in one pass, the rest in cached steps."""
    prompt, continuation = input_ids[:, : tiny.TRAINED_LENGTH], input_ids[:, tiny.TRAINED_LENGTH :]
    cache = DynamicCache(config=model.config)
    parts = [
        model(part, **cache_arguments(model, cache)).logits
        for part in [prompt, *continuation.split(step, 1)]
    ]
    return torch.cat(parts, dim=1)


def recall_and_log_likelihood(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Return the share of labelled tokens recalled, and all their log-likelihoods, `[N]`."""
    values = labels[:, 1:]
    scored = values != -100
    likely = logits[:, :-1][scored].log_softmax(-1).gather(1, values[scored][:, None])[:, 0]
    return tiny.correct_tokens(logits, labels).float().mean().item(), likely


def measure(model: PreTrainedModel, row: str, request: dict[str, Any], sequences: int) -> Row:
    """Return one row of a table."""
    result: Row = collections.defaultdict(dict)
    with rope_patch.patch(model, **request) if request else contextlib.nullcontext() as handle:
        for length in ONE_PASS_LENGTHS:
            answers = tiny.recalled(model, length, sequences, PAIRS, SEED)
            scores = accuracy(
                answers.flatten().double().tolist(),
                [n for n in range(sequences) for _ in range(PAIRS)],
            )
            result["one pass"][length] = scores.estimate
            result["one pass, low"][length] = scores.low
            result["one pass, high"][length] = scores.high
        for length in DECODED_LENGTHS:
            generator = torch.Generator().manual_seed(SEED)
            input_ids, labels = tiny.recall_batch(generator, sequences, length, PAIRS)
            result["cached"][length], truth = recall_and_log_likelihood(
                decode(model, input_ids), labels
            )
            result["log-likelihood, cached"][length] = truth.mean().item()
            if handle is None or not handle.method.is_length_dependent(handle.trained_length):
                continue
            with without_key_rerotation(model, row in NATIVE) as stale_model:
                result["stale"][length], stale = recall_and_log_likelihood(
                    decode(stale_model, input_ids), labels
                )
            result["log-likelihood, stale"][length] = stale.mean().item()
            result["change"][length] = (stale - truth).abs().mean().item()
    return result


def table(rows: dict[str, Row], columns: list[tuple[str, int]]) -> str:
    """Return one model's rows as a Markdown table, those that have any of the columns."""
    lines = [["", *(f"{group}, {n:,}" for group, n in columns)], [":--"] + ["--:"] * len(columns)]
    for name, row in rows.items():
        if any(group in row for group, _ in columns):
            lines.append([name, *(_cell(row, group, n) for group, n in columns)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row, group: str, length: int) -> str:
    """Return a number, with its interval where there is one."""
    if group not in row:
        return ""
    text = f"{row[group][length]:.3f}"
    if f"{group}, low" not in row:
        return text
    low, high = (row[f"{group}, {bound}"][length] for bound in ("low", "high"))
    return f"{text} ({low:.3f}–{high:.3f})"


def comparison(results: dict[str, dict[str, Row]]) -> str:
    """Return a comparison of stale with re-rotated keys over all models, rows and lengths."""
    cases = [
        (
            stale - row["cached"][n],
            row["cached"][n],
            f"{tiny.ARCHITECTURES[model].title}, {name}, {n:,} tokens",
        )
        for model, rows in results.items()
        for name, row in rows.items()
        for n, stale in row.get("stale", {}).items()
    ]
    lines = []
    for limit, is_good in (("at least", True), ("less than", False)):
        gains = [gain for gain, cached, _ in cases if (cached >= GOOD) == is_good]
        worse_count = sum(gain < -0.02 for gain in gains)
        better_count = sum(gain > 0.02 for gain in gains)
        lines.append(
            f"- Where right keys recall {limit} {GOOD}, {len(gains)} cases, stale keys recall less "
            f"in {worse_count} and more in {better_count}; the others are within 0.02."
        )
    for kind, (gain, cached, name) in (("loss", min(cases)), ("gain", max(cases))):
        lines.append(f"- The largest {kind}: {name}, from {cached:.3f} to {cached + gain:.3f}.")
    return "\n".join(lines)


def render_readme(results: dict[str, dict[str, Row]], sequences: int, command: str) -> str:
    """Return the README: tables and definitions."""
    one_pass = [("one pass", length) for length in ONE_PASS_LENGTHS]
    decoded = [(g, length) for g in ("cached", "stale", "change") for length in DECODED_LENGTHS]
    tables = (
        f"## {tiny.ARCHITECTURES[name].title}\n\n{table(rows, one_pass)}\n\n{table(rows, decoded)}"
        for name, rows in results.items()
    )
    return f"""# Recall of the tiny models under each method

The models of `recipes/experiments/train_tiny.py`, trained on 256 tokens at once, are asked for 8
values at the end of a sequence. Numbers are the share that they answer right, each query seeing
the true earlier answers. {sequences} sequences of {PAIRS} queries each, {sequences * PAIRS}
questions; in parentheses a 95% interval that counts the queries of a sequence as dependent. All
rows are asked the same questions.

- **one pass**: the whole sequence at once.
- **cached**: the first 256 tokens in one pass, the rest in steps of {STEP} with a cache. Where the
  frequencies follow the length, cached keys are turned on to the new ones; the tests hold that
  against keys that are kept unrotated and all rotated afresh at every step. It differs from one
  pass because hidden states of old tokens stay as they were computed.
- **stale**: the same, but cached keys stay as they were rotated when they came. For longrope and
  for dynamic with growth exact this is transformers' own model, of the same config; for the others,
  which it lacks, this package with the turning of keys left out.
- **change**: how far stale keys move the log-likelihood of a true answer from where right keys put
  it, in nats: the mean of absolute values, so up and down count alike.

Methods from rerope on are position maps with their defaults: each query compares with far keys at
positions that were trained. They have no factor, and "no temperature" leaves log n out.

longrope has YaRN's stretches for ×{tiny.FACTOR:g} as long factors, no short ones, and attention
factor 1. The dynamic methods grow in steps of 2^(1/4) unless exact. results.json has all of this,
and mean log-likelihoods.

{(chr(10) * 2).join(tables)}

## Stale keys against right ones

{comparison(results)}

The limit of {GOOD} was chosen after seeing the numbers. Why stale keys can recall more, where a
method is at its limit, was not looked into.

Made by `{command}` with torch {torch.__version__} and transformers {version("transformers")}.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; measure, write and print the tables."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("eval/results/tiny"))
    parser.add_argument(
        "--models", nargs="+", choices=tiny.ARCHITECTURES, default=[*tiny.ARCHITECTURES]
    )
    parser.add_argument("--sequences", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name in options.models:
        model = AutoModelForCausalLM.from_pretrained(f"tests/assets/tiny-{name}")
        rows = tqdm(requests(model).items(), desc=name, unit="row", file=sys.stderr)
        results[name] = {
            row: measure(model, row, request, options.sequences) for row, request in rows
        }
    command = shlex.join(["python", "recipes/experiments/measure_tiny.py", *arguments])
    text = render_readme(results, options.sequences, command)
    report = {
        "command": command,
        "sequences": options.sequences,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "results": results,
    }
    atomic_files.write_json(options.out / "results.json", report)
    atomic_files.atomic_write(options.out / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
