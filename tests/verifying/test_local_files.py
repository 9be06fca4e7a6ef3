"""Test that folders and GGUF files are verified as their own metadata rotates them."""

import json
import shutil

import pytest
import torch
from helpers.kept_predictions import verify
from helpers.wrong_engines import ASSETS, CONFIGS, FACTOR, TRAINED, YARN, configured

import rope_patch
from rope_patch.verifying import CannotVerify

pytest.importorskip("gguf")
from helpers.tiny_gguf import write_gguf

TINY = ASSETS / "tiny-llama"
LONGEST = round(FACTOR * TRAINED)
MSCALE = 1.138629436  # 1 + 0.1 ln 4


@pytest.mark.parametrize(
    ("of_file", "expected"),
    [
        ({}, "unscaled"),
        ({"scaling": YARN}, "as-asked"),
        ({"scaling": YARN, "quantized": True}, "as-asked"),
        ({"scaling": YARN, "attention_factor": 1 / MSCALE}, "no-attention-factor"),
        ({"scaling": {"rope_type": "linear", "factor": FACTOR}}, "linear-4"),
        ({"stretches": torch.full((16,), FACTOR)}, "linear-4"),
    ],
)
def test_gguf_file(tmp_path, of_file, expected):
    write_gguf(TINY, tmp_path / "tiny.gguf", LONGEST, **of_file)
    assert verify(tmp_path / "tiny.gguf").verdict.explains == (expected,)


def test_gguf_file_is_compared_with_another(tmp_path):
    write_gguf(TINY, tmp_path / "scaled.gguf", LONGEST, scaling=YARN)
    write_gguf(TINY, tmp_path / "plain.gguf", TRAINED)
    scaled, plain = tmp_path / "scaled.gguf", tmp_path / "plain.gguf"
    options = {"factor": FACTOR, "progress": False}
    result = rope_patch.verify(scaled, against=str(plain), method="yarn", **options)
    assert result.verdict.explains == ("as-asked",)


def test_gguf_file_that_llama_cpp_rotates_otherwise_is_refused(tmp_path, monkeypatch):
    """llama.cpp has a graph of each architecture that transformers reads: take Llama's away."""
    write_gguf(TINY, tmp_path / "tiny.gguf", LONGEST, scaling=YARN)
    monkeypatch.setattr("rope_patch.verifying.engine_detection.what_graph_reads", lambda name: None)
    with pytest.raises(CannotVerify, match=r"'llama'.* not known"):
        verify(tmp_path / "tiny.gguf")


def test_folder(tmp_path):
    parameters, expected = CONFIGS["attention factor dropped"]
    configured("llama", parameters).save_pretrained(tmp_path)
    assert verify(str(tmp_path)).verdict.explains == (expected,)


def test_folder_that_save_wrote(tmp_path):
    model = rope_patch.load(TINY, "dynamic-yarn")
    rope_patch.save(model, tmp_path)
    assert verify(tmp_path, method="dynamic-yarn", factor=None)


def test_weights_that_mlx_quantised_are_refused(tmp_path):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotVerify, match=r"4 bits by mlx-lm.*--dequantize"):
        verify(tmp_path)


def test_other_files_are_refused():
    with pytest.raises(CannotVerify, match=r"\.gguf"):
        verify(TINY / "config.json")
