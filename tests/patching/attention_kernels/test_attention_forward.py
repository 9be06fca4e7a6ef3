"""Test patched attention forwards: copies, hooks, recomputed activations, and deferred norms.

Norms are left to the rotation only where nothing can see it, and never lost.
"""

import gc
import threading
import weakref

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from helpers.tiny_models import SIZES, assert_close, assert_differs, make_model, tokens
from kernel_models import (
    FEW,
    OURS,
    backward,
    backward_all,
    deferred_norms,
    logits,
    patch,
    patched_attentions,
    saved_bytes,
)
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, StaticCache

import rope_patch

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
    assert len(patched_attentions(model)) == SIZES["num_hidden_layers"]
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


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("kernels", ["auto", *OURS])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_kept_outputs_stay_unchanged(family, kernels, cache):
    """Keep the projections' outputs and a view of their memory, without gradients."""
    model = make_model(family)
    patch(model, kernels)
    kept, projections = [], ("q_proj", "k_proj")
    for layer in model.model.layers:
        for name in projections:
            getattr(layer.self_attn, name).register_forward_hook(
                lambda module, args, output: kept.append((output, output[:], output.clone()))
            )
    # On a CPU, up to 2**15 numbers are joined first, in memory of their own.
    length = 400 if kernels == "auto" else FEW
    options = {"max_cache_len": length} if cache is StaticCache else {}
    with torch.no_grad():
        model(input_ids=tokens(length), past_key_values=cache(config=model.config, **options))
    assert len(kept) == len(projections) * SIZES["num_hidden_layers"]
    for output, view, values in kept:
        assert output.equal(values)
        assert view.equal(values)


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


@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(SIZES["head_dim"], bias=False), nn.Identity])
def test_norms_that_compute_something_else_are_called(kind):
    model = make_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = kind(), kind()
    with patch(model, "hf"):
        expected = logits(model)
    patch(model, "reference")
    assert not deferred_norms(model)
    assert_close(logits(model), expected)


# -- deferred norms --------------------------------------------------------------------------------


def q_norm(model):
    return model.model.layers[0].self_attn.q_norm


def double_output(module, args, output):
    return 2 * output if type(module).__name__ == "Qwen3RMSNorm" else output


def hook(model):
    handle = q_norm(model).register_forward_hook(double_output)
    return handle.remove


def hook_globally(model):
    return register_module_forward_hook(double_output).remove


def replace_forward(model):
    norm = q_norm(model)
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    return lambda: vars(norm).pop("forward")


def replace_weight(model):
    norm, weight = q_norm(model), q_norm(model).weight
    norm.weight = torch.nn.Parameter(3 * weight.detach())
    return lambda: setattr(norm, "weight", weight)


def replace_norm(model):
    attention, norm = model.model.layers[0].self_attn, q_norm(model)
    attention.q_norm = torch.nn.Identity()
    return lambda: setattr(attention, "q_norm", norm)


CHANGES = [hook, hook_globally, replace_forward, replace_weight, replace_norm]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_forwards_take_effect_at_once(change):
    model = make_model("qwen3")
    expected = []
    for choice in ("hf", "reference"):
        patch(model, choice)
        results = [logits(model)]
        undo = change(model)
        results.append(logits(model))
        undo()
        results.append(logits(model))
        if choice == "hf":
            expected = results
    assert_differs(expected[0], expected[1])
    for got, e in zip(results, expected, strict=True):
        assert_close(got, e)


@pytest.mark.parametrize("kernels", OURS)
def test_compiled_norm_is_called(kernels, reset_compiler):
    """A norm that is compiled alone is called in a graph, where others decide differently."""
    model = make_model("qwen3")
    with patch(model, "hf"):
        expected = logits(model)
    patch(model, kernels)
    q_norm(model).compile(backend="eager")
    assert_close(logits(model), expected)


def test_norm_outside_of_its_attention_norms():
    model = make_model("qwen3")
    x = torch.randn(1, 3, 4, 16)
    expected = q_norm(model)(x)
    patch(model, "reference")
    assert q_norm(model)(x).equal(expected)
    logits(model)
    assert q_norm(model)(x).equal(expected)


def test_error_within_an_attention_leaves_nothing_behind():
    model = make_model("qwen3")
    with patch(model, "hf"):
        expected = logits(model)
    patch(model, "reference")
    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    handle.remove()
    undo = hook(model)  # which what was decided before the error knows nothing of
    assert_differs(logits(model), expected)
    undo()
    assert_close(logits(model), expected)
    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    reference = weakref.ref(model.model.layers[0].self_attn)
    del model, handle, undo
    gc.collect()
    assert reference() is None


def test_threads_decide_separately():
    """One thread stops between the norms, while another one runs the model without deferral."""
    model = make_model("qwen3")
    with patch(model, "hf"):
        expected = logits(model)
    patch(model, "reference")
    reached, go, results = threading.Event(), threading.Event(), {}

    def stop(*_):
        if threading.current_thread() is first:
            reached.set()
            assert go.wait(60)

    model.model.layers[0].self_attn.k_proj.register_forward_hook(stop)
    first = threading.Thread(target=lambda: results.update(first=logits(model)))
    first.start()
    assert reached.wait(60)
    with forward_ad.dual_level():  # in which kernels do not run
        results["second"] = logits(model)
    go.set()
    first.join()
    for name in ("first", "second"):
        assert_close(results[name], expected)


def test_attention_called_alone():
    model = make_model("qwen3")
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    with torch.no_grad():
        expected = None
        for kernels in ("hf", "reference", "triton"):
            with patch(model, kernels):
                embeddings = model.model.rotary_emb(x, torch.arange(5)[None])
                got = attention(x, position_embeddings=embeddings, attention_mask=None)[0]
            expected = got if expected is None else expected
            assert_close(got, expected)


def test_temperature_around_the_forward_keeps_norms_deferred():
    """An interceptor copies the copied forward, too."""
    model = make_model("qwen3")
    options = {"factor": 4, "temperature": "log-n"}
    with rope_patch.patch(model, "yarn", kernels="hf", **options):
        expected = logits(model)
    rope_patch.patch(model, "yarn", kernels="reference", **options)
    calls, norm = [], type(q_norm(model))
    with pytest.MonkeyPatch.context() as monkeypatch:
        original = norm.forward
        monkeypatch.setattr(norm, "forward", lambda *a: calls.append(a[0]) or original(*a))
        assert_close(logits(model), expected)
    names = {"q_norm", "k_norm"}
    deferred = [m for n, m in model.named_modules() if n.rpartition(".")[2] in names]
    assert deferred
    assert calls  # those of the layers' own norms
    assert not any(each is norm for each in calls for norm in deferred)
