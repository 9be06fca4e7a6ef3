"""Test verdicts about vLLM on a CPU, as asked and misconfigured by `--hf-overrides`."""

import json
import subprocess
import sys

import pytest
import servers
from helpers.kept_predictions import kept_predictions
from servers import ASSETS, LONGEST, YARN

import rope_patch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SEEDS = 20
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
WINDOWS = {"rope_type": "default", "rope_theta": 1e3}
# The model, the override of rope_parameters, the dtype, and what explains the engine.
CASES = {
    "as asked": ("llama", YARN, "float32", "as-asked"),
    "as asked, bfloat16": ("llama", YARN, "bfloat16", "as-asked"),
    "scaling lost": ("llama", None, "float32", "unscaled"),
    "attention factor dropped": (
        "llama",
        {**YARN, "attention_factor": 1.0},
        "float32",
        "no-attention-factor",
    ),
    "attention factor dropped by mscale": (
        "llama",
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "float32",
        "no-attention-factor",
    ),
    "another theta": ("llama", {**YARN, "rope_theta": 1e6}, "float32", "theta-1000000"),
    "linear for yarn": ("llama", LINEAR, "float32", "linear-4"),
    "twice the factor": ("llama", {**YARN, "factor": 8.0}, "float32", "factor-8"),
    "twice the factor, bfloat16": ("llama", {**YARN, "factor": 8.0}, "bfloat16", "factor-8"),
    "original length lost": (
        "llama",
        {**YARN, "original_max_position_embeddings": LONGEST},
        "float32",
        "original-length-lost",
    ),
    "as asked, windows": (
        "gemma3",
        {"full_attention": YARN, "sliding_attention": WINDOWS},
        "float32",
        "as-asked",
    ),
    "windows scaled, too": (
        "gemma3",
        {"full_attention": YARN, "sliding_attention": {**YARN, "rope_theta": 1e3}},
        "float32",
        "all-layers",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Yield a running server's address, its model, and what explains it."""
    name, parameters, dtype, expected = CASES[request.param]
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    model = ASSETS / f"tiny-{name}"
    with kept_predictions(), servers.vllm(model, parameters, log, dtype=dtype) as url:
        yield url, model, expected


def test_verdict_over_twenty_seeds(case):
    url, model, expected = case
    for seed in range(SEEDS):
        found = rope_patch.verify(
            url, against=model, method="yarn", factor=4, seed=seed, progress=False
        )
        print(found)
        assert found.verdict.explains == (expected,)
        assert found.exit_code == (0 if expected == "as-asked" else 1)


def test_command(case):
    url, model, expected = case
    command = [sys.executable, "-m", "rope_patch", "verify", url, "--against", model]
    result = subprocess.run(
        [*command, "--method", "yarn", "--factor", "4", "--json"], capture_output=True, text=True
    )
    assert result.returncode == (0 if expected == "as-asked" else 1), result.stderr
    assert json.loads(result.stdout)["explains"] == [expected]
