"""Test dynamic methods on wrapped models: offloading, adapters, checkpointing."""

import accelerate
import pytest
import torch
from helpers.tiny_models import LONG, SHORT, make_model, step_by_step, tokens

import rope_patch


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


def with_adapter(model, folder):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("wrap", [on_disk, with_adapter])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_wrapped_model_decodes_like_the_model(family, wrap, tmp_path):
    model, ids = make_model(family), tokens(LONG)
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, SHORT)
    wrapped = wrap(make_model(family), tmp_path)
    rope_patch.patch(wrapped, "dynamic-yarn")
    assert step_by_step(wrapped, ids, SHORT).equal(expected)


def test_gradient_checkpointing_does_not_change_gradients():
    def gradient(checkpointing):
        model, ids = make_model().train(), tokens(LONG)
        rope_patch.patch(model, "dynamic-yarn")
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad

    assert gradient(True).equal(gradient(False))
    assert gradient(False).abs().max() > 0
