"""Positions dropped, against models of transformers' own whose cos is 1 and whose sin is 0."""

import copy
import json
import math

import pytest
import torch
import transformers
from helpers.reference_rerotation import Reference, exact, stepped
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
    padded,
    step_by_step,
    tokens,
)

import rope_patch

SHAPES = ["llama", "qwen3", "gemma3"]
KERNELS = ["auto", "reference", "hf"]
TEMPERATURE = 0.412
END = 300  # past the trained length by 10 steps of growth


def without_rotation(model, scale=1.0):
    """Return a copy for transformers' own code whose rotary module returns no rotation."""
    model = copy.deepcopy(model)
    rotary = model.base_model.rotary_emb
    forward = rotary.forward

    def still(x, position_ids, layer_type=None):
        if layer_type is None:
            cos, sin = forward(x, position_ids)
        else:
            cos, sin = forward(x, position_ids, layer_type)
        if layer_type is not None and "sliding" in layer_type:
            return cos, sin
        return torch.full_like(cos, scale), torch.zeros_like(sin)

    rotary.forward = still
    return model


class Warming(Reference):
    """Keys are kept as they come, and multiplied afresh at each step."""

    def current(self, layer):
        kind = self.kinds[layer]
        if kind is not None and "sliding" in kind:
            return super().current(layer)
        length = (self.positions.max() - self.positions.min()).item() + 1
        beta = 1 + TEMPERATURE * math.log(self.growth(length, TRAINED))
        return torch.zeros(SIZES["head_dim"] // 2), math.sqrt(beta)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", SHAPES)
def test_no_rotation_is_cos_1_and_sin_0(family, kernels):
    model = make_model(family)
    still, plain = without_rotation(model), logits(model)
    rope_patch.patch(model, "nope", kernels=kernels)
    for length in (SHORT, TRAINED, LONG):
        assert_close(logits(model, length), logits(still, length))
    assert_differs(logits(model), plain)
    assert_close(step_by_step(model, tokens(LONG), SHORT), logits(still))


@pytest.mark.parametrize("kernels", KERNELS)
def test_positions_say_nothing_any_more(kernels):
    model, ids = make_model(), tokens(LONG)
    generator = torch.Generator().manual_seed(0)
    anywhere = torch.randint(0, 10**6, (1, LONG), generator=generator)
    mask = torch.ones_like(ids)  # else transformers takes jumps for the borders of documents
    plain = forward(model, ids, attention_mask=mask)
    assert_differs(forward(model, ids, attention_mask=mask, position_ids=anywhere), plain)
    rope_patch.patch(model, "nope", kernels=kernels)
    expected = logits(model)
    for positions in (anywhere, 3 * torch.arange(LONG)[None] + 7, torch.zeros_like(ids)):
        assert_close(forward(model, ids, attention_mask=mask, position_ids=positions), expected)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", SHAPES)
def test_logits_get_warmer_with_the_length(family, kernels):
    model = make_model(family)
    plain = without_rotation(model)
    beta = 1 + TEMPERATURE * math.log(LONG / TRAINED)
    warm = without_rotation(model, math.sqrt(beta))
    rope_patch.patch(model, "nope", temperature=TEMPERATURE, growth="exact", kernels=kernels)
    assert_close(logits(model), logits(warm))
    assert_differs(logits(model), logits(plain))
    for length in (SHORT, TRAINED):
        assert_close(logits(model, length), logits(plain, length))


@pytest.mark.parametrize("growth", [stepped, exact])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", SHAPES)
def test_decoding_is_as_if_all_keys_were_multiplied_afresh(family, kernels, growth):
    model, ids = make_model(family), tokens(END)
    truth = Warming(model, "nope", growth).decode(ids, SHORT)
    options = {"temperature": TEMPERATURE, "growth": growth.__name__}
    rope_patch.patch(model, "nope", kernels=kernels, **options)
    got = step_by_step(model, ids, SHORT)
    assert_close(got, truth)
    assert_differs(got, without_rotation(model)(ids).logits.detach())


def test_rows_are_as_warm_as_their_own_length_asks_for():
    model = make_model()
    rope_patch.patch(model, "nope", temperature=TEMPERATURE)
    rows = [tokens(length, seed=length) for length in (30, 200, 90)]
    ids, mask = padded(rows, "left")
    together = forward(model, ids, attention_mask=mask)
    for row, got, here in zip(rows, together, mask.bool(), strict=True):
        assert_close(got[here], forward(model, row)[0])


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
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
    ("request_", "length", "said"),
    [
        ({}, None, TRAINED),
        ({"factor": 4}, TARGET, TARGET),
        ({"length": TARGET}, TARGET, TARGET),
        ({"temperature": TEMPERATURE}, None, TRAINED),
        # No config knows the temperature: it must not promise what plain transformers cannot do.
        ({"temperature": TEMPERATURE, "length": TARGET}, TARGET, TRAINED),
    ],
)
def test_a_length_may_be_named(request_, length, said):
    model = make_model()
    handle = rope_patch.patch(model, "nope", **request_)
    assert handle.length == length
    assert model.config.max_position_embeddings == said


def test_what_is_in_effect_is_said():
    model = make_model()
    still = rope_patch.patch(model, "nope").summary()
    assert still.startswith("nope, 64 → any length")
    assert "8 of 8 pairs changed (slowest: no longer rotates), attention factor 1\n" in still
    warm = rope_patch.patch(model, "nope", temperature=TEMPERATURE, length=TARGET).summary()
    assert warm.startswith("nope, temperature 0.412, 64 → 256 tokens")
    assert "at 256 tokens (slowest: no longer rotates), attention factor 1.25346" in warm
    assert "stopped" in str(rope_patch.diagnose(make_model(), "nope"))


def test_a_temperature_reaches_whole_heads_only():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).eval()
    plain = logits(model)
    with pytest.raises(ValueError, match="temperature must be 0 where only a part of each head"):
        rope_patch.patch(model, "nope", temperature=TEMPERATURE)
    assert logits(model).equal(plain)
    still = without_rotation(model)
    rope_patch.patch(model, "nope")
    assert_close(logits(model), logits(still))


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
def test_a_config_whose_pairs_all_stand_still_is_one(tmp_path):
    """Its native form has a share of no pairs, which is not a head without pairs."""
    model = make_model()
    rope_patch.patch(model, "nope", length=TARGET)
    rope_patch.save(model, tmp_path)
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert native.config.rope_parameters["partial_rotary_factor"] == 0
    handle = rope_patch.patch(native, "linear", factor=2, start="unscaled", trained_length=64)
    assert handle.frequencies[None].inv_freq.all()


@pytest.mark.parametrize("request_", [{}, {"length": TARGET}])
@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
@pytest.mark.parametrize("family", SHAPES)
def test_our_load_brings_the_patch_back(family, temperature, request_, tmp_path, caplog):
    model = make_model(family)
    plain = logits(model)
    was = rope_patch.patch(model, "nope", temperature=temperature, **request_)
    rope_patch.save(model, tmp_path)
    assert ("load this folder with rope_patch.load" in caplog.text) is (
        bool(temperature) or OLD_TRANSFORMERS
    )
    loaded = rope_patch.load(tmp_path)
    handle = rope_patch.current(loaded)
    assert handle.method == was.method
    assert (handle.trained_length, handle.length) == (was.trained_length, was.length)
    for length in (SHORT, LONG):
        assert logits(loaded, length).equal(logits(model, length))
    handle.undo()
    assert logits(loaded).equal(plain)


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_gradients_reach_every_weight(temperature):
    model = make_model().train()
    rope_patch.patch(model, "nope", temperature=temperature)
    ids = tokens(LONG)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
