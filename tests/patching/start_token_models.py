"""Make patched models with start tokens."""

import math

from helpers.tiny_models import (
    FACTOR,
    LONG_FACTOR,
    SHORT_FACTOR,
    TRAINED,
    make_model,
)

import rope_patch

START = 5  # tokens
SCALE = math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))  # LongRoPE's law
OPTIONS = {"factor": FACTOR, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}


def patched(model, start_tokens=START, method="longrope", **changes):
    """Patch a model with start tokens and return it."""
    options = {k: v for k, v in {**OPTIONS, **changes}.items() if v is not None}
    rope_patch.patch(model, method, start_tokens=start_tokens, **options)
    return model


def one_layer(family="llama", **changes):
    if family == "gemma3":
        changes["layer_types"] = ["full_attention"]
    return make_model(family, num_hidden_layers=1, **changes)


def rotary_of(model):
    return next(m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "config"))
