"""Test verdicts about vLLM on a CPU, as asked and misconfigured by `--hf-overrides`."""

import json
import subprocess
import sys

import pytest
import servers
from helpers.kept_predictions import kept_predictions
from servers import LONGEST, TINY, YARN

import rope_patch

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SEEDS = 20
# The override of rope_parameters, the dtype, and what explains the engine.
CASES = {
    "as asked": (YARN, "float32", "as-asked"),
    "as asked, bfloat16": (YARN, "bfloat16", "as-asked"),
    "scaling lost": (None, "float32", "unscaled"),
    "attention factor dropped": ({**YARN, "attention_factor": 1.0}, "float32", None),
    "attention factor dropped, in mscale": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "float32",
        None,
    ),
    "another theta": ({**YARN, "rope_theta": 1e6}, "float32", "theta-1000000"),
    "linear for yarn": (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        "float32",
        "linear-4",
    ),
    "twice the factor": ({**YARN, "factor": 8.0}, "float32", "factor-8"),
    "original length lost": (
        {**YARN, "original_max_position_embeddings": LONGEST},
        "float32",
        "original-length-lost",
    ),
    "twice the factor, bfloat16": ({**YARN, "factor": 8.0}, "bfloat16", "factor-8"),
}


@pytest.fixture(scope="module", autouse=True)
def predictions():
    with kept_predictions():
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Yield a running server's address, and what explains it."""
    parameters, dtype, expected = CASES[request.param]
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with servers.vllm(parameters, log, dtype=dtype) as url:
        yield url, expected


def test_verdict_over_twenty_seeds(case):
    url, expected = case
    for seed in range(SEEDS):
        found = rope_patch.verify(
            url, against=TINY, method="yarn", factor=4, seed=seed, progress=False
        )
        print(found)
        assert found.verdict.explains == (expected,)
        assert found.exit_code == (0 if expected == "as-asked" else 1)


def test_command(case):
    url, expected = case
    command = [sys.executable, "-m", "rope_patch", "verify", url, "--against", TINY]
    result = subprocess.run(
        [*command, "--method", "yarn", "--factor", "4", "--json"], capture_output=True, text=True
    )
    assert result.returncode == (0 if expected == "as-asked" else 1), result.stderr
    assert json.loads(result.stdout)["explains"] == [expected]
