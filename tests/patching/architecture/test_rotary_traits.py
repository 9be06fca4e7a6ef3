"""One probe tells `patch` everything about a rotary module's class."""

import pytest
import torch
from helpers.tiny_models import LONG_FACTOR, SHORT_FACTOR, make_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)

import rope_patch
from rope_patch.methods import Frequencies
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.defaults import torch_defaults

GEOMETRIES = {
    "llama": LlamaConfig(
        num_hidden_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "qwen3": Qwen3Config(
        num_hidden_layers=2,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=2,
        hidden_size=2560,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(
        num_hidden_layers=2,
        hidden_size=3072,
        num_attention_heads=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + pair / 50 for pair in range(48)],
            "long_factor": [1.0 + pair for pair in range(48)],
            "original_max_position_embeddings": 4096,
        },
    ),
}
REQUESTS = {
    "static": ("yarn", {"factor": 4}),
    "dynamic": ("dynamic-yarn", {}),
    "transformers-code": ("linear", {"factor": 4, "kernels": "hf"}),
}


@pytest.fixture
def constructions(monkeypatch):
    """Return a function that lists the later constructions of a model's rotary modules."""

    def watch(model):
        built = []
        (rotary,) = find_rotaries(model)
        rotary_class = type(rotary.module)
        construct = rotary_class.__init__

        def counted(self, *args, **kwargs):
            built.append(rotary_class.__name__)
            construct(self, *args, **kwargs)

        monkeypatch.setattr(rotary_class, "__init__", counted)
        return built

    return watch


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_patching_builds_one_rotary_module(geometry, request_name, constructions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GEOMETRIES[geometry])
    built = constructions(model)
    method, options = REQUESTS[request_name]
    with rope_patch.patch(model, method, **options):
        assert len(built) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_start_tokens_build_no_other(family, constructions):
    model = make_model(family)
    built = constructions(model)
    factors = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
    with rope_patch.patch(model, "longrope", factor=4, start_tokens=5, **factors):
        assert len(built) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_the_probe_stays_as_it_was_built(family):
    model = make_model(family)
    (rotary,) = find_rotaries(model)
    traits = RotaryTraits.of(model, rotary, rotary.module.config)

    def outputs():
        x, positions = torch.zeros(1, 3, 4), torch.tensor([[0, 5, 900]])
        extras = [() if name is None else (name,) for name in rotary.prefixes]
        return [part for extra in extras for part in traits.probe(x, positions, *extra)]

    with torch_defaults():
        before = outputs()
    assert traits.is_buffer_used
    assert not traits.is_interleaved
    assert not traits.has_half_tables
    assert not traits.repeats_interleaved
    assert isinstance(traits.supports_per_row_frequencies, bool)
    halved = {
        layer_type: Frequencies(frequencies.inv_freq / 2)
        for layer_type, frequencies in traits.frequencies.items()
    }
    changed = traits.probe_with(halved)
    with torch_defaults():
        assert all(map(torch.equal, outputs(), before))
    for prefix in rotary.prefixes.values():
        name = f"{prefix}inv_freq"
        assert torch.equal(getattr(changed, name), getattr(traits.probe, name) / 2)
