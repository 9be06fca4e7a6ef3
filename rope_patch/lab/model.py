"""The lab's decoder: a Llama of two layers with any positional encoding."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch.lab.settings import encoding_options
from rope_patch.patching.replacement.entry_point import encode

WIDTH, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 4, 2, 192
# With the usual 0.02, recall takes three times as many steps.
SPREAD = 0.06


def build_model(encoding: str, vocabulary: int, length: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained decoder; those of one seed begin with the same shared weights.

    Args:
        encoding: A name of `rope_patch.list_encodings()`.
        vocabulary: Number of token ids.
        length: Trained length, in tokens.
        seed: Of the weights.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=SPREAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        encode(model, encoding, **encoding_options(encoding, length))
    return model
