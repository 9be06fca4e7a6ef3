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
    logits,
    make_generator,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from transformers import AttentionInterface, DynamicCache

import rope_patch
from rope_patch.methods.temperature import Temperature
from rope_patch.patching.query_temperature import QueryScaling

TEMPERATURES = {
    1.5: lambda p: 1.5,
    "log-n": lambda p: max(1, math.log(p + 1) / math.log(TRAINED)),
    "llama4": lambda p: 1 + 0.1 * math.log(1 + p // TRAINED),
    "drope:0.412": lambda p: 1 + 0.412 * math.log(max(1, (p + 1) / TRAINED)),
}
KERNELS = ["auto", "reference", "hf"]
METHODS = {"yarn": {"factor": 4}, "dynamic-yarn": {}, "nope": {}, "default": {"factor": 1}}


def stablelm():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).eval()


def deepseek():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = transformers.DeepseekV3Config(
        **{**sizes, "num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def gpt_neox():
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).eval()


MODELS = {
    "llama": lambda: make_model("llama"),
    "qwen3": lambda: make_model("qwen3"),
    "gemma2": lambda: make_model("gemma2"),
    "gemma3": lambda: make_model("gemma3"),
    "stablelm": stablelm,
    "deepseek_v3": deepseek,
    "gpt_neox": gpt_neox,
}


class WrittenOut:
    """Attention written out: softmax(cap(scale * t(position) * q k)) v, without any mask given.

    Attributes:
        factor: t, a function of the position.
        starts: Tokens of padding ahead of each row.
    """

    def __init__(self, factor, starts=(0,), layers=lambda module: True):
        self.factor, self.starts, self.layers = factor, starts, layers

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **options):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        rows, _, steps, width = query.shape
        slots = key.shape[2]
        scaling = width**-0.5 if scaling is None else scaling
        output = torch.zeros(rows, steps, query.shape[1], value.shape[3], dtype=query.dtype)
        for row in range(rows):
            start = self.starts[row]
            for step in range(steps):
                slot = slots - steps + step
                if slot < start:
                    continue
                t = self.factor(slot - start) if self.layers(module) else 1.0
                first = start
                if (window := options.get("sliding_window")) is not None:
                    first = max(first, slot - window + 1)
                scores = key[row, :, first : slot + 1] @ (t * query[row, :, step])[:, :, None]
                scores = scores[..., 0] * scaling
                if (cap := options.get("softcap")) is not None:
                    scores = torch.tanh(scores / cap) * cap
                weights = scores.softmax(-1)
                output[row, step] = (weights[..., None] * value[row, :, first : slot + 1]).sum(1)
        return output, None


def written_out(model, temperature, method="yarn", starts=(0,), **options):
    """Return a patched copy without temperature, whose attention is written out in float64."""
    twin = copy.deepcopy(model)
    if rope_patch.current(twin):
        rope_patch.unpatch(twin)
    rope_patch.patch(twin, method, **options)
    full_only = model.config.model_type == "gemma3_text"
    truth = WrittenOut(
        TEMPERATURES[temperature],
        starts,
        lambda module: not full_only or module.layer_type == "full_attention",
    )
    AttentionInterface.register("written_out", truth)
    twin.set_attn_implementation("written_out")
    return twin


def close(got, expected, atol=1e-10):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("family", MODELS)
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


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
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
    """A token keeps its factor: keys are as they were cached."""
    model, ids = make_model().double(), tokens(LONG)
    truth = written_out(model, "log-n", method, **METHODS[method])
    rope_patch.patch(model, method, temperature="log-n", **METHODS[method])
    close(step_by_step(model, ids, SHORT), step_by_step(truth, ids, SHORT))
    if method != "dynamic-yarn":  # whose old hidden states have other frequencies
        close(step_by_step(model, ids, SHORT), forward(model, ids))


def test_padded_rows_count_from_their_first_token():
    model = make_model().double()
    rows = [tokens(length, seed=length) for length in (30, 150, 90)]
    ids, mask = padded(rows, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    truth = written_out(model, "log-n", starts=(120, 0, 60), factor=4)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    options = {"attention_mask": mask, "position_ids": positions}
    got, expected = forward(model, ids, **options), forward(truth, ids, **options)
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_in_16_bits_are_rounded_once(dtype):
    """A factor in 16 bits would shift all logits of a query the same way."""
    scaling = QueryScaling(Temperature.parse("log-n"), TRAINED)
    query = torch.randn(1, 4, LONG, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    factors = [max(1, math.log(p + 1) / math.log(TRAINED)) for p in range(LONG)]
    exact = query.double() * torch.tensor(factors, dtype=torch.float64)[:, None]
    got = scaling.scale(query, torch.arange(LONG)[None])
    assert (got != exact.to(dtype)).double().mean() < 1e-3  # ties of a rounding to float32


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", ["log-n", "llama4", "drope:0.412"])
def test_short_texts_keep_their_bits(family, temperature):
    model, ids = make_model(family), tokens(TRAINED)
    plain = forward(model, ids)
    rope_patch.patch(model, "dynamic-yarn", temperature=temperature)
    assert forward(model, ids).equal(plain)


@pytest.mark.parametrize("kernels", KERNELS)
def test_undo_is_bit_exact(kernels):
    model, ids = make_model("qwen3"), tokens(LONG)
    plain, own = forward(model, ids), {name: set(vars(m)) for name, m in model.named_modules()}
    handle = rope_patch.patch(model, "yarn", factor=4, temperature=2, kernels=kernels)
    again = rope_patch.patch(model, "yarn", factor=4, temperature=3, kernels=kernels)
    assert not forward(model, ids).equal(plain)
    again.undo()
    assert not handle.active
    assert forward(model, ids).equal(plain)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == own


def test_generate_matches_decoding_without_a_cache():
    model, ids = make_generator("llama"), tokens(SHORT)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    options = {"max_new_tokens": 100, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert model.generate(ids, **options).equal(expected)
    static = model.generate(ids, cache_implementation="static", **options)
    assert static.equal(expected)


def test_copies_and_saved_models_keep_the_temperature(tmp_path, caplog):
    model, ids = make_model(), tokens(LONG)
    rope_patch.patch(model, "yarn", factor=4, temperature="llama4:0.3")
    expected = forward(model, ids)
    twin = copy.deepcopy(model)
    rope_patch.save(model, tmp_path)
    assert "no form of its own" in caplog.text
    rope_patch.unpatch(model)
    assert forward(twin, ids).equal(expected)
    loaded = rope_patch.load(tmp_path, dtype=torch.float32)
    handle = rope_patch.current(loaded)
    assert handle.extension.options["temperature"] == "llama4:0.3"
    torch.testing.assert_close(forward(loaded, ids), expected, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model, ids = make_model().double(), tokens(LONG)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    model.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
        model.zero_grad()
    close(gradients[1], gradients[0])


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


def refused(model, match, **options):
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(rope_patch.Refused, match=match):
        rope_patch.patch(model, "yarn", factor=4, temperature="log-n", **options)
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before


def test_models_with_a_temperature_of_their_own_are_refused():
    ministral = transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(
            **{**SIZES, "max_position_embeddings": 256},
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": TRAINED,
                "llama_4_scaling_beta": 0.1,
            },
        )
    )
    refused(ministral, "Ministral3Config has a temperature of its own .llama_4_scaling_beta")
    config = transformers.Llama4TextConfig(
        **SIZES, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=32
    )
    llama4 = transformers.Llama4ForCausalLM(config)
    refused(llama4, "Llama4TextConfig has a temperature of its own .attn_temperature_tuning")


def test_queries_out_of_reach_are_refused():
    sizes = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=False))
    refused(falcon, "FalconAttention does not hand its queries to one of transformers'")


def test_exports_are_refused():
    model = make_model()
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    with pytest.raises(rope_patch.Refused, match="temperature='log-n' cannot be exported"):
        rope_patch.export(model, "vllm")


def test_log_n_is_refused_for_a_trained_length_without_a_logarithm():
    model = make_model("llama")
    before = logits(model)
    with pytest.raises(rope_patch.Refused, match=r"divides by ln\(trained_length\).*got 1$"):
        rope_patch.patch(model, "yarn", factor=4, temperature="log-n", trained_length=1)
    assert rope_patch.current(model) is None
    assert torch.equal(logits(model), before)
