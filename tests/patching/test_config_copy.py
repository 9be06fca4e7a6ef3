"""Test that the config, print(model) and the log of a patched model show the patch."""

import copy
import logging

import pytest
import torch
import transformers
from helpers.tiny_models import (
    FAMILIES,
    LONG,
    LONG_FACTOR,
    SIZES,
    TARGET,
    TRAINED,
    assert_differs,
    logits,
    make_config,
    make_model,
    tokens,
)
from helpers.vision_models import gemma3_with_vision

import rope_patch

LLAMA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}


def configs(model):
    """Return the text config of every module that has one."""
    all_configs = [vars(module).get("config") for module in model.modules()]
    return [config.get_text_config(decoder=True) for config in all_configs if config is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_every_module_shows_the_patch(family):
    model = make_model(family)
    plain = copy.deepcopy(model.config.rope_parameters)
    count = len(configs(model))
    with rope_patch.patch(model, "yarn", factor=4) as handle:
        assert len(configs(model)) == count >= 4  # the model, its decoder, rotary and attentions
        for config in configs(model):
            assert config.max_position_embeddings == TARGET
            assert config.rope_parameters == model.config.rope_parameters != plain
        assert (handle.trained_length, handle.length, handle.factor) == (TRAINED, TARGET, 4)
        assert handle.original == {
            "max_position_embeddings": TRAINED,
            "rope_parameters": plain,
        }
    for config in configs(model):
        assert config.max_position_embeddings == TRAINED
        assert config.rope_parameters == plain


def test_only_full_attention_changes_in_gemma3():
    model = make_model("gemma3")
    plain = copy.deepcopy(model.config.rope_parameters)
    sliding = model.model.rotary_emb.sliding_attention_inv_freq.clone()
    handle = rope_patch.patch(model, "yarn", factor=4)
    changed = model.config.rope_parameters
    assert changed.keys() == plain.keys()
    assert changed["sliding_attention"] == plain["sliding_attention"]
    assert changed["full_attention"] == {**LLAMA_YARN, "rope_theta": 1e6}
    assert model.model.rotary_emb.sliding_attention_inv_freq.equal(sliding)
    assert model.model.rotary_emb.sliding_attention_attention_scaling == 1
    assert list(handle.frequencies) == ["full_attention"]
    assert "sliding_attention: unchanged" in handle.summary()


@pytest.fixture
def multimodal():
    """Return a model that has a composite config."""
    return gemma3_with_vision()


def test_patch_changes_only_the_text_config(multimodal):
    original = multimodal.config
    text = copy.deepcopy(original.to_dict())
    before = logits(multimodal)
    rope_patch.patch(multimodal, "linear", factor=4)

    assert_differs(logits(multimodal), before)
    patched = multimodal.config.text_config
    assert patched.max_position_embeddings == TARGET
    assert patched.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert patched.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert multimodal.config.vision_config == original.vision_config
    assert multimodal.model.language_model.config is patched  # one object, as before
    assert original.to_dict() == text

    rope_patch.unpatch(multimodal)
    assert multimodal.config is original
    assert original.to_dict() == text
    assert logits(multimodal).equal(before)


def test_composite_model_rotates_like_its_text_decoder(multimodal):
    text_model = make_model("gemma3")
    text_model.model.load_state_dict(multimodal.model.language_model.state_dict())
    with torch.no_grad():
        for model in (multimodal.model.language_model, text_model.model):
            rope_patch.patch(model, "linear", factor=4)
        ids = tokens(LONG)
        whole = multimodal.model(input_ids=ids).last_hidden_state
        assert whole.equal(text_model.model(input_ids=ids).last_hidden_state)


def test_vision_tower_keeps_its_rotation():
    vision = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    config = transformers.LlavaConfig(text_config=make_config(), vision_config=vision)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    vision_tower, decoder = model.model.vision_tower, model.model.language_model
    rotaries = vision_tower.patch_positional_embedding, decoder.rotary_emb
    vision_inv_freq, text_inv_freq = (rotary.inv_freq.clone() for rotary in rotaries)
    rope_patch.patch(model, "linear", factor=4)
    assert rotaries[0].inv_freq.equal(vision_inv_freq)
    torch.testing.assert_close(rotaries[1].inv_freq, text_inv_freq / 4)
    assert model.config.vision_config == config.vision_config


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_print_shows_the_method_and_the_lengths(family):
    model = make_model(family)
    plain = str(model)
    with rope_patch.patch(model, "yarn", factor=4):
        assert "RotaryEmbedding(yarn ×4, 64 → 256 tokens)" in str(model)
    assert str(model) == plain


def test_patch_writes_one_log_record(caplog):
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        handle = rope_patch.patch(make_model("gemma3"), "yarn", factor=4)
    (record,) = [r for r in caplog.records if r.name.startswith("rope_patch")]
    assert record.levelno == logging.INFO
    for part in ("Gemma3ForCausalLM", "yarn ×4", "64 → 256", "sliding_attention: unchanged"):
        assert part in record.getMessage()
    assert "\n" not in record.getMessage()
    handle.undo()


def test_summary_lists_the_changes():
    model = make_model()
    handle = rope_patch.patch(model, "yarn", factor=4, beta_fast=16)
    first, layers, options, rotation = handle.summary().splitlines()
    assert first == "yarn ×4, 64 → 256 tokens"
    # 64 tokens: the first pair is unchanged, the next two are on the ramp, the rest stretch by 4.
    assert "theta 10000, 7 of 8 pairs changed (slowest: ×4), attention factor 1.13863" in layers
    assert "beta_fast=16" in options
    assert "plain torch on a CPU" in rotation
    handle.undo()
    assert handle.summary().startswith("yarn ×4, 64 → 256 tokens (undone)")
    assert "(undone)" in repr(handle)


@pytest.mark.parametrize(
    ("method", "request_", "length", "factor"),
    [
        ("dynamic-yarn", {}, None, None),
        ("dynamic-yarn", {"length": 256}, 256, 4),
        ("dynamic-yarn", {"factor": 4}, 256, 4),
        ("dynamic", {}, None, 1),
        ("dynamic", {"length": 256}, 256, 1),
        ("dynamic", {"factor": 4}, 256, 4),
        ("dynamic", {"factor": 2, "length": 1024}, 1024, 2),
    ],
)
def test_dynamic_methods_need_no_factor(method, request_, length, factor):
    """The config keeps the trained length. The factor of dynamic NTK is a part of its formula."""
    model = make_model()
    expected = dict(model.config.rope_parameters)
    handle = rope_patch.patch(model, method, **request_)
    assert (handle.length, handle.trained_length) == (length, TRAINED)
    if method == "dynamic":
        assert handle.method.factor == factor
        expected |= {"rope_type": "dynamic", "factor": factor}
    else:
        assert handle.factor == factor
        at_length = handle.frequencies_at(length or TRAINED)[None]
        assert handle.frequencies[None].same_as(at_length)
    assert model.config.max_position_embeddings == TRAINED
    assert model.config.rope_parameters == expected


def test_dynamic_handle_describes_the_method():
    model = make_model()
    handle = rope_patch.patch(model, "dynamic-yarn")
    assert str(handle) == "dynamic-yarn, 64 → any length"
    assert "growth=stepped" in handle.summary()
    assert "8 pairs changed at 128 tokens (slowest: ×2), attention factor 1.06931" in (
        handle.summary()
    )
    assert "dynamic-yarn, 64 → any length" in str(model)
    assert str(rope_patch.patch(model, "dynamic", factor=2)) == "dynamic, factor 2, 64 → 128 tokens"


def test_summary_of_stopped_pairs_and_per_pair_factors():
    model = make_model()
    stopped = rope_patch.patch(model, "proportional", factor=4)
    assert "2 of 8 pairs changed (slowest: no longer rotates)" in stopped.summary()
    longrope = rope_patch.patch(model, "longrope", factor=4, long_factor=LONG_FACTOR)
    assert "7 of 8 pairs changed (slowest: ×3.8)" in longrope.summary()
    assert "long_factor=[8 numbers]" in longrope.summary()


def test_inner_decoder_can_be_patched():
    model = make_model()
    rope_patch.patch(model.model, "yarn", factor=4)
    whole = make_model()
    rope_patch.patch(whole, "yarn", factor=4)
    assert logits(model).equal(logits(whole))
    assert model.model.config.max_position_embeddings == TARGET
    rope_patch.unpatch(model)
    assert logits(model).equal(logits(make_model()))


def test_partial_rotation_stays_partial():
    torch.manual_seed(0)
    quarter = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = transformers.StableLmForCausalLM(
        transformers.StableLmConfig(**sizes, rope_parameters=quarter)
    ).eval()
    before = logits(model)
    handle = rope_patch.patch(model, "yarn", factor=4)
    assert handle.frequencies[None].inv_freq.shape == (2,)
    assert model.config.rope_parameters == {**LLAMA_YARN, "partial_rotary_factor": 0.25}
    native = transformers.StableLmForCausalLM(copy.deepcopy(model.config)).eval()
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model), logits(native), rtol=0, atol=1e-5)
    assert_differs(logits(model), before)
    handle.undo()
    assert logits(model).equal(before)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_multimodal_sections_are_preserved(kind):
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{kind}TextConfig")(**SIZES, rope_parameters=sections)
    torch.manual_seed(0)
    build = getattr(transformers, f"{kind}TextModel")
    model = build(config).eval()
    positions = torch.stack([torch.arange(LONG) // n for n in (1, 2, 3)])[:, None]  # [3, B, S]

    @torch.no_grad()
    def hidden(decoder):
        output = decoder(input_ids=tokens(LONG), position_ids=positions, use_cache=False)
        return output.last_hidden_state

    before = hidden(model)
    rope_patch.patch(model, "yarn", factor=4)
    assert_differs(hidden(model), before)
    assert model.config.rope_parameters == {**LLAMA_YARN, "mrope_section": [2, 3, 3]}
    native = build(copy.deepcopy(model.config)).eval()
    native.load_state_dict(model.state_dict())
    torch.testing.assert_close(hidden(model), hidden(native), rtol=0, atol=1e-5)
