"""Test the temperature of queries against attention written out in float64."""

import copy
import math

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG,
    SHORT,
    SIZES,
    TRAINED,
    forward,
    make_generator,
    make_model,
    make_other,
    step_by_step,
    tokens,
)
from transformers import AttentionInterface, DynamicCache

import rope_patch

TEMPERATURES = {
    1.5: lambda p: 1.5,
    "log-n": lambda p: max(1, math.log(p + 1) / math.log(TRAINED)),
    "llama4": lambda p: 1 + 0.1 * math.log(1 + p // TRAINED),
    "drope:0.412": lambda p: 1 + 0.412 * math.log(max(1, (p + 1) / TRAINED)),
}
METHODS = {"yarn": {"factor": 4}, "dynamic-yarn": {}, "nope": {}, "default": {"factor": 1}}


def deepseek():
    return make_other(
        "DeepseekV3",
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )


NO_GROUPS = ("head_dim", "num_key_value_heads")
MODELS = {
    "llama": lambda: make_model("llama"),
    "qwen3": lambda: make_model("qwen3"),
    "gemma2": lambda: make_model("gemma2"),
    "gemma3": lambda: make_model("gemma3"),
    "stablelm": lambda: make_other("StableLm"),
    "deepseek_v3": deepseek,
    "gpt_neox": lambda: make_other("GPTNeoX", NO_GROUPS),
}


class WrittenOut:
    """Attention written out: softmax(cap(scale * t(position) * q k)) v, of one row without mask.

    Attributes:
        factor: t, a function of the position.
        layers: Whether a layer has a temperature.
    """

    def __init__(self, factor, layers=lambda module: True):
        self.factor, self.layers = factor, layers

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        _, _, steps, width = query.shape
        slots, scaling = key.shape[2], width**-0.5 if scaling is None else scaling
        output = torch.zeros(1, steps, query.shape[1], value.shape[3], dtype=query.dtype)
        for step in range(steps):
            slot = slots - steps + step
            t = self.factor(slot) if self.layers(module) else 1.0
            window = options.get("sliding_window")
            seen = slice(0 if window is None else max(0, slot - window + 1), slot + 1)
            scores = key[0, :, seen] @ (t * query[0, :, step])[:, :, None]
            scores = scores[..., 0] * scaling
            if (cap := options.get("softcap")) is not None:
                scores = torch.tanh(scores / cap) * cap
            output[0, step] = (scores.softmax(-1)[..., None] * value[0, :, seen]).sum(1)
        return output, None


def written_out(model, temperature, method="yarn", **options):
    """Return a patched copy without temperature, whose attention is written out in float64."""
    twin = copy.deepcopy(model)
    if rope_patch.current(twin):
        rope_patch.unpatch(twin)
    rope_patch.patch(twin, method, **options)
    full_only = model.config.model_type == "gemma3_text"
    truth = WrittenOut(
        TEMPERATURES[temperature],
        lambda module: not full_only or module.layer_type == "full_attention",
    )
    AttentionInterface.register("written_out", truth)
    twin.set_attn_implementation("written_out")
    return twin


def close(got, expected, atol=1e-10):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "temperature"),
    [*((family, "log-n") for family in MODELS), *(("llama", each) for each in TEMPERATURES)],
)
def test_logits_match_attention_written_out(family, temperature, implementation):
    if (family, implementation) == ("gemma2", "sdpa"):
        pytest.skip("its SDPA has no soft cap")
    model, ids = MODELS[family]().double(), tokens(LONG)
    model.set_attn_implementation(implementation)
    expected = forward(written_out(model, temperature, factor=4), ids)
    without = rope_patch.patch(model, "yarn", factor=4)
    assert (forward(model, ids) - expected).abs().max() > 1e-2
    without.undo()
    rope_patch.patch(model, "yarn", factor=4, temperature=temperature)
    # transformers' eager attention has its softmax in float32.
    close(forward(model, ids), expected, 1e-10 if implementation == "sdpa" else 1e-5)


def test_any_registered_attention_gets_scaled_queries():
    """Flash and flex attention are reached as this one is, which knows no temperature itself."""
    model, ids = make_model().double(), tokens(LONG)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    expected = forward(model, ids)
    AttentionInterface.register("written_out", WrittenOut(lambda position: 1.0))
    model.set_attn_implementation("written_out")
    close(forward(model, ids), expected)


@pytest.mark.parametrize("kernels", ["auto", "reference", "hf"])
@pytest.mark.parametrize(
    ("family", "method"),
    [*(("llama", method) for method in METHODS), ("qwen3", "yarn"), ("gemma3", "dynamic-yarn")],
)
def test_methods_and_kernels_take_a_temperature(family, method, kernels):
    model, ids, options = MODELS[family]().double(), tokens(LONG), METHODS[method]
    if method == "default":  # the temperature is all that changes
        truth = written_out(model, "llama4", "yarn", factor=4)
        rope_patch.unpatch(truth)
    else:
        truth = written_out(model, "llama4", method, **options)
    rope_patch.patch(model, method, temperature="llama4", kernels=kernels, **options)
    close(forward(model, ids), forward(truth, ids), 1e-5)  # cos and sin are float32


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "nope"])
@torch.no_grad()
def test_decoding_with_a_cache_matches_attention_written_out(method):
    """A token keeps its factor: keys are as they were cached. Dynamic YaRN grows twice."""
    model, ids, prompt = make_model().double(), tokens(78), 62
    truth = written_out(model, "log-n", method, **METHODS[method])
    rope_patch.patch(model, method, temperature="log-n", **METHODS[method])
    close(step_by_step(model, ids, prompt), step_by_step(truth, ids, prompt))
    if method != "dynamic-yarn":  # whose old hidden states have other frequencies
        close(step_by_step(model, ids, prompt), forward(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_in_16_bits_are_rounded_once(dtype):
    """A factor in 16 bits would shift all logits of a query the same way."""
    queries = []

    def attend(module, query, key, value, attention_mask, **options):
        queries.append(query)
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("recording", attend)
    model = make_model(num_hidden_layers=1).to(dtype)
    rope_patch.restore(model)  # the frequencies, which the cast rounded
    model.set_attn_implementation("recording")
    forward(model, tokens(LONG))
    rope_patch.patch(model, "default", factor=1, temperature="log-n", kernels="hf")
    forward(model, tokens(LONG))
    query, got = queries
    factors = [max(1, math.log(p + 1) / math.log(TRAINED)) for p in range(LONG)]
    exact = query.double() * torch.tensor(factors, dtype=torch.float64)[:, None]
    assert not got.equal(query)
    assert (got != exact.to(dtype)).double().mean() < 1e-3  # ties of a rounding to float32


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", ["log-n", "llama4", "drope:0.412"])
def test_short_texts_keep_their_bits(family, temperature):
    model, ids = make_model(family), tokens(TRAINED)
    plain = forward(model, ids)
    rope_patch.patch(model, "dynamic-yarn", temperature=temperature)
    assert forward(model, ids).equal(plain)


def test_generate_matches_decoding_without_a_cache():
    model, ids = make_generator("llama"), tokens(SHORT)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    options = {"max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert model.generate(ids, **options).equal(expected)
    static = model.generate(ids, cache_implementation="static", **options)
    assert static.equal(expected)


def test_summary_says_the_formula():
    handle = rope_patch.patch(make_model(), "yarn", factor=4, temperature="drope:0.412")
    assert "attention logits ×1 + 0.412 ln(n / 64) beyond 64 tokens" in handle.summary()
    assert "temperature=drope:0.412" in handle.summary()


def test_gradients_are_those_of_attention_written_out():
    model, ids = make_model().double(), tokens(LONG)
    truth = written_out(model, "log-n", factor=4)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    for each in (model, truth):
        each.train()
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    close(model.lm_head.weight.grad, truth.lm_head.weight.grad)
    for layer, other in zip(model.model.layers, truth.model.layers, strict=True):
        close(layer.self_attn.q_proj.weight.grad, other.self_attn.q_proj.weight.grad)


@pytest.mark.slow
@pytest.mark.usefixtures("reset_compiler")
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_compiled_forward_is_one_graph(method):
    model, ids = make_model(), tokens(LONG)
    rope_patch.patch(model, method, temperature="log-n", **METHODS[method])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(forward(compiled, ids), forward(model, ids), rtol=0, atol=1e-5)
    cache = DynamicCache(config=model.config)
    expected = step_by_step(model, ids[:, :80], 60)
    with torch.no_grad():
        got = [model(ids[:, :60], past_key_values=cache).logits]
        for at in range(60, 80):
            step, place = ids[:, at : at + 1], torch.tensor([[at]])
            got.append(compiled(step, position_ids=place, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=0, atol=1e-5)


# -- refused ---------------------------------------------------------------------------------------


def own_temperature_of_ministral():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    yarn["original_max_position_embeddings"] = TRAINED
    return make_other("Ministral3", (), max_position_embeddings=256, rope_parameters=yarn)


def own_temperature_of_llama4():
    config = transformers.Llama4TextConfig(
        **SIZES, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=32
    )
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (own_temperature_of_ministral, "Ministral3Config.*llama_4_scaling_beta"),
        (own_temperature_of_llama4, "Llama4TextConfig.*attn_temperature_tuning"),
        (lambda: make_other("Falcon", NO_GROUPS, alibi=False), "FalconAttention.*queries"),
    ],
)
def test_models_that_take_no_temperature_are_refused(make, fact):
    model = make()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(rope_patch.Refused, match=fact):
        rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before


def test_exports_are_refused():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    with pytest.raises(rope_patch.Refused, match="temperature='log-n'"):
        rope_patch.export(model, "vllm")
