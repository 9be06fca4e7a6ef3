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
    engines.append(("doubled-positions", lambda: wrong_engines.doubled_positions(name)))
    engines.append(("other-pairs", lambda: wrong_engines.paired_as_neighbours(name)))
    engines += [(f"theta-{theta:.0f}", maker({**YARN, "rope_theta": theta})) for theta in THETAS]
    engines += [(None, maker(parameters)) for parameters in ODD_CONFIGS.values()]
    if name == "gemma3":
        # transformers reads `truncate` from the wrong level where there are several layer types.
        engines = [each for each in engines if each[0] != "truncate"]
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


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": FACTOR}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": FACTOR},
    **{"short_factor": [1.0] * 16, "long_factor": [1.0] * 4 + [FACTOR] * 12},
    "original_max_position_embeddings": wrong_engines.TRAINED,
}
CONFIG_ALONE = {"method": None}
RIGHT = {  # the checkpoint's rope_parameters, the request, and the engine's rope_parameters
    "plain": (None, CONFIG_ALONE, None),
    "yarn": (None, {"method": "yarn", "factor": FACTOR}, YARN),
    "linear": (None, {"method": "linear", "factor": FACTOR}, LINEAR),
    "yarn of the checkpoint": (YARN, CONFIG_ALONE, YARN),
    "longrope of the checkpoint": (LONGROPE, CONFIG_ALONE, LONGROPE),
    "yarn on a trained yarn": (
        YARN,
        {"method": "yarn", "factor": 2.0, "start": "running", "tokens": 512},
        {**YARN, "factor": 2 * FACTOR},
    ),
    "another original length": (
        None,
        {"method": "yarn", "factor": 2 * FACTOR, "trained_length": wrong_engines.TRAINED // 2},
        {
            **{**YARN, "factor": 2 * FACTOR},
            "original_max_position_embeddings": wrong_engines.TRAINED // 2,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_no_engine_that_is_right_is_called_wrong(name):
    """Three families make 420 verdicts: seven requests, twenty seeds, numerics by turns."""

    def model(parameters):
        return wrong_engines.plain(name) if parameters is None else configured(name, parameters)

    statuses = Counter()
    for own, request, engine in RIGHT.values():
        with kept_predictions():
            for seed, numerics in zip(range(SEEDS), itertools.cycle(NUMERICS)):
                found = rope_patch.verify(
                    NUMERICS[numerics](model(engine)),
                    against=model(own),
                    seed=seed,
                    progress=False,
                    **request,
                )
                statuses[found.status] += 1
                assert found.status != "another", found
    print(f"{name}: {dict(statuses)}", flush=True)
    assert statuses["as-asked"] >= 0.95 * statuses.total()


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
            assert counts["right"] >= 0.95 * SEEDS * (len(engines) - len(ODD_CONFIGS))
