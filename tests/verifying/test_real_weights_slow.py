"""Test verdicts about SmolLM2-135M within its trained length, where rotations differ least."""

import pytest
import torch
from helpers import wrong_engines
from helpers.kept_predictions import kept_predictions
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.pretrained import demo_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEEDS, TOKENS = 2, 256
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e5,
    "factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {  # of the engine: rope_parameters, and what explains it
    "as asked": (YARN, "as-asked"),
    "scaling lost": ({"rope_type": "default", "rope_theta": 1e5}, "unscaled"),
    "attention factor dropped": ({**YARN, "attention_factor": 1.0}, "no-attention-factor"),
    "another theta": ({**YARN, "rope_theta": 1e4}, "theta-10000"),
    "linear for yarn": (
        {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
        "linear-4",
    ),
    "twice the factor": ({**YARN, "factor": 8.0}, "factor-8"),
    "original length lost": (
        {**YARN, "original_max_position_embeddings": 32768},
        "original-length-lost",
    ),
}
NUMERICS = {"float32": lambda model: model, "8 bits": wrong_engines.round_to_8_bits}


@pytest.mark.parametrize("numerics", NUMERICS)
def test_smollm2(numerics):
    folder = demo_folder()
    with kept_predictions():
        for name, (parameters, expected) in CASES.items():
            config = AutoConfig.from_pretrained(folder)
            config.rope_parameters = parameters
            engine = NUMERICS[numerics](
                AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
            )
            for seed in range(SEEDS):
                found = rope_patch.verify(
                    engine,
                    against=folder,
                    method="yarn",
                    factor=4,
                    tokens=TOKENS,
                    seed=seed,
                    dtype="float32",
                    progress=False,
                )
                print(f"{name}, seed {seed}:\n{found}", flush=True)
                assert found.verdict.explains == (expected,)
