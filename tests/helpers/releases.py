"""Say what the installed release of transformers can do by itself, for tests that adapt or skip."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, LlamaModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2

from helpers.tiny_models import BEFORE_5_23

# A forward's argument for a cache: `past_key_values` up to 5.23.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaModel.forward).parameters
)

# Architectures whose softmax has no mscale: DeepSeek-V2 up to 5.10.
IGNORES_MSCALE = () if hasattr(modeling_deepseek_v2, "yarn_apply_mscale") else ("deepseek_v2",)


def prompt_lookup(tokens: int) -> dict[str, Any]:
    """Return arguments of `generate` for prompt lookup.

    They name an end that no vocabulary has: up to 5.10, plain transformers fails without one.
    """
    return {"prompt_lookup_num_tokens": tokens, "eos_token_id": -1}


def batching_sizes(block: int, **sizes: int) -> Any:
    """Return settings of continuous batching, whose blocks are called pages from 5.23 on."""
    kind = transformers.ContinuousBatchingConfig
    name = "page_size" if "page_size" in inspect.signature(kind).parameters else "block_size"
    return kind(**{name: block}, **sizes)


def require_model(model_type: str) -> None:
    """Skip a test where the release has no such architecture."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release has no {model_type}")


@contextlib.contextmanager
def plain_transformers() -> Iterator[None]:
    """Skip a test where an old release fails without a patch, which is run inside.

    On newer ones the test goes on, and the patched model must do better (MPT with a static cache).
    """
    try:
        yield
    except Exception as error:
        if not BEFORE_5_23:
            return
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        pytest.skip(f"transformers fails without a patch: {problem}")
