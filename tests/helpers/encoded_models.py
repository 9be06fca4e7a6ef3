"""Make tiny encoded Llamas, and list every encoding with its variants."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_patch
from helpers.written_out_decoder import HEAD_DIM, HEADS, KV_HEADS, LENGTH

VARIANTS = [
    ("none", {}),
    ("integer", {}),
    ("normalised", {}),
    ("normalised", {"length": 40}),
    ("binary", {}),
    ("binary", {"base": 4}),
    ("binary", {"base": 8, "digits": 3}),
    ("binary", {"base": 16}),
    ("sinusoidal", {}),
    ("sinusoidal", {"layout": "halves", "base": 500.0}),
    ("learned", {}),
    ("t5", {}),
    ("alibi", {}),
    ("kerple", {}),
    ("kerple", {"kind": "power"}),
    ("fire", {}),
    ("fire", {"threshold": 5.0}),
    ("sandwich", {}),
    ("sandwich", {"width": 16}),
    ("xpos", {}),
    ("xpos", {"scale": 8.0, "gamma": 0.6}),
    ("rope", {}),
    ("rope", {"base": 50.0}),
    ("rope", {"partial": 0.5}),
    ("rope", {"p": 0.5}),
    ("rope", {"p": 0.5, "base": 50.0}),
    ("rnope", {}),
    ("rnope", {"every": 3}),
]
# The first of each name, and what changes configs.
ONE_EACH = list({name: (name, options) for name, options in reversed(VARIANTS)}.values())
NAMES = [name for name, _ in ONE_EACH]
IDS = [f"{name} {options}" if options else name for name, options in VARIANTS]
SIZES = {
    "vocab_size": 60,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}


def llama(kind="Llama", **changes):
    """Return a random model, the same for the same arguments."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def require_release(options):
    """Skip a test whose options need a rotation that transformers has from 5.5 on."""
    if {"partial", "p"} & set(options) and "proportional" not in ROPE_INIT_FUNCTIONS:
        pytest.skip("this release has no proportional rotation")


def encoded(name, options, model=None, **changes):
    """Return a random model with an encoding, whose trained parts have other values than 0 or 1."""
    require_release(options)
    model = llama(**changes) if model is None else model
    torch.manual_seed(4)
    handle = rope_patch.encode(model, name, **options)
    with torch.no_grad():
        for parameter in handle.encoding.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.2)
    return model


def tokens(rows=2, count=LENGTH - 3, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SIZES["vocab_size"], (rows, count), generator=generator)


@torch.no_grad()
def logits(model, ids, **arguments):
    return model(ids, **arguments).logits
