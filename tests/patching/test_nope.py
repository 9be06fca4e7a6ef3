"""Test `nope` against transformers models whose cos is 1 and whose sin is 0."""

import copy
import json

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    logits,
    make_config,
    make_model,
    step_by_step,
    tokens,
)

import rope_patch

SHAPES = ["llama", "qwen3", "gemma3"]
KERNELS = ["auto", "reference", "hf"]
TEMPERATURE = "drope:0.412"


def without_rotation(model, scale=1.0):
    """Return an unpatched copy whose rotary module returns cos = `scale` and sin = 0."""
    model = copy.deepcopy(model)
    rotary = model.base_model.rotary_emb
    forward = rotary.forward

    def forward_without_rotation(x, position_ids, layer_type=None):
        if layer_type is None:
            cos, sin = forward(x, position_ids)
        else:
            cos, sin = forward(x, position_ids, layer_type)
        if layer_type is not None and "sliding" in layer_type:
            return cos, sin
        return torch.full_like(cos, scale), torch.zeros_like(sin)

    rotary.forward = forward_without_rotation
    return model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", SHAPES)
def test_nope_matches_cos_1_and_sin_0(family, kernels):
    model = make_model(family)
    unrotated, plain = without_rotation(model), logits(model)
    rope_patch.patch(model, "nope", kernels=kernels)
    for length in (SHORT, TRAINED, LONG):
        assert_close(logits(model, length), logits(unrotated, length))
    assert_differs(logits(model), plain)
    assert_close(step_by_step(model, tokens(LONG), SHORT), logits(unrotated))


@pytest.mark.parametrize("kernels", KERNELS)
def test_positions_do_not_change_logits(kernels):
    model, ids = make_model(), tokens(LONG)
    generator = torch.Generator().manual_seed(0)
    random_positions = torch.randint(0, 10**6, (1, LONG), generator=generator)
    mask = torch.ones_like(ids)  # else transformers takes jumps for document borders
    plain = forward(model, ids, attention_mask=mask)
    assert_differs(forward(model, ids, attention_mask=mask, position_ids=random_positions), plain)
    rope_patch.patch(model, "nope", kernels=kernels)
    expected = logits(model)
    for positions in (random_positions, 3 * torch.arange(LONG)[None] + 7, torch.zeros_like(ids)):
        assert_close(forward(model, ids, attention_mask=mask, position_ids=positions), expected)


@pytest.mark.parametrize("temperature", [None, TEMPERATURE])
@pytest.mark.parametrize("family", SHAPES)
def test_undo_is_bit_exact(family, temperature):
    model = make_model(family)
    plain, config = logits(model), model.config.to_dict()
    handle = rope_patch.patch(model, "nope", temperature=temperature)
    assert_differs(logits(model), plain)
    handle.undo()
    assert logits(model).equal(plain)
    assert model.config.to_dict() == config


def test_only_full_attention_changes_in_gemma3():
    model = make_model("gemma3")
    handle = rope_patch.patch(model, "nope")
    assert list(handle.frequencies) == ["full_attention"]
    assert "sliding_attention: unchanged" in handle.summary()
    sliding = model.config.rope_parameters["sliding_attention"]
    assert sliding == make_config("gemma3").rope_parameters["sliding_attention"]


@pytest.mark.parametrize(
    ("request_", "length", "config_length"),
    [
        ({}, None, TRAINED),
        ({"factor": 4}, TARGET, TARGET),
        ({"length": TARGET}, TARGET, TARGET),
        ({"temperature": TEMPERATURE}, None, TRAINED),
        ({"temperature": TEMPERATURE, "length": TARGET}, TARGET, TARGET),
    ],
)
def test_length_is_optional(request_, length, config_length):
    model = make_model()
    handle = rope_patch.patch(model, "nope", **request_)
    assert handle.length == length
    assert model.config.max_position_embeddings == config_length


def test_summary_and_diagnosis_name_the_effect():
    model = make_model()
    without_temperature = rope_patch.patch(model, "nope").summary()
    assert without_temperature.startswith("nope, 64 → any length")
    assert (
        "8 of 8 pairs changed (slowest: no longer rotates), attention factor 1\n"
        in without_temperature
    )
    with_temperature = rope_patch.patch(
        model, "nope", temperature=TEMPERATURE, length=TARGET
    ).summary()
    assert with_temperature.startswith("nope, 64 → 256 tokens")
    assert "attention logits ×1 + 0.412 ln(n / 64) beyond 64 tokens" in with_temperature
    assert "stopped" in str(rope_patch.diagnose(make_model(), "nope"))


def test_partly_rotated_heads_lose_their_rotation():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).eval()
    unrotated = without_rotation(model)
    rope_patch.patch(model, "nope")
    assert_close(logits(model), logits(unrotated))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has no proportional rotation")
@pytest.mark.parametrize("family", SHAPES)
def test_plain_transformers_loads_the_same_model(family, tmp_path):
    model = make_model(family)
    rope_patch.patch(model, "nope", length=TARGET)
    rope_patch.save(model, tmp_path)
    assert json.loads((tmp_path / "rope_patch.json").read_text())["native"] is True
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rope_patch.current(native) is None
    assert native.config.max_position_embeddings == TARGET
    for length in (SHORT, LONG):
        assert_close(logits(native, length), logits(model, length))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has no proportional rotation")
def test_native_config_without_rotating_pairs_can_be_patched(tmp_path):
    """The native form has partial_rotary_factor 0, but the head still has pairs."""
    model = make_model()
    rope_patch.patch(model, "nope", length=TARGET)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert native.config.rope_parameters["partial_rotary_factor"] == 0
    handle = rope_patch.patch(native, "linear", factor=2, start="unscaled", trained_length=64)
    assert handle.frequencies[None].inv_freq.all()


@pytest.mark.parametrize("request_", [{}, {"length": TARGET}])
@pytest.mark.parametrize("temperature", [None, TEMPERATURE])
@pytest.mark.parametrize("family", SHAPES)
def test_load_restores_the_patch(family, temperature, request_, tmp_path, caplog):
    model = make_model(family)
    plain = logits(model)
    saved = rope_patch.patch(model, "nope", temperature=temperature, **request_)
    rope_patch.save(model, tmp_path)
    assert ("with rope_patch.load" in caplog.text) is (bool(temperature) or OLD_TRANSFORMERS)
    loaded = rope_patch.load(tmp_path)
    handle = rope_patch.current(loaded)
    assert handle.method == saved.method
    assert (handle.trained_length, handle.length) == (saved.trained_length, saved.length)
    for length in (SHORT, LONG):
        assert logits(loaded, length).equal(logits(model, length))
    handle.undo()
    assert logits(loaded).equal(plain)


@pytest.mark.parametrize("temperature", [None, TEMPERATURE])
def test_gradients_reach_every_weight(temperature):
    model = make_model().train()
    rope_patch.patch(model, "nope", temperature=temperature)
    ids = tokens(LONG)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
