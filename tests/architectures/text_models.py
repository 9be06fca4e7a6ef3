"""Tiny random models of architectures that read text, encoders included, and what they say."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from architectures.tiny_architectures import TRAINED, tiny_config
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The first mapping that has an architecture builds its model: both parts, if there are two.
_MAPPINGS = {
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForTextEncoding": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
}
# Architectures of other mappings, or of which these build a part, and what reads their text.
_CLASSES = {
    "canine": "CanineModel",
    "clip": "CLIPModel",
    "kosmos-2": "Kosmos2ForConditionalGeneration",
    "layoutlmv3": "LayoutLMv3Model",
    "lilt": "LiltModel",
    "markuplm": "MarkupLMModel",
    "musicgen": "MusicgenForCausalLM",
    "musicgen_melody": "MusicgenMelodyForCausalLM",
    "pix2struct": "Pix2StructTextModel",
    "pop2piano": "Pop2PianoForConditionalGeneration",
    "siglip_text_model": "SiglipTextModel",
    "speech_to_text": "Speech2TextForConditionalGeneration",
    "speecht5": "SpeechT5ForSpeechToText",
    "splinter": "SplinterForQuestionAnswering",
    "udop": "UdopForConditionalGeneration",
    "wavlm": "WavLMModel",
    "whisper": "WhisperForConditionalGeneration",
}
_CONFIGS = {
    "musicgen": "musicgen_decoder",
    "musicgen_melody": "musicgen_melody_decoder",
    "pix2struct": "pix2struct_text_model",
}
# Other encodings of an architecture, by a field of its config.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, alibi": ("falcon", {"alibi": True}),
    "longt5, transient-global": (
        "longt5",
        {"encoder_attention_type": "transient-global", "global_block_size": 4},
    ),
}
# Sizes that do not follow from the names of fields.
_CONV = {"conv_dim": [32] * 2, "conv_stride": [5, 2], "conv_kernel": [10, 3]}
_FIELDS: dict[str, dict[str, Any]] = {
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "esmc": {"vocab_size": 128},
    "esm": {"vocab_size": 128, "position_embedding_type": "absolute", "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "led": {
        "attention_window": 32,
        "max_encoder_position_embeddings": TRAINED,
        "max_decoder_position_embeddings": TRAINED,
    },
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 256,
        "max_xpath_subs_unit_embeddings": 1024,
        "tag_pad_id": 216,
        "subs_pad_id": 1001,
        "xpath_unit_hidden_size": 4,
    },
    "mobilebert": {"embedding_size": 64, "intra_bottleneck_size": 64, "true_hidden_size": 64},
    "pix2struct": {"initializer_range": 0.02, "d_kv": 16},
    "reformer": {"hash_seed": 0, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "speech_to_text": {
        "pad_token_id": 1,
        "max_source_positions": TRAINED,
        "max_target_positions": TRAINED,
    },
    "speecht5": _CONV | {"max_text_positions": TRAINED},
    "wavlm": _CONV,
    "whisper": {"max_source_positions": TRAINED, "max_target_positions": TRAINED},
    "xlnet": {"d_head": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}


def text_model_types() -> list[str]:
    """Return every architecture that reads or writes text, in a stable order.

    An architecture with several encodings is there for each. Decoders of RoPE behind an encoder of
    sound are left out: their text models are in the list.
    """
    names = {name for mapping in _MAPPINGS.values() for name in mapping}
    known = {n for n in names | set(_CLASSES) if n in CONFIG_MAPPING}  # by the installed release
    return sorted([name for name in known if not _hears(name)] + list(_VARIANTS))


def _hears(model_type: str) -> bool:
    config_class = CONFIG_MAPPING[model_type]
    return "audio_config" in config_class.sub_configs or model_type in (
        "nemo_speechlm",
        "vibevoice_asr",
    )


def tiny_text_model(model_type: str, **fields: Any) -> Any:
    """Return a tiny random model in evaluation mode, the same one every time.

    Args:
        model_type: The architecture.
        **fields: Fields of its config, or of its text part's.
    """
    model_type, variant = _VARIANTS.get(model_type, (model_type, {}))
    name = _CONFIGS.get(model_type, model_type)
    layers = {
        field: 2
        for field in ("encoder_layers", "decoder_layers")
        if isinstance(getattr(CONFIG_MAPPING[name](), field, None), int)
    }
    config = tiny_config(name, **layers, **variant, **_FIELDS.get(model_type, {}))
    text = config.get_text_config(decoder=True)
    for own in [config] if isinstance(text, type(config)) else [config, text]:
        for key, value in fields.items():
            if hasattr(own, own.attribute_map.get(key, key)):
                setattr(own, key, value)
    torch.manual_seed(0)
    if model_type in _CLASSES:
        kind = getattr(transformers, _CLASSES[model_type])
        model = kind(config)
    else:
        auto = next(name for name, mapping in _MAPPINGS.items() if model_type in mapping)
        kind = getattr(transformers, auto)
        model = kind.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim >= 2 and not parameter.any():  # NeoMME's attentions begin with zeros
            parameter.data.normal_(0, 0.1)
    return model.eval().requires_grad_(False)


def _text_part(model: Any) -> Any:
    """Return the part of a model that reads text alone; the model, if that has no such part."""
    text = model.config.get_text_config(decoder=True)
    if isinstance(text, type(model.config)) or model.config.is_encoder_decoder:
        return model
    parts = (part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
    return next((part for part in parts if type(part.config) is type(text)), model)


@torch.no_grad()
def text_output(model: Any, length: int) -> torch.Tensor:
    """Return what a model says of a text of random tokens, its logits if it has any.

    Args:
        model: A tiny model.
        length: Tokens, for the decoder and for an encoder that reads text.
    """
    model = _text_part(model)
    config = model.config
    ids = torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(1))
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    if model.main_input_name == "input_ids":
        inputs["input_ids"] = ids.expand(getattr(config, "num_codebooks", 1), -1)
    elif hasattr(config, "input_feat_per_channel"):  # Speech2Text has a position for 4 frames
        frames = 4 * min(length, config.max_source_positions)
        inputs["input_features"] = torch.ones(1, frames, config.input_feat_per_channel)
    else:
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.ones(1, config.num_mel_bins, frames)
    if "bbox" in accepted:
        is_fraction = hasattr(config, "relative_bias_args")
        inputs["bbox"] = torch.zeros(1, length, 4, dtype=torch.float if is_fraction else torch.long)
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = ids
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    output = model(**inputs)
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    raise AssertionError(f"{type(model).__name__} returned {list(output.keys())}")
