"""A tokenizer, files of random documents, and uninterrupted runs to compare with."""

import json
import random

import pytest
from packed_rows import END, TINY
from training_runs import VARIANTS, run
from transformers import AutoTokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def source(tmp_path):
    """Write a file of different documents of given lengths, end token included."""

    def write(name, lengths):
        rng = random.Random(name)
        lines = [[rng.randrange(3, 512) for _ in range(n - 1)] + [END] for n in lengths]
        path = tmp_path / name
        path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in lines))
        return str(path), lines

    return write


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory):
    """Run a recipe's variant without interruption, once a session; return the run's folder."""
    folders = {}

    def run_once(recipe, variant="plain", **changes):
        if (recipe, variant) not in folders:
            folder = tmp_path_factory.mktemp(f"{recipe}-{variant}") / "run"
            run(recipe, folder, **VARIANTS.get(variant, {}), **changes)
            folders[recipe, variant] = folder
        return folders[recipe, variant]

    return run_once
