"""Test verdicts about llama.cpp's own HTTP server, as asked and misconfigured."""

import pytest
import servers
from helpers.kept_predictions import kept_predictions
from servers import LONGEST, TINY

import rope_patch

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
from helpers.tiny_gguf import write_gguf

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SEEDS = 20
YARN = {
    "rope_scaling_type": "yarn",
    "rope_freq_scale": 1 / 4,
    "yarn_orig_ctx": 256,
    "yarn_ext_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
MSCALE = 1.138629436  # 1 + 0.1 ln 4
# The server's settings, those of the file, and what explains the engine.
CASES = {
    "as asked": (YARN, {}, "as-asked"),
    "as asked, 8 bits": (YARN, {"quantized": True}, "as-asked"),
    "flags forgotten": ({}, {}, "unscaled"),
    "attention factor dropped": (YARN, {"attention_factor": 1 / MSCALE}, "no-attention-factor"),
    "another theta": ({**YARN, "rope_freq_base": 1e6}, {}, "theta-1000000"),
    "linear for yarn": (
        {"rope_scaling_type": "linear", "rope_freq_scale": 1 / 4},
        {},
        "linear-4",
    ),
    "twice the factor": ({**YARN, "rope_freq_scale": 1 / 8}, {}, "factor-8"),
    "original length lost": ({**YARN, "yarn_orig_ctx": LONGEST}, {}, "original-length-lost"),
    "linear for yarn, 8 bits": (
        {"rope_scaling_type": "linear", "rope_freq_scale": 1 / 4},
        {"quantized": True},
        "linear-4",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def predictions():
    with kept_predictions():
        yield


@pytest.mark.parametrize("name", CASES)
def test_verdict_over_twenty_seeds(name, tmp_path):
    settings, of_file, expected = CASES[name]
    write_gguf(TINY, tmp_path / "tiny.gguf", LONGEST, **of_file)
    with servers.llama_cpp(tmp_path / "tiny.gguf", settings, tmp_path / "log.txt") as url:
        for seed in range(SEEDS):
            found = rope_patch.verify(
                url, against=TINY, method="yarn", factor=4, seed=seed, progress=False
            )
            print(found)
            assert found.verdict.explains == (expected,)
            assert found.exit_code == (0 if expected == "as-asked" else 1)
