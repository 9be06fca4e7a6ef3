"""Tiny random models that tell positions without rotation."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LENGTH = 40  # rows for positions; where a model reads any length, that of its pretraining
_SIZES = {"vocab_size": 99, "max_position_embeddings": LENGTH}
_BERT = _SIZES | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": 99}
_BART = _SIZES | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
}
_T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 32, "d_kv": 8, "vocab_size": 99}
_XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32}
_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        _SIZES | _NEO | {"attention_types": [[["global", "local"], 1]]},
    ),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", _GPT2),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", _GPT2),
    "OPTForCausalLM": ("OPTConfig", _BERT | {"ffn_dim": 32, "word_embed_proj_dim": 32}),
    "BioGptForCausalLM": ("BioGptConfig", _BERT),
    "BartForCausalLM": ("BartConfig", _BART),
    "BartForConditionalGeneration": ("BartConfig", _BART),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "RobertaForMaskedLM": ("RobertaConfig", _BERT | {"max_position_embeddings": LENGTH + 2}),
    "MPNetForMaskedLM": ("MPNetConfig", _BERT),
    "MarianMTModel": ("MarianConfig", _BART),
    "PegasusForConditionalGeneration": ("PegasusConfig", _BART),
    "XGLMForCausalLM": ("XGLMConfig", _SIZES | _XGLM),
    "M2M100ForConditionalGeneration": ("M2M100Config", _BART),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        _BART | {"max_source_positions": 60, "max_target_positions": LENGTH, "eos_token_id": 2},
    ),
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 48, "n_layer": 2, "vocab_size": 99}),
    "MptForCausalLM": ("MptConfig", {"d_model": 48, "n_layers": 2, "vocab_size": 99}),
    "FalconForCausalLM": (
        "FalconConfig",
        {"hidden_size": 48, "num_hidden_layers": 2, "alibi": True, "vocab_size": 99},
    ),
    "T5ForConditionalGeneration": ("T5Config", _T5),
    "UMT5ForConditionalGeneration": ("UMT5Config", _T5),
    "LongT5ForConditionalGeneration": ("LongT5Config", _T5),
}


def encoding_model(family: str, **fields: Any) -> Any:
    """Return a random model in evaluation mode, the same one every time.

    Args:
        family: The model's class.
        **fields: Fields of its config that differ.
    """
    config_class, sizes = _FAMILIES[family]
    torch.manual_seed(0)
    return (
        getattr(transformers, family)(getattr(transformers, config_class)(**sizes | fields))
        .eval()
        .requires_grad_(False)
    )


def token_logits(model: Any, length: int, **arguments: Any) -> torch.Tensor:
    """Return the logits of a text of random tokens, two rows of it."""
    ids = torch.randint(6, 90, (2, 500), generator=torch.Generator().manual_seed(1))[:, :length]
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    return model(input_ids=ids, **arguments).logits
