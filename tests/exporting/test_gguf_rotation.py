"""Test that the rotation of a GGUF file is read, and written into a copy of it."""

from pathlib import Path

import engine_formulas
import numpy as np
import pytest
import torch

import rope_patch
from rope_patch.exporting import patch_gguf
from rope_patch.pretrained.loading import read_model

gguf = pytest.importorskip("gguf")
write_gguf = pytest.importorskip("helpers.tiny_gguf").write_gguf  # it needs gguf, too

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


# -- files that are patched ------------------------------------------------------------------------


def keys_of(path):
    reader = gguf.GGUFReader(str(path))
    return {name: field.contents() for name, field in reader.fields.items() if name[0] != "G"}


def patched(tmp_path, keys, stretches, method, **request):
    """Return the new file, and the patched model's frequencies and attention factor."""
    source, new = tmp_path / write(tmp_path, keys, stretches), tmp_path / "new.gguf"
    written = patch_gguf(source, new, method, **request)
    model = rope_patch.load(source, method, **request)
    assert written.length == rope_patch.current(model).length
    rotary = model.model.rotary_emb
    return new, rotary.inv_freq.double().numpy(), rotary.attention_scaling


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("yarn", {"factor": 8.0}),
        ("yarn", {"length": 100, "beta_fast": 16.0, "attention_factor": 1.0}),
        ("linear", {"factor": 2.0}),
        ("ntk", {"factor": 4.0}),
        ("abf", {"factor": 4.0}),
    ],
)
@pytest.mark.parametrize("keys", [{}, YARN, {**LINEAR, **BETAS}, {"rope.scale_linear": 4.0}])
def test_a_patched_file_rotates_as_the_patched_model(tmp_path, keys, method, request_):
    request = {"start": "unscaled", "trained_length": 16, **request_}
    new, inv_freq, factor = patched(tmp_path, keys, None, method, **request)
    named = keys_of(new)
    rope = {name.partition(".")[2]: value for name, value in named.items() if ".rope." in name}
    file = {"size": SIZE, "context_length": named["llama.context_length"], **rope}
    arguments = ["-c", str(named["llama.context_length"])]
    own, own_factor = engine_formulas.rotate_gguf(file, arguments)
    np.testing.assert_allclose(inv_freq, own, rtol=2e-6)
    assert factor == pytest.approx(own_factor, rel=1e-6)
    old = keys_of(tmp_path / "tiny.gguf")
    changes = {name for name in {*old, *named} if old.get(name) != named.get(name)}
    assert all(".rope." in name or name.endswith(".context_length") for name in changes)


def test_a_patched_file_keeps_the_weights_to_the_bit(tmp_path):
    write_gguf(TINY, tmp_path / "tiny.gguf", 256, quantized=True, with_tokenizer=True)
    patch_gguf(tmp_path / "tiny.gguf", tmp_path / "new.gguf", "yarn", factor=4.0)
    old, new = (gguf.GGUFReader(str(tmp_path / f"{name}.gguf")) for name in ("tiny", "new"))
    assert [t.name for t in old.tensors] == [t.name for t in new.tensors]
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert before.tensor_type == after.tensor_type
        assert before.data.tobytes() == after.data.tobytes()
    plain = read_model(tmp_path / "new.gguf")
    asked = rope_patch.load(tmp_path / "tiny.gguf", "yarn", factor=4.0)
    tokens = torch.arange(400)[None] % 250
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, asked(tokens).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("method", ["linear", "abf"])
def test_stretches_stay_beside_a_theta_or_one_factor(tmp_path, method):
    new, inv_freq, _ = patched(tmp_path, {}, STRETCHES, method, factor=2.0)
    keys = keys_of(new)
    file = {"rope.scaling.factor": keys.get("llama.rope.scaling.factor", 1.0)}
    file["rope.freq_base"] = keys["llama.rope.freq_base"]
    own, _ = as_llama_cpp(file, STRETCHES)
    np.testing.assert_allclose(inv_freq, own, rtol=2e-6)


@pytest.mark.parametrize(
    ("method", "options", "stretches", "fact"),
    [
        ("dynamic-yarn", {}, None, "no config has a form"),
        ("self-extend", {}, None, "position map|positions"),
        (
            "longrope",
            {"long_factor": STRETCHES, "short_factor": STRETCHES},
            None,
            "keys of a GGUF file say a theta, linear",
        ),
        ("yarn", {}, STRETCHES, "a stretch for each pair"),
    ],
)
def test_what_no_keys_say_is_refused_and_nothing_is_written(
    tmp_path, method, options, stretches, fact
):
    source = tmp_path / write(tmp_path, {}, stretches)
    with pytest.raises(rope_patch.Refused, match=fact):
        patch_gguf(source, tmp_path / "new.gguf", method, factor=2.0, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_patched_file_is_a_new_one(tmp_path):
    source = tmp_path / write(tmp_path, {})
    with pytest.raises(rope_patch.Refused, match="exists already"):
        patch_gguf(source, source, "yarn", factor=2.0)
    with pytest.raises(rope_patch.Refused, match=r"ends with \.gguf"):
        patch_gguf(source, tmp_path / "folder", "yarn", factor=2.0)


def test_a_file_is_a_model_like_any_other(tmp_path, caplog):
    caplog.set_level("INFO", logger="rope_patch")
    write_gguf(TINY, tmp_path / "tiny.gguf", 256, quantized=True, with_tokenizer=True)
    file = tmp_path / "tiny.gguf"
    by_path = rope_patch.load(file, "yarn", factor=4.0)
    assert "GB of weights, most of them Q8_0, are expanded to" in caplog.text
    by_name = rope_patch.load(tmp_path, "yarn", factor=4.0, gguf_file="tiny.gguf")
    for name, tensor in by_name.state_dict().items():
        assert torch.equal(by_path.state_dict()[name], tensor), name
    assert f"rope_patch.load('{file}'" in str(rope_patch.diagnose(file, length=1024))
    request = {"tasks": ["rp_recall_ll"], "samples": 6, "dtype": "float32"}
    request |= {"out": str(tmp_path / "report"), "controls": False}
    measured = rope_patch.compare(file, ["yarn"], factor=4, lengths=[512], **request)
    assert "tiny.gguf" in (tmp_path / "report" / "report.md").read_text()
    assert measured is not None
    with pytest.raises(ValueError, match="no such file"):
        rope_patch.load(tmp_path / "other.gguf", "yarn", factor=4.0)
