"""Test loading of patched models from folders and from GGUF files."""

from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_models import (
    FAMILIES,
    SIZES,
    TARGET,
    TRAINED,
    assert_close,
    logits,
    make_model,
)

import rope_patch


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Save unpatched checkpoints: every family, several shards, and bfloat16."""
    root = tmp_path_factory.mktemp("checkpoints")
    make_model().save_pretrained(root / "sharded", max_shard_size="20KB")
    make_model().bfloat16().save_pretrained(root / "bfloat16")
    for family in FAMILIES:
        make_model(family).save_pretrained(root / family)
    return root


def make_patched(family="llama", method="yarn", **options):
    model = make_model(family)
    rope_patch.patch(model, method, factor=4, **options)
    return model


@pytest.mark.parametrize("name", ["sharded", *FAMILIES])
def test_load_matches_from_pretrained_and_patch(originals, name):
    family = name if name in FAMILIES else "llama"
    loaded = rope_patch.load(str(originals / name), "yarn", factor=4)
    assert logits(loaded).equal(logits(make_patched(family)))
    assert not loaded.training
    assert rope_patch.current(loaded).length == loaded.config.max_position_embeddings == TARGET
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(logits(make_model(family)))


def test_load_accepts_every_argument_of_patch(originals):
    loaded = rope_patch.load(
        originals / "gemma3",
        "yarn",
        length=TARGET,
        trained_length=TRAINED // 2,
        layer_types=["sliding_attention"],
        kernels="hf",
        beta_fast=16,
        attn_implementation="eager",
    )
    handle = rope_patch.current(loaded)
    assert (handle.factor, handle.trained_length, list(handle.frequencies)) == (
        8,
        TRAINED // 2,
        ["sliding_attention"],
    )
    assert handle.method.options()["beta_fast"] == 16
    assert loaded.config._attn_implementation == "eager"


def test_load_uses_the_checkpoint_dtype_by_default(originals):
    automatic = rope_patch.load(originals / "bfloat16", "yarn", factor=4)
    assert automatic.dtype == torch.bfloat16
    assert automatic.model.rotary_emb.inv_freq.dtype == torch.float32
    float32_model = rope_patch.load(originals / "bfloat16", "yarn", factor=4, dtype=torch.float32)
    assert float32_model.dtype == torch.float32


@pytest.mark.parametrize("first", ["linear", "yarn", "ntk", "abf", "llama3", "proportional"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_method_starts_from_the_original_rotation(family, first, tmp_path):
    rope_patch.save(make_patched(family, first), tmp_path)
    loaded = rope_patch.load(tmp_path, "ntk-by-parts", factor=4)
    assert logits(loaded).equal(logits(make_patched(family, "ntk-by-parts")))
    rope_patch.unpatch(loaded)
    assert logits(loaded).equal(logits(make_model(family)))


def test_options_without_a_method_are_refused(originals, tmp_path):
    rope_patch.save(make_patched(), tmp_path)
    for change in ({"factor": 2}, {"length": 128}, {"trained_length": 32}):
        with pytest.raises(ValueError, match="goes with a method"):
            rope_patch.load(tmp_path, **change)
    with pytest.raises(ValueError, match="beta_fast goes with a method"):
        rope_patch.load(tmp_path, beta_fast=16)
    with pytest.raises(ValueError, match=r"name a method.*llama has no rope_patch.json"):
        rope_patch.load(originals / "llama")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """Write the tiny Llama in the form of llama.cpp's converter."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = make_model()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(TRAINED)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(SIZES["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbouring dimensions
            half = SIZES["head_dim"] // 2
            tensor = tensor.unflatten(0, (-1, 2, half)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file_loads_and_saves(gguf_file, tmp_path):
    folder, name = gguf_file.parent, gguf_file.name
    loaded = rope_patch.load(folder, "yarn", factor=4, gguf_file=name, dtype=torch.float32)
    assert_close(logits(loaded), logits(make_patched()))
    rope_patch.save(loaded, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(logits(native), logits(loaded))
    rope_patch.unpatch(loaded)
    assert_close(logits(loaded), logits(make_model()))


def test_a_file_that_holds_no_model_is_refused(gguf_file):
    config = Path(rope_patch.__file__)
    with pytest.raises(ValueError, match=r"is a file: expected a GGUF file"):
        rope_patch.load(config, "yarn", factor=4)
    with pytest.raises(ValueError, match=r"holds no other\.gguf.*found tiny\.gguf"):
        rope_patch.load(gguf_file.parent, "yarn", factor=4, gguf_file="other.gguf")
