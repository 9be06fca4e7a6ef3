"""Make tiny random models of seven families, and run them.

The spread of the weights is such that another rotation moves logits by about 1, and float32
rounding by less than 1e-5.
"""

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

TRAINED = 64  # the trained length in every config
FACTOR = 4
TARGET = FACTOR * TRAINED
SHORT, LONG = 40, 150  # inputs below and above the trained length
LONG_FACTOR = [1 + 0.4 * pair for pair in range(8)]  # 8 rotated pairs: head_dim 16
SHORT_FACTOR = [1 + 0.05 * pair for pair in range(8)]

OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.1")
# Releases between the ones that are run: 5.0, 5.10, 5.17, 5.23 and the newest.
BEFORE_5_17 = Version(transformers.__version__) < Version("5.17")
BEFORE_5_23 = Version(transformers.__version__) < Version("5.23")

_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 32}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}

# With a family whose config cannot hold the usual scalings.
MODELS = {
    **FAMILIES,
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"original_max_position_embeddings": TRAINED}),
}

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that generate continues to max_new_tokens
    "pad_token_id": 0,
}


def make_config(family: str = "llama", **changes: Any) -> Any:
    """Return a family's tiny config."""
    config, _, special = MODELS[family]
    return getattr(transformers, config)(**{**SIZES, **special, **changes})


def make_model(family: str = "llama", config: Any = None, seed: int = 0, **changes: Any) -> Any:
    """Return a family's tiny random model, the same for the same seed."""
    torch.manual_seed(seed)
    config = config or make_config(family, **changes)
    return getattr(transformers, MODELS[family][1])(config).eval()


def make_other(kind: str, left_out: tuple[str, ...] = ("head_dim",), **changes: Any) -> Any:
    """Return a random model of a kind that is in no table, of the same sizes but for some."""
    sizes = {key: value for key, value in SIZES.items() if key not in left_out}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def make_generator(family: str, seed: int = 0) -> Any:
    """Return a model with untied weights, whose next token depends on the whole context."""
    return make_model(family, seed=seed, tie_word_embeddings=False, initializer_range=0.2)


def make_native(model: nn.Module, family: str, **changes: Any) -> Any:
    """Return an unpatched model with a changed config and the weights of `model`."""
    native = make_model(family, **changes)
    native.load_state_dict(model.state_dict())
    return native


def tokens(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Return random token ids without special ones, `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)


def given_cache(kwargs: dict[str, Any]) -> Any:
    """Return the cache among a forward's arguments, whose name changed in transformers 5.24."""
    return kwargs.get("cache", kwargs.get("past_key_values"))


@torch.no_grad()
def logits(model: nn.Module, length: int = LONG) -> torch.Tensor:
    """Return a model's logits for the same tokens every time, `[1, S, vocab]`."""
    return model(input_ids=tokens(length), use_cache=False).logits


@torch.no_grad()
def forward(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return a model's logits for `ids` without a cache, `[B, S, vocab]`."""
    return model(input_ids=ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def step_by_step(
    model: nn.Module, ids: torch.Tensor, prompt: int, cache: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Return logits `[B, S, vocab]` of a prompt in one pass, and of the rest token by token."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    cuts = [prompt] + [1] * (ids.shape[1] - prompt)
    parts = [model(part, past_key_values=cache, **kwargs).logits for part in ids.split(cuts, 1)]
    return torch.cat(parts, dim=1)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of different lengths `[1, S]`: return one batch and its mask."""
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        columns = slice(length - row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[i, columns], mask[i, columns] = row, 1
    return ids, mask


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal up to float32 rounding."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def assert_differs(got: torch.Tensor, other: torch.Tensor) -> None:
    """Assert that logits differ by more than rounding."""
    assert (got - other).abs().max() > 1e-2
