"""Test quantised weights against the formulas of GGUF's types, and the errors."""

import importlib.util

import pytest
import torch
import transformers
from helpers.tiny_models import SIZES, logits, make_model

from rope_patch.pretrained import (
    GGUF_TYPES,
    loading_arguments,
    parse_quantization,
    quantize,
    require_unquantized,
)

pytest.importorskip("gguf")


def blocks(weight):
    return weight.double().reshape(-1, 32)


def half(scale):
    return scale.float().half().double()


def divide(values, scale):
    return (values / scale).nan_to_num(0)  # a row of zeros, such as padding's, has no scale


def q8_0(weight):
    """Round to 8 bits per weight and a half-precision scale per 32, as ggml's Q8_0 defines it."""
    x = blocks(weight)
    scale = x.abs().amax(1, keepdim=True).float().double() / 127
    levels = x.sign() * (divide(x, scale).abs() + 0.5).floor()
    return (half(scale) * levels).reshape(weight.shape)


def q4_0(weight):
    """Round to 4 bits: the value that is largest in size becomes -8 times the scale."""
    x = blocks(weight)
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale = largest / -8
    levels = (divide(x, scale) + 8.5).floor().clamp(0, 15) - 8
    return (half(scale) * levels).reshape(weight.shape)


def q4_1(weight):
    """Round to 4 bits between the block's minimum and maximum."""
    x = blocks(weight)
    low = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - low) / 15
    levels = (divide(x - low, scale) + 0.5).floor().clamp(0, 15)
    return (half(scale) * levels + half(low)).reshape(weight.shape)


def assert_rounded(got, weight, formula, precision=0.0):
    expected = formula(weight)
    # A few values lie on the border of two levels, where float32 may decide otherwise.
    equal = (got.double() - expected).abs() < 1e-6 + precision * expected.abs()
    assert equal.double().mean() > 0.999
    step = blocks(weight).abs().amax(1).max() / 7
    assert (got.double() - weight.double()).abs().max() <= step


FORMULAS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1}


@pytest.mark.parametrize("name", FORMULAS)
def test_linear_layers_follow_the_formula(name):
    model = make_model(tie_word_embeddings=False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    quantize(model, name)
    for n, parameter in model.named_parameters():
        if "norm" in n:
            assert torch.equal(parameter, before[n]), n
        elif n == "lm_head.weight":  # finer, as llama-quantize has it
            assert_rounded(parameter, before[n], q8_0)
        else:
            assert_rounded(parameter, before[n], FORMULAS[name])


def test_tied_embedding_is_the_output_matrix():
    model = make_model(tie_word_embeddings=True)
    before = model.lm_head.weight.detach().clone()
    quantize(model, "Q4_0")
    assert_rounded(model.lm_head.weight, before, q8_0)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fewer_bits_change_more():
    plain = logits(make_model())
    errors = []
    for name in GGUF_TYPES:
        model = make_model()
        quantize(model, name)
        errors.append(float((logits(model) - plain).pow(2).mean()))
        assert errors[-1] > 0
    assert errors == sorted(errors)  # GGUF_TYPES is ordered from fine to coarse
    untouched = make_model()
    quantize(untouched, None)
    assert torch.equal(logits(untouched), plain)


def test_dtype_stays():
    model = make_model().bfloat16()
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantize(model, "Q8_0")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert_rounded(weight, before, q8_0, precision=2**-8)


def test_experts_are_quantised_and_routers_are_not():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    model = transformers.MixtralForCausalLM(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    quantize(model, "Q4_0")
    kinds = {"experts": 0, "gate.": 0}
    for n, parameter in model.named_parameters():
        if "experts" in n:
            assert_rounded(parameter, before[n], q4_0)
            kinds["experts"] += 1
        elif ".gate." in n or "router" in n:
            assert torch.equal(parameter, before[n])
            kinds["gate."] += 1
    assert min(kinds.values()) > 0


def test_the_gate_of_a_shared_expert_stays():
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.Qwen2MoeForCausalLM(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    quantize(model, "Q4_0")
    after = dict(model.named_parameters())
    gates = [n for n in before if "shared_expert_gate" in n]
    assert gates
    assert all(torch.equal(after[n], before[n]) for n in gates)
    shared = [n for n in before if "shared_expert." in n]
    assert shared
    assert not any(torch.equal(after[n], before[n]) for n in shared)


@pytest.mark.skipif(not hasattr(transformers, "GptOssConfig"), reason="a newer architecture")
def test_transposed_experts_are_rounded_along_their_inputs():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 64}, num_local_experts=2, num_experts_per_tok=1
    )
    model = transformers.GptOssForCausalLM(config)
    experts = model.model.layers[0].mlp.experts
    torch.nn.init.normal_(experts.gate_up_proj)
    before = experts.gate_up_proj.detach().clone()  # [E, inputs, outputs]
    quantize(model, "Q8_0")
    assert_rounded(experts.gate_up_proj.transpose(1, 2), before.transpose(1, 2).contiguous(), q8_0)


def test_rows_that_fit_no_block_stay():
    layer = torch.nn.Linear(48, 4)
    model = make_model()
    model.extra = layer
    before = layer.weight.detach().clone()
    quantize(model, "Q4_0")
    assert torch.equal(layer.weight, before)


def test_offloaded_weights_are_refused():
    with pytest.raises(ValueError, match="is offloaded"):
        quantize(make_model().to("meta"), "Q4_0")


def test_names():
    assert parse_quantization("q4_0") == "Q4_0"
    with pytest.raises(ValueError, match=r"did you mean 'Q8_0'.*Q8_0, Q5_1"):
        parse_quantization("q8")
    with pytest.raises(ValueError, match=r"llama-quantize, and evaluate its file with --gguf-file"):
        parse_quantization("Q4_K_M")


@pytest.mark.parametrize(("name", "package"), [("nf4", "bitsandbytes"), ("Q4_0", "gguf")])
def test_missing_package(name, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"{package} is not installed.*pip install {package}"):
        parse_quantization(name)


def test_quantised_checkpoints_are_refused():
    config = transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="its config names gptq"):
        require_unquantized("Q4_0", config, None)
    with pytest.raises(ValueError, match=r"\(model.gguf\)"):
        require_unquantized("Q4_0", transformers.LlamaConfig(), "model.gguf")
    require_unquantized("Q4_0", transformers.LlamaConfig(), None)


def test_arguments_of_bitsandbytes():
    assert loading_arguments("Q4_0", torch.float32) == {}
    nf4 = loading_arguments("nf4", torch.bfloat16)["quantization_config"]
    assert (nf4.load_in_4bit, nf4.bnb_4bit_quant_type) == (True, "nf4")
    assert nf4.bnb_4bit_compute_dtype == torch.bfloat16
    assert loading_arguments("int8", torch.float32)["quantization_config"].load_in_8bit
