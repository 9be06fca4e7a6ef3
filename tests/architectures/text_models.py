"""Tiny random models of architectures that read text, encoders included, and what they say."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from architectures.tiny_architectures import TRAINED, model_types, tiny_config
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The first mapping that has an architecture builds its model: both parts, if there are two.
_MAPPINGS = {
    "AutoModelForSeq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "AutoModelForSpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "AutoModelForMaskedLM": "MASKED_LM",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForTextEncoding": "TEXT_ENCODING",
    "AutoModelForSequenceClassification": "SEQUENCE_CLASSIFICATION",
    "AutoModelForQuestionAnswering": "QUESTION_ANSWERING",
}
# Architectures of other mappings, with the class that reads their text.
_CLASSES = {
    "clip": "CLIPModel",
    "kosmos-2": "Kosmos2ForConditionalGeneration",
    "musicgen": "MusicgenForCausalLM",
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "pix2struct": "Pix2StructForConditionalGeneration",
    "siglip_text_model": "SiglipTextModel",
    "udop": "UdopForConditionalGeneration",
    "wavlm": "WavLMModel",
}
_CONFIGS = {
    "musicgen": "musicgen_decoder",
    "musicgen_melody": "musicgen_melody_decoder",
}
# Sizes that do not follow from the names of fields.
_CONV = {"conv_dim": [32] * 2, "conv_stride": [5, 2], "conv_kernel": [10, 3]}
_FIELDS: dict[str, dict[str, Any]] = {
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "esm": {"vocab_size": 128, "position_embedding_type": "absolute", "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "led": {"max_encoder_position_embeddings": TRAINED, "max_decoder_position_embeddings": TRAINED},
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 4},
    "mobilebert": {"embedding_size": 64, "intra_bottleneck_size": 64, "true_hidden_size": 64},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "speech_to_text": {"pad_token_id": 1, "max_target_positions": TRAINED},
    "speecht5": _CONV | {"max_text_positions": TRAINED},
    "wavlm": _CONV,
    "whisper": {"max_source_positions": TRAINED, "max_target_positions": TRAINED},
    "xlnet": {"d_head": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}


def auto_class(model_type: str) -> str | None:
    """Return the name of the class that builds an architecture; None if it reads no text."""
    for name, mapping in _MAPPINGS.items():
        if model_type in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"):
            return name
    return None


def text_model_types() -> list[str]:
    """Return every architecture that reads or writes text, in a stable order."""
    names = {
        name
        for mapping in _MAPPINGS.values()
        for name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    }
    return sorted(names | set(_CLASSES) | set(model_types()))


def tiny_text_model(model_type: str, **fields: Any) -> Any:
    """Return a tiny random model in evaluation mode, the same one every time.

    Args:
        model_type: The architecture.
        **fields: Fields of its config, or of the part of it that is for text.
    """
    config = tiny_config(_CONFIGS.get(model_type, model_type), **_FIELDS.get(model_type, {}))
    return build(model_type, config)
