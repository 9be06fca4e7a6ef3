"""Test PEFT adapters of models that do not rotate."""

import pytest
import torch
from helpers.encoding_models import LENGTH, encoding_model, token_logits

import rope_patch
from rope_patch.utils.errors import Refused

peft = pytest.importorskip("peft")
TARGETS = {"GPT2LMHeadModel": "c_attn", "BloomForCausalLM": "query_key_value"}
REQUESTS = {
    "GPT2LMHeadModel": ("linear", {"factor": 4}),
    "BloomForCausalLM": ("ntk", {"factor": 4, "trained_length": LENGTH}),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=TARGETS)
def adapter(request, tmp_path):
    """Return an adapter's folder, its base's folder and model class, and the model."""
    family = request.param
    base = encoding_model(family)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base").eval()
    method, arguments = REQUESTS[family]
    rope_patch.patch(base, method, **arguments)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[TARGETS[family]], r=2, init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    rope_patch.save(model, tmp_path / "adapter")
    return tmp_path, family, token_logits(model, 3 * LENGTH)


def plain_base(folder, family):
    return type(encoding_model(family)).from_pretrained(folder / "base").eval()


def test_load_restores_base_patch_and_adapter(adapter):
    folder, family, expected = adapter
    loaded = rope_patch.load(folder / "adapter")
    assert torch.equal(token_logits(loaded, 3 * LENGTH), expected)
    assert str(rope_patch.current(loaded)) == f"{REQUESTS[family][0]}, 40 → 160 tokens"


def test_load_adapter_patches_a_plain_base_and_takes_a_patched_one(adapter):
    folder, family, expected = adapter
    plain, patched = (plain_base(folder, family) for _ in range(2))
    method, arguments = REQUESTS[family]
    rope_patch.patch(patched, method, **arguments)
    for base in (plain, patched):
        model = rope_patch.load_adapter(base, folder / "adapter")
        assert torch.equal(token_logits(model, 3 * LENGTH), expected)


def test_a_base_that_is_extended_otherwise_is_refused(adapter):
    folder, family, _ = adapter
    base = plain_base(folder, family)
    arguments = REQUESTS[family][1] | {"factor": 2}
    rope_patch.patch(base, "linear", **arguments)
    with pytest.raises(Refused, match=r"got one that is patched with linear, 40 → 80 tokens"):
        rope_patch.load_adapter(base, folder / "adapter")
    with pytest.raises(Refused, match="got one that is patched with linear"):
        rope_patch.load(folder / "adapter", "linear", **arguments)


def test_another_base_is_refused(adapter):
    folder, family, _ = adapter
    with pytest.raises(Refused, match="was trained on a base that was patched with"):
        rope_patch.load_adapter(encoding_model("OPTForCausalLM"), folder / "adapter")
    if family == "GPT2LMHeadModel":
        longer = encoding_model(family, n_positions=64)
        with pytest.raises(Refused, match="load the base that the adapter was trained on"):
            rope_patch.load_adapter(longer, folder / "adapter")
