"""Test patched attention forwards: norms, copies, hooks and recomputed activations."""

import copy
import importlib
import pickle

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from helpers.tiny_models import (
    SIZES,
    assert_close,
    make_model,
    tokens,
)
from kernel_models import (
    FEW,
    OURS,
    backward,
    backward_all,
    logits,
    modules_with_forward,
    patch,
    saved_bytes,
)
from torch import nn

import rope_patch
from rope_patch.patching.kernels.attention_forward import PatchedAttentionForward
from rope_patch.patching.kernels.deferred_norms import norm_spec_of

pytest.importorskip("triton")


@pytest.mark.parametrize(("family", "less"), [("qwen3", 2), ("gemma3", 3)])
def test_models_with_norms_save_less_for_backward(family, less):
    """Count in sizes of queries plus keys: transformers saves 3 or 4, ours 1 and the norms."""
    model = make_model(family).bfloat16()
    saved = {}
    for kernels in ("hf", "triton"):
        with patch(model, kernels):
            saved[kernels] = saved_bytes(lambda: model(input_ids=tokens(FEW)).logits)
    heads = SIZES["num_attention_heads"] + SIZES["num_key_value_heads"]
    unit = SIZES["num_hidden_layers"] * heads * SIZES["head_dim"] * FEW * 2
    assert (saved["hf"] - saved["triton"]) / unit > less - 0.25


@pytest.mark.parametrize("kernels", ["auto", *OURS])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_are_independent(duplicate, family, kernels):
    model = make_model(family)
    plain = logits(model)
    patch(model, kernels)
    expected = logits(model)
    other = duplicate(model)
    rope_patch.unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert logits(other).equal(expected)
    assert all(
        vars(m)["forward"].module is m for m in modules_with_forward(other, PatchedAttentionForward)
    )
    rope_patch.unpatch(other)
    assert logits(other).equal(plain)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kernels", OURS)
def test_norms_trained_by_peft_are_used(kernels, when):
    def adapt(model):
        return peft.get_peft_model(
            model,
            peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["q_norm", "k_norm"]),
        )

    expected = make_model("qwen3")
    model = make_model("qwen3")
    if when == "before":
        adapted = adapt(model)
        patch(adapted, kernels)
    else:
        patch(model, kernels)
        adapted = adapt(model)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
        for module in expected.modules():
            for name in ("q_norm", "k_norm"):
                if hasattr(module, name):
                    getattr(module, name).weight.mul_(1.5)
    patch(expected, "hf")
    torch.testing.assert_close(logits(adapted), logits(expected), rtol=0, atol=5e-5)


@pytest.mark.parametrize("kernels", ["auto", *OURS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hooks_wrap_the_forward(when, kernels):
    model = make_model("qwen3")
    plain, calls = logits(model), []

    class RecordingHook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    def hook():
        for layer in model.model.layers:
            add_hook_to_module(layer.self_attn, RecordingHook())
            add_hook_to_module(layer.self_attn.q_norm, RecordingHook())
        add_hook_to_module(model.model.rotary_emb, RecordingHook())

    with patch(model, "hf"):
        expected = logits(model)
    if when == "before":
        hook()
    handle = patch(model, kernels)
    if when == "after":
        hook()
    assert_close(logits(model), expected)
    assert len(calls) == 2 * 2 + 1
    handle.undo()
    calls.clear()
    assert logits(model).equal(plain)
    assert len(calls) == 2 * 2 + 1
    for module in model.modules():
        remove_hook_from_module(module)
    assert logits(model).equal(plain)


@pytest.mark.parametrize("kernels", ["auto", *OURS])
def test_modules_with_a_class_replaced_by_fsdp2(kernels):
    """Derive the classes of sharded modules in place, as FSDP2 does."""
    model = make_model("qwen3")
    with patch(model, "hf"):
        expected = logits(model)
    for layer in model.model.layers:
        for module in (layer, layer.self_attn):
            module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    patch(model, kernels)
    assert len(modules_with_forward(model, PatchedAttentionForward)) == SIZES["num_hidden_layers"]
    assert_close(logits(model), expected)


def test_hooks_on_a_norm_get_its_output():
    model = make_model("qwen3")
    norm = model.model.layers[0].self_attn.q_norm
    expected, outputs = [], []
    with patch(model, "hf"):
        handle = norm.register_forward_hook(lambda m, a, out: expected.append(out))
        logits(model)
        handle.remove()
    with patch(model, "reference"):
        norm.register_forward_hook(lambda m, a, out: outputs.append(out))
        logits(model)
    assert_close(outputs[0], expected[0])


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        *(("reference", family) for family in ("llama", "qwen3")),
        ("triton", "llama"),
        pytest.param("triton", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_gradients_with_activation_checkpointing(kernels, family):
    model = make_model(family)
    patch(model, kernels)
    expected = backward(model.train())
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for got, e in zip(backward_all(model), expected, strict=True):
            torch.testing.assert_close(got, e, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "offset"),
    [("qwen3.Qwen3RMSNorm", 0.0), ("llama.LlamaRMSNorm", 0.0), ("olmo2.Olmo2RMSNorm", 0.0),
     ("gemma3.Gemma3RMSNorm", 1.0), ("qwen3_next.Qwen3NextRMSNorm", 1.0)],
)  # fmt: skip
def test_norms_are_recognised_by_their_computation(kind, offset):
    model, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    assert norm_spec_of(getattr(module, name)).offset == offset


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.Identity, nn.Linear])
def test_other_modules_are_not_recognised_as_norms(kind):
    assert norm_spec_of(kind) is None
