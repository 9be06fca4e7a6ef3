"""Test accelerate's offloading of patched models: hooks and the places of weights stay.

The model is loaded from files, with so little memory that some layers are offloaded to disk.
"""

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from helpers.tiny_models import (
    LONG,
    SHORT,
    assert_close,
    assert_differs,
    logits,
    make_model,
    tokens,
)
from transformers import AutoModelForCausalLM

import rope_patch

REQUESTS = [
    ("yarn", {"factor": 4}),
    ("dynamic-yarn", {}),
    ("ntk", {"factor": 4, "temperature": "log-n"}),
]
MAX_MEMORY = {"cpu": "220KB"}  # of about 310


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "gemma3"):
        make_model(family).save_pretrained(folder / family)
    return folder


def load_offloaded(folder, family, offload):
    """Load a model with accelerate's automatic device map, partly on disk."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / family, device_map="auto", max_memory=MAX_MEMORY, offload_folder=offload
    )
    assert {"cpu", "disk"} <= {str(device) for device in model.hf_device_map.values()}
    return model


def infer_device_map(model):
    """Return accelerate's device map for a model in memory or without weights."""
    device_map = accelerate.infer_auto_device_map(
        model, max_memory=dict(MAX_MEMORY), no_split_module_classes=model._no_split_modules
    )
    assert {"cpu", "disk"} <= set(device_map.values())
    return device_map


def hooks(model):
    """Return accelerate's hooks by module name."""
    named = model.named_modules()
    return {name: vars(m)["_hf_hook"] for name, m in named if "_hf_hook" in vars(m)}


def on_meta(model):
    """Return the names of weights that are not in memory."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def count_calls(model, calls):
    """Record every later call of accelerate's hooks."""
    for name, hook in hooks(model).items():
        forward = hook.pre_forward

        def record_and_call(module, *args, forward=forward, name=name, **kwargs):
            calls.append(name)
            return forward(module, *args, **kwargs)

        hook.pre_forward = record_and_call


@torch.no_grad()
def generate(model):
    return model.generate(tokens(SHORT), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hooks_survive_patch_and_undo(folder, family, method, options, tmp_path):
    whole, model = make_model(family), load_offloaded(folder, family, tmp_path)
    plain, before, offloaded = logits(model), hooks(model), on_meta(model)
    assert before
    assert any("layers" in name for name in offloaded)
    handle = rope_patch.patch(model, method, **options)
    rope_patch.patch(whole, method, **options)
    calls = []
    count_calls(model, calls)
    assert_close(logits(model), logits(whole))
    assert_differs(logits(model), plain)
    assert generate(model).equal(generate(whole))
    assert set(calls) == before.keys() - {"model.layers"}  # all but the list of layers
    assert all(hooks(model)[name] is hook for name, hook in before.items())
    assert on_meta(model) == offloaded
    handle.undo()
    assert hooks(model) == before
    assert on_meta(model) == offloaded
    assert logits(model).equal(plain)


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_patched_model_can_be_dispatched_and_restored(family, method, options, tmp_path):
    model = make_model(family)
    plain = logits(model)
    handle = rope_patch.patch(model, method, **options)
    patched, short = logits(model), logits(model, SHORT)
    device_map = infer_device_map(model)
    accelerate.dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=True)
    assert on_meta(model)
    assert hooks(model)
    assert_close(logits(model), patched)
    assert_close(logits(model, SHORT), short)
    assert rope_patch.current(model) is handle
    handle.undo()
    assert hooks(model)
    assert_close(logits(model), plain)
    remove_hook_from_submodules(model)
    assert not hooks(model)


def test_hooks_can_be_removed_under_a_patch(tmp_path):
    model = make_model()
    plain = logits(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert on_meta(model)
    handle = rope_patch.patch(model, "yarn", factor=4)
    offloaded = logits(model)
    assert_differs(offloaded, plain)
    remove_hook_from_submodules(model)
    assert not on_meta(model)
    assert logits(model).equal(offloaded)
    handle.undo()
    assert logits(model).equal(plain)


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_empty_model_is_patched_and_then_filled(
    folder, family, method, options, include_buffers, tmp_path
):
    whole = make_model(family)
    plain = logits(whole)
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        empty = type(whole)(whole.config)
    empty.eval().tie_weights()
    rope_patch.patch(whole, method, **options)
    rope_patch.patch(empty, method, **options)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    empty.load_state_dict(whole.state_dict())
    _fill_other_buffers(empty, whole)  # no file has these, with a patch or without
    for length in (SHORT, LONG):
        assert logits(empty, length).equal(logits(whole, length))
    rope_patch.unpatch(empty)
    assert logits(empty).equal(plain)


def _fill_other_buffers(model, source):
    """Copy all buffers of another model except those of its rotary module."""
    source_buffers = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        if "rotary_emb" not in name:
            buffer.copy_(source_buffers[name])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_empty_model_is_patched_and_then_dispatched(folder, family, tmp_path):
    whole = make_model(family)
    with accelerate.init_empty_weights():
        empty = type(whole)(whole.config)
    empty.eval().tie_weights()
    plain = logits(whole)
    rope_patch.patch(whole, "yarn", factor=4)
    rope_patch.patch(empty, "yarn", factor=4)
    device_map = infer_device_map(empty)
    model = accelerate.load_checkpoint_and_dispatch(
        empty, folder / family, device_map=device_map, offload_folder=tmp_path, force_hooks=True
    )
    assert on_meta(model)
    assert_close(logits(model), logits(whole))
    rope_patch.unpatch(model)
    assert_close(logits(model), plain)
