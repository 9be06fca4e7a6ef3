"""Test how architectures turn and scale queries and keys, by patches of a known effect.

A map that shifts queries and keys alike changes nothing; a constant temperature is a larger softmax
scale.
"""

from dataclasses import dataclass

import pytest
import torch
import transformers
from helpers.releases import require_model
from helpers.tiny_models import OLD_TRANSFORMERS
from tiny_architectures import tiny_config, tiny_model

import rope_patch
from rope_patch.methods import PositionMap, Region, near_region

# Halves and neighbours, part of a head, norms, soft caps, sinks, several rotary modules.
SHIFTED = ["apertus", "cohere", "falcon_h1", "gemma2", "gemma4_text", "glm4", "gpt_neox", "gpt_oss"]
SHIFTED += ["lfm2", "llama4_text", "nanochat", "olmo2", "phi3", "qwen3_next", "smollm3", "stablelm"]
SHIFTED += ["zamba2"]
HEATED = ["apertus", "cohere", "deepseek_v2", "deepseek_v32", "falcon_h1", "gemma3n_text", "glm4"]
HEATED += ["gpt_oss", "lfm2", "minicpm3", "mllama", "olmo2", "persimmon", "qwen3_next", "smollm3"]
HEATED += ["zamba2"]

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures")


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 60, (1, 60), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits


@pytest.fixture
def shifted(own_registry):
    """Register a map that turns far queries and keys by five positions more."""

    @rope_patch.register_method("shifted", paper="none", training="not needed")
    @dataclass(frozen=True, kw_only=True)
    class Shifted(PositionMap):
        """Turn far queries and keys by as much."""

        def map_start(self, reach):
            return 0

        def longest_text(self, reach):
            return float("inf")

        def describe_distances(self, reach):
            return "as they are"

        def map_regions(self, queries, keys, reach, last_query):
            near = near_region(queries, 8)
            turns = (torch.full_like(p, 5, dtype=torch.float64) for p in (queries, keys))
            return [near, Region(torch.zeros_like(queries), near.start, *turns, "five")]


@pytest.mark.parametrize("model_type", SHIFTED)
def test_shifts_of_both_sides_cancel(model_type, shifted):
    model = tiny_model(model_type).eval()
    plain = logits(model)
    rope_patch.patch(model, "shifted", temperature="none")
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=2e-5)
    rope_patch.patch(model, "rerope", window=8, trained_length=16, temperature="none")
    assert (logits(model) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("model_type", HEATED)
def test_constant_temperature_is_a_larger_softmax_scale(model_type):
    require_model(model_type)
    model = tiny_model(model_type).eval()
    plain = logits(model)
    handle = rope_patch.patch(model, "linear", factor=2, temperature=3.0)
    got = logits(model)
    handle.undo()
    assert logits(model).equal(plain)
    rope_patch.patch(model, "linear", factor=2)
    without = logits(model)
    config = rope_patch.current(model).original_config
    for module in model.modules():
        if getattr(module, "scaling", None) and getattr(module, "is_causal", True):
            if "cross" in type(module).__name__.lower() or "Vision" in type(module).__name__:
                continue
            kinds = getattr(config, "layer_types", None)
            extended = rope_patch.current(model).geometries
            if None in extended or kinds[module.layer_idx] in extended:
                module.scaling *= 3
    torch.testing.assert_close(got, logits(model), rtol=0, atol=1e-4)
    assert (got - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model_type", "method", "reason"),
    [
        ("deepseek_v3", "rerope", "latent attention"),
        ("qwen2_vl", "rerope", "M-RoPE"),
        ("falcon", "rerope", "does not hand its queries"),
        ("cohere2", "rerope", "every layer of Cohere2Config that rotates has a window"),
        ("deepseek_v4", "rerope", "which of its attentions belong to"),
        ("deepseek_v4", "linear", "which of its attentions belong to"),
        ("qwen2_vl", "linear", "M-RoPE"),
        ("qwen3_5_text", "linear", "M-RoPE"),
    ],
)
def test_other_architectures_are_refused(model_type, method, reason):
    require_model(model_type)
    options = {} if method == "rerope" else {"factor": 2, "temperature": 3.0}
    with pytest.raises(rope_patch.Refused, match=reason):
        rope_patch.patch(tiny_model(model_type), method, **options)


def test_temperature_of_mistral_4_is_refused():
    require_model("mistral4")
    model = transformers.Mistral4Model(tiny_config("mistral4"))
    with pytest.raises(rope_patch.Refused, match="Mistral4Config has a temperature of its own"):
        rope_patch.patch(model, "linear", factor=2, temperature=3.0)
