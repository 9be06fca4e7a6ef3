"""Sizes of a causal language model, read from a model without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from rope_patch.pretrained.loading import empty_model


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: widths in numbers per token, all else in numbers of weights."""

    layers: int
    hidden: int
    heads: int
    query: int
    key: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool
    matrix_weights_per_layer: int
    norm_weights: int
    extra_norm_width: int  # widths of a layer's norms beyond the usual two
    weights: int
    linears: dict[str, int]  # sum of input and output widths over all layers, by name

    @property
    def embedding_weights(self) -> int:
        """Return the number of weights of the embeddings; an untied head has as many."""
        return self.vocab * self.hidden


def model_shape(config: Any) -> ModelShape:
    """Return the sizes of a config's model, which is built without weights."""
    config_class: Any = type(config)
    return _cached_model_shape(config.to_json_string(use_diff=False), config_class)


@lru_cache(maxsize=16)
def _cached_model_shape(text: str, config_class: Any) -> ModelShape:
    model = empty_model("the model", config_class.from_dict(json.loads(text)))
    decoder_config = model.config.get_text_config(decoder=True)
    heads = decoder_config.num_attention_heads
    head_dim = getattr(decoder_config, "head_dim", None) or decoder_config.hidden_size // heads
    query, key = heads * head_dim, (decoder_config.num_key_value_heads or heads) * head_dim
    layers, linears, widths, norms = decoder_config.num_hidden_layers, dict[str, int](), 0, 0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            features = module.in_features + module.out_features
            linears[last] = linears.get(last, 0) + features
        elif "norm" in type(module).__name__.lower():
            size = sum(p.numel() for p in module.parameters(recurse=False))
            norms += size
            across = {"q_norm": query, "k_norm": key}.get(
                last, size
            )  # normalised per head, or over all heads
            widths += across if ".layers." in name else 0
    experts = getattr(decoder_config, "num_experts_per_tok", None) or 1
    mlp = (
        getattr(decoder_config, "moe_intermediate_size", None) or decoder_config.intermediate_size
    ) * experts
    tied = bool(getattr(decoder_config, "tie_word_embeddings", False))
    table = decoder_config.vocab_size * decoder_config.hidden_size
    total = sum(p.numel() for p in model.parameters())
    return ModelShape(
        layers=layers,
        hidden=decoder_config.hidden_size,
        heads=heads,
        query=query,
        key=key,
        head_dim=head_dim,
        mlp=mlp,
        vocab=decoder_config.vocab_size,
        tied=tied,
        matrix_weights_per_layer=(total - norms - table * (1 if tied else 2)) // layers,
        norm_weights=norms,
        extra_norm_width=max(0, widths // layers - 2 * decoder_config.hidden_size),
        weights=total,
        linears=linears,
    )
