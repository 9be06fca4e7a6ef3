"""Test models inside PEFT's LoRA or accelerate's offloading, patched before and after that.

The reference of an adapter is a transformers model of the patched config with the same adapter.
Offloaded models are loaded with so little memory that some layers are on disk: accelerate's hooks
and the places of weights stay.
"""

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from helpers.tiny_models import (
    LONG,
    SHORT,
    TRAINED,
    assert_close,
    assert_differs,
    logits,
    make_model,
    step_by_step,
    tokens,
)
from transformers import AutoModelForCausalLM

import rope_patch

# -- adapters --------------------------------------------------------------------------------------

LORA = {"target_modules": ["q_proj", "k_proj", "up_proj"], "r": 4, "init_lora_weights": False}
ORDERS = pytest.mark.parametrize(
    ("family", "first"), [("llama", "adapter"), ("qwen3", "patch"), ("gemma3", "adapter")]
)


def adapt(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).eval()


def adapted_and_patched(family, first):
    """Return an adapter on a patched model, or a patch on an adapted one."""
    model = make_model(family)
    if first == "patch":
        rope_patch.patch(model, "yarn", factor=4)
        return adapt(model)
    adapted = adapt(model)
    rope_patch.patch(adapted, "yarn", factor=4)
    return adapted


def native(adapted, family):
    """Return a transformers model of the patched config, with the same weights and adapter."""
    config = copy.deepcopy(adapted.config)
    model = adapt(make_model(family, config=config))
    model.load_state_dict(adapted.state_dict())
    return model


@ORDERS
def test_adapter_can_be_disabled_merged_and_unloaded(family, first):
    adapted, base = adapted_and_patched(family, first), make_model(family)
    plain = logits(base)
    rope_patch.patch(base, "yarn", factor=4)
    expected = logits(native(adapted, family))
    assert_close(logits(adapted), expected)
    with adapted.disable_adapter():
        assert_close(logits(adapted), logits(base))
    assert_differs(logits(adapted), logits(base))
    adapted.merge_adapter()
    assert_close(logits(adapted), expected)
    adapted.unmerge_adapter()
    unloaded = adapted.unload()
    assert_close(logits(unloaded), logits(base))
    rope_patch.unpatch(unloaded)
    assert_close(logits(unloaded), plain)


@ORDERS
def test_merged_model_keeps_its_patch_and_can_be_undone(family, first):
    adapted = adapted_and_patched(family, first)
    expected = logits(native(adapted, family))
    unpatched = adapt(make_model(family))
    unpatched.load_state_dict(adapted.state_dict())
    merged = adapted.merge_and_unload()
    assert type(merged) is type(make_model(family))
    handle = rope_patch.current(merged)
    assert handle.active
    assert_close(logits(merged), expected)
    handle.undo()
    assert_close(logits(merged), logits(unpatched))
    assert_differs(logits(merged), expected)


@ORDERS
def test_training_an_adapter_matches_the_native_model(family, first):
    adapted = adapted_and_patched(family, first)
    native_model = native(adapted, family)
    losses = {}
    for name, model in (("ours", adapted), ("theirs", native_model)):
        model.train()
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        losses[name] = []
        for seed in range(3):
            ids = tokens(LONG, seed=seed)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["theirs"], abs=1e-5)
    torch.testing.assert_close(
        logits(adapted.eval()), logits(native_model.eval()), rtol=0, atol=5e-5
    )


def test_dynamic_method_works_through_an_adapter_and_a_merge():
    model = make_model()
    short = logits(adapt(copy.deepcopy(model)), SHORT)
    adapted = adapt(model)
    handle = rope_patch.patch(adapted, "dynamic-yarn")
    assert logits(adapted, SHORT).equal(short)  # below the trained length
    static = copy.deepcopy(adapted)
    rope_patch.unpatch(static)
    factor = 2 ** (5 / 4)  # the first growth step of at least 150 / 64
    rope_patch.patch(static, "yarn", factor=factor)
    assert_close(logits(adapted), logits(static))
    merged = adapted.merge_and_unload()
    assert rope_patch.current(merged) is handle
    assert_close(logits(merged), logits(static))


# -- offloading ------------------------------------------------------------------------------------

REQUESTS = pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama", "ntk", {"factor": 4, "temperature": "log-n"}),
        ("gemma3", "yarn", {"factor": 4}),
        ("gemma3", "dynamic-yarn", {}),
    ],
)
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


@REQUESTS
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


@REQUESTS
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
@REQUESTS
def test_empty_model_is_patched_and_then_filled(family, method, options, include_buffers):
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


def test_empty_model_is_patched_and_then_dispatched(folder, tmp_path):
    family = "gemma3"
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


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


def with_adapter(model, folder):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(("family", "wrap"), [("llama", on_disk), ("gemma3", with_adapter)])
def test_wrapped_model_decodes_like_the_model(family, wrap, tmp_path):
    model, ids, prompt = make_model(family), tokens(TRAINED + 6), TRAINED - 4
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, prompt)
    wrapped = wrap(make_model(family), tmp_path)
    rope_patch.patch(wrapped, "dynamic-yarn")
    assert step_by_step(wrapped, ids, prompt).equal(expected)
