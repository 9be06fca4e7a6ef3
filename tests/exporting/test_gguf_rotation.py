"""Test that loading, verifying and diagnosing read the rotation that a GGUF file names."""

from pathlib import Path

import engine_formulas
import numpy as np
import pytest

import rope_patch

gguf = pytest.importorskip("gguf")

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"

SIZE, HEADS, TRAINED = 16, 2, 64
STRETCHES = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.5, 8.0]
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
BETAS = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}


def write(folder, keys, stretches=None, architecture="llama"):
    """Write a tiny random model as a GGUF file and return its name."""
    width, rng = SIZE * HEADS, np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(folder / "tiny.gguf"), architecture)
    for name, value in {"context_length": TRAINED, "block_count": 1, **keys}.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{architecture}.{name}", value)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(width)
    parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    names = ["token_embd", "output", *(f"blk.0.{part}" for part in parts)]
    for name in names:
        writer.add_tensor(f"{name}.weight", rng.normal(size=(width, width)).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    if architecture == "qwen2":
        for part in parts[:3]:
            writer.add_tensor(f"blk.0.{part}.bias", np.zeros(width, np.float32))
    if stretches is not None:
        writer.add_tensor("rope_freqs.weight", np.array(stretches, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "tiny.gguf"


def as_llama_cpp(keys, stretches):
    """Return frequencies and attention factor as llama.cpp's restated code has them."""
    file = {"size": SIZE, "rope.freq_base": 1e4, "context_length": TRAINED, **keys}
    if "rope.scale_linear" in file:
        file["rope.scaling.factor"] = file["rope.scale_linear"]
    if stretches is not None:
        file["rope_freqs"] = np.array(stretches)
    return engine_formulas.rotate_gguf(file, ["-c", str(TRAINED)])


@pytest.mark.parametrize(
    ("keys", "stretches"),
    [
        ({}, None),
        (YARN, None),
        ({**YARN, **BETAS}, None),
        ({**YARN, "rope.scaling.attn_factor": 1.5}, None),
        (LINEAR, None),
        ({**LINEAR, "rope.scaling.attn_factor": 1.5}, None),
        ({"rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 4.0}, None),
        ({"rope.scaling.attn_factor": 1.5}, None),
        ({**LINEAR, "rope.scaling.type": "none"}, None),
        ({}, STRETCHES),
        ({**LINEAR, "rope.scaling.attn_factor": 1.5}, STRETCHES),
    ],
)
def test_the_files_rotation_is_read(tmp_path, keys, stretches):
    name = write(tmp_path, keys, stretches)
    inv_freq, factor = as_llama_cpp(keys, stretches)
    model = rope_patch.load(tmp_path, "linear", factor=2.0, start="running", gguf_file=name)
    rope_patch.unpatch(model)
    rotary = model.model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), inv_freq, rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(factor, rel=1e-6)


def test_methods_extend_the_files_rotation(tmp_path):
    name = write(tmp_path, YARN)
    handle = rope_patch.current(rope_patch.load(tmp_path, "yarn", factor=8.0, gguf_file=name))
    assert handle.trained_length == 16  # the file's YaRN was not trained in
    name = write(tmp_path, {}, STRETCHES)
    handle = rope_patch.current(rope_patch.load(tmp_path, "linear", factor=2.0, gguf_file=name))
    inv_freq, _ = as_llama_cpp({"rope.scaling.factor": 2.0}, STRETCHES)
    np.testing.assert_allclose(handle.frequencies[None].inv_freq.numpy(), inv_freq, rtol=1e-6)


def test_diagnosis_sees_the_files_rotation(tmp_path):
    name = write(tmp_path, YARN)
    assert rope_patch.diagnose(tmp_path, gguf_file=name).to_dict() != (
        rope_patch.diagnose(tmp_path, gguf_file=write(tmp_path, {})).to_dict()
    )


@pytest.mark.parametrize(
    ("keys", "stretches", "architecture", "fact"),
    [
        ({"rope.scaling.type": "longrope"}, None, "llama", "none, linear or yarn"),
        ({**YARN, "rope.scaling.yarn_ext_factor": 0.0}, None, "llama", "yarn_ext_factor = 0"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, None, "llama", "yarn_log_multiplier"),
        (YARN, STRETCHES, "llama", "tensor"),
        ({}, STRETCHES[:4], "llama", "4 numbers in rope_freqs, expected 8"),
        ({}, STRETCHES, "qwen2", "rope_freqs beside 'qwen2'"),
    ],
)
def test_what_no_config_says_is_refused(tmp_path, keys, stretches, architecture, fact):
    name = write(tmp_path, keys, stretches, architecture)
    with pytest.raises(rope_patch.Refused, match=fact):
        rope_patch.load(tmp_path, "ntk", factor=2.0, gguf_file=name)
    with pytest.raises(rope_patch.Refused, match=fact):
        rope_patch.diagnose(tmp_path, gguf_file=name)
    with pytest.raises(rope_patch.Refused, match=fact):
        rope_patch.verify(tmp_path / name, against=TINY)
