"""Test that norms are left to the rotation only where nothing can see it, and never lost."""

import gc
import threading
import weakref

import pytest
import torch
from helpers.tiny_models import assert_close, assert_differs, make_model
from kernel_models import logits, patch
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook

import rope_patch

pytest.importorskip("triton")


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


@pytest.mark.parametrize("kernels", ["reference", "triton"])
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
