"""Test what `patch` finds out about rotary modules: by one probe, and which positions pairs take.

The truth of M-RoPE's sections is Qwen's published rules.
"""

import pytest
import torch
import transformers
from architectures.tiny_architectures import tiny_model
from helpers.mrope_reference import contiguous_axes, interleaved_axes
from helpers.tiny_models import (
    BEFORE_5_17,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT_FACTOR,
    make_model,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

import rope_patch
from rope_patch.patching import RotaryTraits, find_rotaries, mrope_sections

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
        rotary_class = type(model.model.rotary_emb)
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


# -- several positions a token ---------------------------------------------------------------------

# Sections, dimensions of a head, the rule: the published checkpoints.
PUBLISHED = {
    "Qwen2-VL": (Qwen2VLTextModel, [16, 24, 24], contiguous_axes),
    "Qwen2.5-VL": (Qwen2_5_VLTextModel, [16, 24, 24], contiguous_axes),
    "Qwen3-VL": (Qwen3VLTextModel, [24, 20, 20], interleaved_axes),
}


def sections_of(model):
    config = model.config.get_text_config(decoder=True)
    return mrope_sections(RotaryTraits.of(model, find_rotaries(model)[0], config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_sections_of_published_geometries(name):
    kind, sections, rule = PUBLISHED[name]
    if BEFORE_5_17 and rule is contiguous_axes:
        pytest.skip("applies sections in the attention")
    shape = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = kind.config_class(
        **shape, head_dim=128, num_hidden_layers=1, vocab_size=8, rope_parameters=rope
    )
    with torch.device("meta"):
        model = kind(config)
    got = sections_of(model)
    assert list(got) == rule(sections)
    assert [got.count(axis) for axis in range(3)] == sections


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="has no such model")
def test_sections_of_a_quarter_of_each_head():
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
    }
    with torch.device("meta"):
        config = transformers.Qwen3_5TextConfig(
            num_hidden_layers=1,
            hidden_size=256,
            vocab_size=8,
            head_dim=256,
            layer_types=["full_attention"],
            rope_parameters=rope,
        )
        model = transformers.Qwen3_5ForCausalLM(config)
    assert list(sections_of(model)) == interleaved_axes([11, 11, 10])


def test_one_position_a_token_has_no_sections():
    assert sections_of(make_model()) is None


@pytest.mark.parametrize("model_type", ["glm4v", "cohere_compass_text", "qwen4_exp_text"])
def test_untested_architectures_are_refused(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("has no such model")
    model = tiny_model(model_type)
    # The form of Cohere Compass in transformers 5.17 is refused before its positions are looked at.
    reason = r"M-RoPE\), which cannot be followed in a cache yet|architecture is not supported yet"
    with pytest.raises(ValueError, match=reason):
        rope_patch.patch(model, "dynamic-yarn")
    assert rope_patch.current(model) is None
