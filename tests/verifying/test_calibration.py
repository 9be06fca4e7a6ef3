"""Test over many seeds that no verdict is false: each known rotation is an engine's, in its turn.

Three numerics are tried. Where "cannot tell" is a fair answer, it counts as one. Engines rotate by
transformers' own configs.
"""

import itertools
from collections import Counter

import pytest
import torch
from helpers import wrong_engines
from helpers.kept_predictions import kept_predictions
from helpers.wrong_engines import ASSETS, CONFIGS, FACTOR, ODD_CONFIGS, YARN, configured

import rope_patch

SEEDS = 20
THETAS = (1e5, 1e6, 5e6, 1e7)
NUMERICS = {
    "float32": lambda model: model,
    "bfloat16": lambda model: wrong_engines.cast(model, torch.bfloat16),
    "8 bits": wrong_engines.round_to_8_bits,
}


def make_engines(name):
    """Return functions that make engines, by what explains them; None for no hypothesis."""

    def maker(*arguments):
        return lambda: configured(name, *arguments)

    engines = [(expected, maker(parameters)) for parameters, expected in CONFIGS.values()]
    engines += [(f"theta-{theta:.0f}", maker({**YARN, "rope_theta": theta})) for theta in THETAS]
    engines += [(None, maker(parameters)) for parameters in ODD_CONFIGS.values()]
    if name == "gemma3":
        engines.append(("all-layers", maker(YARN, {**YARN, "rope_theta": 1e3})))
        return engines
    engines.append(("scaled-twice", lambda: wrong_engines.scaled_twice(name)))
    engines.append(("table-wraps", lambda: wrong_engines.short_table(name)))
    engines.append(("table-clamps", lambda: wrong_engines.short_table(name, wraps=False)))
    return engines


def count_verdicts(name, numerics, engines, seeds):
    """Return how many verdicts are right, open and false; print the false ones."""
    counts = Counter()
    made = [(expected, NUMERICS[numerics](make())) for expected, make in engines]
    for seed, (expected, engine) in itertools.product(seeds, made):
        found = rope_patch.verify(
            engine,
            against=ASSETS / f"tiny-{name}",
            method="yarn",
            factor=FACTOR,
            seed=seed,
            progress=False,
        )
        if found.status == "cannot-tell":
            counts["open" if expected is not None else "rightly open"] += 1
        elif expected in found.verdict.explains:
            counts["right"] += 1
        else:
            counts["false"] += 1
            print(f"false: seed {seed}, expected {expected}, got\n{found}")
    return counts


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_no_verdict_is_false_over_twenty_seeds(name):
    engines = make_engines(name)
    with kept_predictions():
        for numerics in NUMERICS:
            counts = count_verdicts(name, numerics, engines, range(SEEDS))
            print(f"{name}, {numerics}: {dict(counts)}", flush=True)
            assert counts["false"] == 0
            assert counts["right"] >= 0.9 * SEEDS * (len(engines) - len(ODD_CONFIGS))
