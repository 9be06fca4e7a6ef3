"""Write the tiny trained Llama as a GGUF file, as llama.cpp's converter lays it out."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folder: Path,
    path: Path,
    longest: int,
    *,
    scaling: dict[str, Any] | None = None,
    attention_factor: float | None = None,
    quantized: bool = False,
    stretches: torch.Tensor | None = None,
    with_tokenizer: bool = False,
) -> None:
    """Write a folder's weights.

    Args:
        folder: The model's folder.
        path: Where the file goes.
        longest: The context length that the file names.
        scaling: Type, factor and original length of the file's scaling; None for none.
        attention_factor: What the file multiplies the engine's attention factor by.
        quantized: Whether matrices have 8 bits (Q8_0); else float32.
        stretches: What each pair's wavelength is multiplied by; None to write none.
        with_tokenizer: Whether texts are those of the folder's tokenizer; else words that stand
            for ids.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(longest)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if attention_factor is not None:
        writer.add_rope_scaling_attn_factors(attention_factor)
    if with_tokenizer:
        _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    else:
        _add_tokens(writer, config["vocab_size"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        new = _rename(name)
        if new.endswith(("attn_q", "attn_k")):
            tensor = _interleave(tensor, heads if new.endswith("attn_q") else key_heads)
        array, kind = tensor.float().numpy(), None
        if quantized and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quantize(array, kind)
        writer.add_tensor(f"{new}.weight", array, raw_dtype=kind)
    if stretches is not None:
        writer.add_tensor("rope_freqs.weight", stretches.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of words that stand for ids, because llama.cpp writes text."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """Add a byte-level BPE as llama.cpp's converter writes it."""
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if token in special else normal for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _rename(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return _NAMES[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}"


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the two rows of each pair beside each other, as llama.cpp rotates Llama's."""
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
