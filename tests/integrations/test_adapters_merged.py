"""Test PEFT's LoRA with a patch, in either order: trained, disabled, merged.

The reference is a transformers model of the patched config with the same adapter.
"""

import copy

import pytest
import torch
from helpers.tiny_models import (
    LONG,
    SHORT,
    assert_close,
    assert_differs,
    logits,
    make_model,
    tokens,
)

import rope_patch

peft = pytest.importorskip("peft")

LORA = {"target_modules": ["q_proj", "k_proj", "up_proj"], "r": 4, "init_lora_weights": False}
FAMILIES = ["llama", "qwen3", "gemma3"]


def adapt(model):
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


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("first", ["patch", "adapter"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
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
