"""The class of transformers that reads a checkpoint, chosen by its config."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from rope_patch.transformers_api.models import image_text_model_classes, text_model_classes

# Classes besides those that generate text from a text alone.
_OTHERS = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForMaskedLM, AutoModel)


def auto_class(config: Any, *, any_kind: bool = False) -> Any:
    """Return `AutoModelForCausalLM`, or the class of models that read images beside text.

    The latter read text alone, too. A checkpoint with images is read whole even where transformers
    has a class for its text part (Qwen 3.5, Llama 4), so that a saved model keeps its images, and
    an exported rotation lies where the whole config has it.

    Args:
        config: A model's config; None if it is unknown.
        any_kind: Return the class for an encoder, or an encoder with a decoder, where the config's
            `architectures` names such a model.
    """
    kind: Any = type(config)
    if any_kind and (architectures := getattr(config, "architectures", None)):
        for auto in _OTHERS:
            if _class_name(auto, kind) == architectures[0]:
                return auto
    if kind not in image_text_model_classes() or config.is_encoder_decoder:
        return AutoModelForCausalLM
    if kind in (text_models := text_model_classes()):
        classes: Any = text_models[kind]
        first = classes[0] if isinstance(classes, tuple) else classes
        if first.config_class is kind:  # it is the whole model (Gemma 3)
            return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _class_name(auto: Any, kind: Any) -> str | None:
    """Return the name of the class that an auto class chooses for a class of configs."""
    chosen = auto._model_mapping.get(kind, None)
    chosen = chosen[0] if isinstance(chosen, tuple) else chosen
    return None if chosen is None else chosen.__name__
