"""accelerate's offloading around a patched model: hooks stay, weights stay where they are.

The model is saved first, so that it really comes from files; so little memory is allowed that some
of its layers go to disk.
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

REQUESTS = [("yarn", {"factor": 4}), ("dynamic-yarn", {})]
SOME = {"cpu": "220KB"}  # of about 310


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "gemma3"):
        make_model(family).save_pretrained(folder / family)
    return folder


def spread(folder, family, offload):
    """Return a model as accelerate lays it out by itself, partly on disk."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / family, device_map="auto", max_memory=SOME, offload_folder=offload
    )
    assert {"cpu", "disk"} <= {str(place) for place in model.hf_device_map.values()}
    return model


def placed(model):
    """Where accelerate would put the parts of a model that is in memory, or nowhere yet."""
    device_map = accelerate.infer_auto_device_map(
        model, max_memory=dict(SOME), no_split_module_classes=model._no_split_modules
    )
    assert {"cpu", "disk"} <= set(device_map.values())
    return device_map


def hooks(model):
    """Return accelerate's hooks, by module."""
    named = model.named_modules()
    return {name: vars(m)["_hf_hook"] for name, m in named if "_hf_hook" in vars(m)}


def on_meta(model):
    """Return the weights that are not in memory."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def count(model, calls):
    """Count every call of accelerate's hooks from here on."""
    for name, hook in hooks(model).items():
        forward = hook.pre_forward

        def noting(module, *args, forward=forward, name=name, **kwargs):
            calls.append(name)
            return forward(module, *args, **kwargs)

        hook.pre_forward = noting


@torch.no_grad()
def generated(model):
    return model.generate(tokens(SHORT), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hooks_outlive_patch_and_undo(folder, family, method, options, tmp_path):
    whole, model = make_model(family), spread(folder, family, tmp_path)
    plain, before, away = logits(model), hooks(model), on_meta(model)
    assert before
    assert any("layers" in name for name in away)
    handle = rope_patch.patch(model, method, **options)
    rope_patch.patch(whole, method, **options)
    calls = []
    count(model, calls)
    assert_close(logits(model), logits(whole))
    assert_differs(logits(model), plain)
    assert generated(model).equal(generated(whole))
    assert set(calls) == before.keys() - {"model.layers"}  # each took part; a list is not called
    assert all(hooks(model)[name] is hook for name, hook in before.items())
    assert on_meta(model) == away
    handle.undo()
    assert hooks(model) == before
    assert on_meta(model) == away
    assert logits(model).equal(plain)


@pytest.mark.parametrize(("method", "options"), REQUESTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_patched_model_can_be_spread_and_gathered(family, method, options, tmp_path):
    model = make_model(family)
    plain = logits(model)
    handle = rope_patch.patch(model, method, **options)
    patched, short = logits(model), logits(model, SHORT)
    device_map = placed(model)
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


def test_hooks_may_go_while_the_patch_stays(tmp_path):
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
def test_an_empty_model_is_patched_and_then_gets_its_weights(
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
    _fill_other_buffers(empty, whole)  # which no file has: to be made again, patched or not
    for length in (SHORT, LONG):
        assert logits(empty, length).equal(logits(whole, length))
    rope_patch.unpatch(empty)
    assert logits(empty).equal(plain)


def _fill_other_buffers(model, source):
    """Copy all buffers of another model, but for those of its rotary module."""
    theirs = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        if "rotary_emb" not in name:
            buffer.copy_(theirs[name])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_empty_model_is_patched_and_then_spread(folder, family, tmp_path):
    whole = make_model(family)
    with accelerate.init_empty_weights():
        empty = type(whole)(whole.config)
    empty.eval().tie_weights()
    plain = logits(whole)
    rope_patch.patch(whole, "yarn", factor=4)
    rope_patch.patch(empty, "yarn", factor=4)
    device_map = placed(empty)
    model = accelerate.load_checkpoint_and_dispatch(
        empty, folder / family, device_map=device_map, offload_folder=tmp_path, force_hooks=True
    )
    assert on_meta(model)
    assert_close(logits(model), logits(whole))
    rope_patch.unpatch(model)
    assert_close(logits(model), plain)
