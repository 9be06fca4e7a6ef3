"""The class of transformers that reads a checkpoint, chosen by its config."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)


def auto_class(config: Any) -> Any:
    """Return `AutoModelForCausalLM`, or the class of models that read images beside text.

    The latter read text alone, too. A checkpoint with images is read whole even where transformers
    has a class for its text part (Qwen 3.5, Llama 4), so that a saved model keeps its images, and
    an exported rotation lies where the whole config has it.

    Args:
        config: A model's config; None if it is unknown.
    """
    kind: Any = type(config)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or config.is_encoder_decoder:
        return AutoModelForCausalLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        first = classes[0] if isinstance(classes, tuple) else classes
        if first.config_class is kind:  # it is the whole model (Gemma 3)
            return AutoModelForCausalLM
    return AutoModelForImageTextToText
