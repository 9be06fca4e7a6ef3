"""Test how architectures turn keys: a map that shifts queries and keys alike changes nothing."""

from dataclasses import dataclass

import pytest
import torch
from helpers.tiny_models import OLD_TRANSFORMERS
from tiny_architectures import tiny_model

import rope_patch
from rope_patch.methods import registry
from rope_patch.methods.position_map import PositionMap, Region, near_region

# Halves and neighbours, part of a head, norms, soft caps, sinks, several rotary modules.
ARCHITECTURES = [
    "apertus",
    "cohere",
    "falcon_h1",
    "gemma2",
    "gemma4_text",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "lfm2",
    "llama4_text",
    "nanochat",
    "olmo2",
    "phi3",
    "qwen3_next",
    "smollm3",
    "stablelm",
    "zamba2",
]

pytestmark = pytest.mark.skipif(OLD_TRANSFORMERS, reason="it has fewer architectures")


@pytest.fixture
def shifted(monkeypatch):
    """Register a map that turns far queries and keys by five positions more."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @registry.register_method("shifted", paper="none", training="not needed")
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


@torch.no_grad()
def logits(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 60, (1, 60), generator=generator)
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_shifts_of_both_sides_cancel(model_type, shifted):
    model = tiny_model(model_type).eval()
    plain = logits(model)
    rope_patch.patch(model, "shifted", temperature="none")
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=2e-5)
    rope_patch.patch(model, "rerope", window=8, trained_length=16, temperature="none")
    assert (logits(model) - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "latent attention"),
        ("qwen2_vl", r"several positions \(M-RoPE\)"),
        ("falcon", "does not hand its queries"),
        ("cohere2", "every layer of Cohere2Config that rotates has a window"),
        ("deepseek_v4", "which of its attentions belong to"),
    ],
)
def test_other_architectures_are_refused(model_type, reason):
    model = tiny_model(model_type).eval()
    with pytest.raises(rope_patch.Refused, match=reason):
        rope_patch.patch(model, "rerope")
