"""Test that restore gives a model the frequencies of one that transformers builds anew."""

import copy

import pytest
import torch
from helpers.tiny_models import (
    FAMILIES,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_differs,
    logits,
    make_config,
    make_model,
)

import rope_patch

THETA = {"rope_theta": 1e4}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
SCALINGS = {
    "default": {"rope_type": "default", **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **THETA, **ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **THETA},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "long_factor": LONG_FACTOR,
        "short_factor": SHORT_FACTOR,
        **THETA,
        **ORIGINAL,
    },
}


def scaled(name):
    return make_model("llama", rope_parameters=dict(SCALINGS[name]), max_position_embeddings=TARGET)


def rotary_buffers(model):
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}


def assert_same_buffers(model, expected):
    buffers = rotary_buffers(model)
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name]), name


def zero(model):
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()
    return model


def through_meta(model):
    """Give the model new memory, as sharded loaders do, and load its checkpoint into it."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.fill_(float("nan"))  # to_empty may by chance return the old memory
    model.load_state_dict(weights)
    return model


def unscaled(model):
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(1.0 / (1e4 ** (torch.arange(0, 16, 2) / 16)))
    return model


@pytest.mark.parametrize("lose", [zero, through_meta, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_a_newly_built_model(family, lose):
    fresh = rotary_buffers(make_model(family))
    model = make_model(family)
    lose(model)
    assert set(rope_patch.restore(model)) == fresh.keys()
    assert_same_buffers(model, fresh)
    assert rope_patch.restore(model) == []


@pytest.mark.parametrize("lose", [zero, through_meta, unscaled])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_of_a_newly_built_model(scaling, lose):
    before = logits(scaled(scaling))
    model = lose(scaled(scaling))
    rope_patch.restore(model)
    assert_same_buffers(model, rotary_buffers(scaled(scaling)))
    assert torch.equal(logits(model), before)


def test_healthy_model_is_left_alone():
    model = make_model()
    buffers = dict(model.named_buffers())
    assert rope_patch.restore(model) == []
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())


def test_meta_buffer_beside_real_weights():
    model = make_model()
    before = logits(model)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to("meta")
    assert rope_patch.restore(model) == ["model.rotary_emb.inv_freq"]
    assert torch.equal(logits(model), before)


def test_model_without_memory_is_refused():
    model = make_model().to("meta")
    with pytest.raises(ValueError, match=r"to_empty.*restore it afterwards"):
        rope_patch.restore(model)
    with pytest.raises(TypeError, match="expected a transformers model"):
        rope_patch.restore(make_config())


def test_config_edited_after_loading_takes_effect():
    model = make_model()
    model.config.rope_parameters = dict(SCALINGS["yarn"])
    model.config.max_position_embeddings = TARGET
    lost = rope_patch.restore(model)
    assert "model.rotary_emb.attention_scaling" in lost
    assert torch.equal(logits(model), logits(scaled("yarn")))


LONGROPE = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
METHODS = [("yarn", {}), ("dynamic-yarn", {}), ("longrope", LONGROPE)]


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize("lose", [zero, unscaled])
def test_patched_model_keeps_its_patch(method, options, lose):
    model = make_model()
    plain = logits(model)
    handle = rope_patch.patch(model, method, factor=4, **options)
    patched, buffers = logits(model), rotary_buffers(model)
    lose(model)
    lost = rope_patch.restore(model)
    assert "model.rotary_emb.original_inv_freq" in lost or lose is unscaled
    assert_same_buffers(model, buffers)
    assert torch.equal(logits(model), patched)
    assert_differs(patched, plain)
    assert rope_patch.restore(model) == []
    handle.undo()
    assert torch.equal(logits(model), plain)


def test_casts_keep_the_patch_after_in_place_writes():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    patched = logits(model)
    zero(model)
    model.float()  # moves and casts set the exact values again
    assert torch.equal(logits(model), patched)


@pytest.mark.parametrize("lose", [zero, through_meta])
def test_undo_restores_what_was_lost_before_the_patch(lose):
    model = make_model()
    plain = logits(model)
    lose(model)
    with rope_patch.patch(model, "yarn", factor=4):
        patched = logits(model)
        assert "model.rotary_emb.inv_freq" in rope_patch.restore(model)
        assert torch.equal(logits(model), patched)
    assert torch.equal(logits(model), plain)


def test_undo_stays_bit_exact_without_losses():
    model = make_model()
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * (1 + 1e-7)  # as another device rounds
    before = rotary.inv_freq.clone()
    with rope_patch.patch(model, "yarn", factor=4):
        assert rope_patch.restore(model) == []
    assert torch.equal(rotary.inv_freq, before)


def test_nested_patches():
    model = make_model()
    plain = logits(model)
    zero(model)
    with rope_patch.patch(model, "linear", factor=2):
        linear = logits(model)
        with rope_patch.patch(model, "yarn", factor=4):
            rope_patch.restore(model)
        assert torch.equal(logits(model), linear)
    assert torch.equal(logits(model), plain)


def test_copied_model():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4)
    patched = logits(model)
    twin = zero(copy.deepcopy(model))
    rope_patch.restore(twin)
    assert torch.equal(logits(twin), patched)
    assert torch.equal(logits(model), patched)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 reads no scaling for Gemma 3")
def test_patch_of_one_layer_type():
    model = make_model("gemma3")
    rope_patch.patch(model, "yarn", factor=4)
    patched, buffers = logits(model), rotary_buffers(model)
    zero(model)
    lost = rope_patch.restore(model)
    assert "model.rotary_emb.sliding_attention_inv_freq" in lost
    assert_same_buffers(model, buffers)
    assert torch.equal(logits(model), patched)
