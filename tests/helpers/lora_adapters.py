"""Make and compare LoRA adapters of tiny models."""

import json

import pytest
import torch
import transformers

import rope_patch
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    SHORT,
    SHORT_FACTOR,
    logits,
)


def lora(**changes):
    return pytest.importorskip("peft").LoraConfig(
        **{"target_modules": ["q_proj", "v_proj"], "r": 2, "init_lora_weights": False, **changes}
    )


def add_adapter(model, seed=0, **changes):
    torch.manual_seed(seed)
    return pytest.importorskip("peft").get_peft_model(model, lora(**changes)).eval()


def state(model):
    """Return everything of a model that a refused adapter must not change."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()},
        [parameter.requires_grad for parameter in model.parameters()],
        json.dumps(model.config.to_dict(), default=str, sort_keys=True),
        rope_patch.current(model),
    )


def assert_untouched(model, before):
    after = state(model)
    assert after[1:] == before[1:]
    assert all(value.equal(before[0][name]) for name, value in after[0].items())


def base(bases, family="llama"):
    return transformers.AutoModelForCausalLM.from_pretrained(bases / family)


METHODS = {
    "linear": {"factor": 4},
    "yarn": {"factor": 4, "beta_fast": 16},
    "ntk": {"factor": 4},
    "longrope": {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR},
    "dynamic": {"factor": 2},
    "dynamic-yarn": {},
    "mixed-yarn": {"factor": 4},
    "rerope": {"window": 20},
}


def assert_logits(model, expected):
    for length, expected_logits in zip((SHORT, LONG), expected, strict=True):
        assert logits(model, length).equal(expected_logits)


def change(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
