"""Find what hooks replace in transformers: steps of `generate`, batching, and the server.

A step is a method that `generate` calls on the model. Hooks replace it on one instance. A model
that generates, but lacks the step, comes from a release that this package does not know, and is
refused: a hook on a method that nobody calls would do nothing, in silence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

GENERATE = "generate"
PREPARE_INPUTS = "prepare_inputs_for_generation"
UPDATE_ARGUMENTS = "_update_model_kwargs_for_generation"
# Called once each by a generate, in this order.
PREPARE_LENGTH = "_prepare_generated_length"
PREPARE_CACHE = "_prepare_cache_for_generation"
# Called once by assisted decoding.
CANDIDATE_GENERATOR = "_get_candidate_generator"
# `generate_batch` and the context manager call it, too.
START_BATCHING = "init_continuous_batching"


def generating_modules(model: nn.Module, decoder: nn.Module, *steps: str) -> Iterator[nn.Module]:
    """Yield the modules around a decoder that generate, whose steps hooks may replace.

    Wrappers such as PEFT's and torch.compile's pass the call on, and are not yielded.

    Args:
        model: The model, or something around it.
        decoder: The decoder.
        steps: Names of methods that hooks replace.

    Raises:
        ValueError: A model has `generate`, but not one of the steps.
    """
    for module in model.modules():
        if _generates(module) and any(part is decoder for part in module.modules()):
            require_steps(module, *steps)
            yield module


def require_steps(module: nn.Module, *steps: str) -> None:
    """Raise if a model that generates lacks a step.

    Raises:
        ValueError: It does. The message names the release.
    """
    lacking = [name for name in steps if not hasattr(type(module), name)]
    if lacking:
        raise Refused(
            f"generate of {type(module).__name__} has no step {', '.join(lacking)} in "
            f"{installed_release()}, which this method follows: expected a release that has it; or "
            "use a method whose frequencies stay, such as yarn"
        )


def has_stock_step(module: nn.Module, name: str) -> bool:
    """Return whether a model's step is transformers' own, neither overridden nor replaced."""
    from transformers import GenerationMixin  # a slow import, which models have done already

    own = getattr(type(module), name, None)
    stock = getattr(GenerationMixin, name, None)
    return own is not None and own is stock and name not in vars(module)


def drops_cache_alone(module: nn.Module) -> bool:
    """Return whether a model's `PREPARE_INPUTS` may drop the cache and keep the new tokens alone.

    The steps of Phi-3 and its kin drop it at the config's original length, and up to transformers
    5.17 do not change the number of new tokens with it.
    """
    if not _generates(module):
        return False
    own = getattr(type(module), PREPARE_INPUTS, None)
    if own is None:  # a release without this step, in which nothing is dropped
        return False
    step: Any = inspect.unwrap(own)
    names = {*step.__code__.co_consts, *step.__code__.co_names}
    return "original_max_position_embeddings" in names and "next_sequence_length" not in names


def whole_text_arguments(tokens: torch.Tensor) -> dict[str, Any]:
    """Return arguments of `PREPARE_INPUTS` that say that all tokens are new.

    Args:
        tokens: Ids of the whole text, `[B, S]`.
    """
    from transformers import GenerationMixin

    if (
        "next_sequence_length"
        in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    ):
        return {"next_sequence_length": None}
    return {"cache_position": torch.arange(tokens.shape[1], device=tokens.device)}  # 5.0


def drafts_at_least_one(generator: Any) -> bool:
    """Return whether a candidate generator needs a draft of at least one token in every round."""
    from transformers.generation.candidate_generator import UniversalSpeculativeDecodingGenerator

    return isinstance(generator, UniversalSpeculativeDecodingGenerator)


def batching_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that start continuous batching by `START_BATCHING`.

    Raises:
        ValueError: A part has continuous batching (`generate_batch`), but starts it in another way.
    """
    for module in model.modules():
        if hasattr(type(module), START_BATCHING):
            yield module
        elif hasattr(type(module), "generate_batch"):
            raise Refused(
                f"{type(module).__name__} starts continuous batching in a way that this package "
                f"does not know in {installed_release()}, and could not refuse caches of another "
                f"rotation there: expected a release with {START_BATCHING}"
            )


def batching_manager(module: nn.Module) -> Any:
    """Return the manager of continuous batching that a model keeps, or None, by its class."""
    for value in vars(module).values():
        if "ContinuousBatchingManager" in type(value).__name__:
            return value
    return None


def server() -> tuple[Any, Any]:
    """Return the command of `transformers serve` and the module that holds its `ModelManager`.

    Raises:
        ImportError: The release has no such server, or packages that it needs are missing.
    """
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager
    except NameError as error:  # to 5.10, its classes derive from those of packages that may miss
        raise ImportError(str(error)) from error

    manager = model_manager.ModelManager
    for name in ("_load_model", "get_quantization_config"):
        if not hasattr(manager, name):
            raise ImportError(f"its ModelManager has no {name} in {installed_release()}")
    if "continuous_batching" not in inspect.signature(manager).parameters:  # to 5.17
        raise ImportError(
            f"its ModelManager does not know of continuous batching in {installed_release()}"
        )
    return Serve, model_manager


def served_folder(name: str) -> Path:
    """Return the folder of a model that the server names, which need not exist.

    The server appends a revision to the names of the Hub ("name@main"); up to transformers 5.23 to
    folders, too.
    """
    path = Path(name)
    return path if path.exists() else Path(re.sub(r"@[^@/]*$", "", name))


def _generates(module: nn.Module) -> bool:
    from transformers import GenerationMixin

    return isinstance(module, GenerationMixin)
