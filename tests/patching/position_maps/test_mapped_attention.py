"""Test position maps in whole models against attention that is written out, pair by pair."""

import copy
import math
from types import MethodType

import pytest
import torch
import transformers
from helpers.tiny_models import SIZES, TRAINED, forward, make_model, step_by_step, tokens
from helpers.written_out_maps import (
    WrittenOutMap,
    dca,
    dpe,
    jet_long,
    leaky_rerope,
    lm_infinite,
    rerope,
    self_extend,
    streaming,
    string,
)
from transformers import AttentionInterface

import rope_patch

LENGTH = 150
LOG_N = lambda i: max(1.0, math.log(i + 1) / math.log(TRAINED))  # noqa: E731
ONE = lambda i: 1.0  # noqa: E731
# Options, the relative position of i and j, the first query that is mapped, the temperature.
MAPS = {
    "rerope": ({"window": 20}, lambda i, j: rerope(i, j, 20), TRAINED, LOG_N),
    "leaky-rerope": (
        {"window": 20, "k": 4.0, "temperature": "none"},
        lambda i, j: leaky_rerope(i, j, 20, 4),
        TRAINED,
        ONE,
    ),
    "self-extend": (
        {"window": 10, "group": 3},
        lambda i, j: self_extend(i, j, 10, 3),
        TRAINED,
        LOG_N,
    ),
    "jet-long": ({"window": 16}, lambda i, j: jet_long(i, j, 16, TRAINED), TRAINED, LOG_N),
    "dca": ({}, lambda i, j: dca(i, j, 48, 63), TRAINED, LOG_N),
    "string": (
        {"offset": 40, "local": 8, "on": "linear:4"},
        lambda i, j: string(i, j, 40, 8),
        40,
        ONE,
    ),
    "dpe": (
        {"groups": [2, 4, 3, 8], "window": 9},
        lambda i, j: dpe(i, j, 9, (2, 4, 3, 8)),
        TRAINED,
        LOG_N,
    ),
    "lm-infinite": (
        {"window": 30, "sinks": 3},
        lambda i, j: lm_infinite(i, j, 30, 3),
        30,
        ONE,
    ),
    "streaming": (
        {"window": 30, "sinks": 3},
        lambda i, j: streaming(i, j, 30, 3),
        33,
        ONE,
    ),
}


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SIZES,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.set_attn_implementation("eager")
    return model


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")
MODELS = {name: lambda name=name: make_model(name) for name in FAMILIES} | {"gpt_oss": gpt_oss}


def use_exact_angles(model):
    """Have a float64 model rotate by angles in float64, which transformers rounds to float32."""

    def exact(module, x, position_ids, layer_type=None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq = getattr(module, f"{prefix}inv_freq").double()
        angle = position_ids[..., None].double() * inv_freq
        angle = torch.cat([angle, angle], -1)
        scale = getattr(module, f"{prefix}attention_scaling")
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(exact, module)
    return model


def written_out(model, name):
    """Return a copy of an unpatched model whose attention is written out."""
    options, relative, start, temperature = MAPS[name]
    twin = copy.deepcopy(model)
    if "on" in options:
        method, factor = options["on"].split(":")
        rope_patch.patch(twin, method, factor=float(factor))
    types = getattr(model.config, "layer_types", None) or ["full_attention"]
    has_windows = "sliding_attention" in types
    truth = WrittenOutMap(
        relative,
        inv_freq(twin),
        start,
        temperature,
        lambda module: not has_windows or types[module.layer_idx] == "full_attention",
        # With one rotation for all layers, all of them are tempered.
        is_tempered_everywhere=model.config.model_type != "gemma3_text",
    )
    AttentionInterface.register("written_out", truth)
    twin.set_attn_implementation("written_out")
    return twin


def inv_freq(model):
    """Return the frequencies of the layers without a window, in float32 as the model has them."""
    rotary = model.model.rotary_emb
    buffers = dict(rotary.named_buffers())
    return buffers.get("full_attention_inv_freq", buffers.get("inv_freq"))


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", MAPS)
def test_prompts_chunks_and_steps_match_attention_written_out(name):
    model, ids = MODELS["llama"](), tokens(LENGTH)
    expected, plain = forward(written_out(model, name), ids), forward(model, ids)
    handle = rope_patch.patch(model, name, **MAPS[name][0])
    got = forward(model, ids)
    assert (got - plain).abs().max() > 1e-2
    close(got, expected)
    close(step_by_step(model, ids, 40), expected)
    close(chunk_by_chunk(model, ids, 37), expected)
    handle.undo()
    assert torch.equal(forward(model, ids), plain)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["self-extend", "dca"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_architectures_match_attention_written_out(family, name, implementation):
    """Norms of queries and keys, soft caps, windows and sinks are the model's own."""
    if (family, implementation) in (("gemma2", "sdpa"), ("gpt_oss", "sdpa")):
        pytest.skip("transformers' SDPA has no soft cap and no sinks")
    model, ids = MODELS[family](), tokens(LENGTH)
    model.set_attn_implementation(implementation)
    expected, plain = forward(written_out(model, name), ids), forward(model, ids)
    rope_patch.patch(model, name, **MAPS[name][0])
    got = forward(model, ids)
    assert (got - plain).abs().max() > 1e-2
    close(got, expected)
    close(step_by_step(model, ids, 70), expected)


@pytest.mark.parametrize("name", MAPS)
def test_float64_models_agree_to_rounding(name):
    model, ids = use_exact_angles(MODELS["llama"]().double()), tokens(LENGTH)
    expected = forward(written_out(model, name), ids)
    rope_patch.patch(model, name, **MAPS[name][0])
    close(forward(model, ids), expected, 1e-9)
    close(chunk_by_chunk(model, ids, 50), expected, 1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_short_texts_keep_their_bits(name):
    model = MODELS["llama"]()
    plain = [forward(model, tokens(length)) for length in (1, 29, TRAINED)]
    options = {key: value for key, value in MAPS[name][0].items() if key != "on"}
    rope_patch.patch(model, name, **options)
    for length, expected in zip((1, 29, TRAINED), plain, strict=True):
        is_mapped = length > MAPS[name][2]
        assert torch.equal(forward(model, tokens(length)), expected) is not is_mapped


@torch.no_grad()
def chunk_by_chunk(model, ids, size):
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(size, 1)]
    return torch.cat(parts, dim=1)
