"""Make configs whose rope_type is one of our methods, and read transformers' registry."""

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_patch
from helpers.tiny_models import (
    TARGET,
    TRAINED,
    make_config,
)

LENGTH = "original_max_position_embeddings"
NATIVE_ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
STATIC = ["ntk", "ntk-by-parts", "abf", "ntk-by-parts-2023-06", "nope", "clipped"]
LENGTH_DEPENDENT = [
    name for name in rope_patch.list_methods() if name.startswith(("dynamic-", "mixed-"))
]
BASE = {"rope_theta": 1e4, LENGTH: TRAINED}


def registry():
    """Return transformers' functions by rope_type, in order, and its mixin's attributes."""
    return list(ROPE_INIT_FUNCTIONS.items()), dict(vars(RotaryEmbeddingConfigMixin))


def make_named_config(family="llama", **parameters):
    """Return a tiny config with our rope_type in it."""
    config = make_config(family)
    if family == "gemma3":
        parameters = {**config.rope_parameters, "full_attention": parameters}
    return make_config(family, rope_parameters=parameters, max_position_embeddings=TARGET)


def make_rotary(head_dim=64, **parameters):
    config = transformers.LlamaConfig(
        head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=2**20
    )
    return LlamaRotaryEmbedding(config)
