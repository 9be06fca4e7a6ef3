"""Layers of a decoder that rotate their keys, read from its config and its source code."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn

from rope_patch.patching.architecture.rotary_modules import CANNOT_FOLLOW_YET
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.models import APPLY_ROTATION
from rope_patch.utils.errors import Refused

# Layers that share another layer's keys cache none themselves.
_IGNORED_CONDITIONS = {"self.is_kv_shared_layer"}

# Architectures that test `position_embeddings is not None`, which always holds.
_ALWAYS_ROTATE = ("falcon", "granitemoehybrid", "olmo_hybrid")


def rotated_layer_types(decoder: nn.Module, config: Any) -> list[str | None]:
    """Return the layer type of each layer of the cache that holds rotated keys, "" for the others.

    Those are the decoder's layers; where some run several times and cache each time (Dory's loops),
    their repetitions follow.

    Args:
        decoder: The module that holds the layers.
        config: The model's text config.

    Raises:
        ValueError: Only some layers rotate, and it is unknown which.
    """
    rope_parameters = by_layer_type(config.rope_parameters)
    layer_types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    types = [
        (None if None in rope_parameters else layer_types[index]) if rotates else ""
        for index, rotates in enumerate(_layers_that_rotate(decoder, config, layer_types))
    ]
    if getattr(config, "recurrent_kv_cache_mode", None) == "per_loop":
        first, count = config.n_input_layers, config.n_recurrent_layers
        types += types[first : first + count] * (config.n_recurrent_loops - 1)
    return types


def _layers_that_rotate(
    decoder: nn.Module, config: Any, layer_types: list[str | None]
) -> list[bool]:
    if getattr(config, "no_rope_layers", None):  # SmolLM3, Llama 4: 1 where a layer rotates
        return [bool(rotates) for rotates in config.no_rope_layers]
    if thetas := getattr(config, "layer_rope_theta", None):  # Granite SWA: 0 where none rotates
        return [bool(theta) for theta in thetas]
    rope_parameters = by_layer_type(config.rope_parameters)
    if None not in rope_parameters and None in config.rope_parameters.values():
        return [layer_type in rope_parameters for layer_type in layer_types]  # BEAM
    if config.model_type in ("cohere2", "exaone4", "exaone_moe"):  # only windows rotate
        sliding = [layer_type == "sliding_attention" for layer_type in layer_types]
        whole = config.model_type != "cohere2" and getattr(config, "sliding_window", None) is None
        return [whole or window for window in sliding]
    # Keys of images have no positions (Mllama).
    cross_layers = getattr(config, "cross_attention_layers", None) or ()
    rotates = [index not in cross_layers for index in range(len(layer_types))]
    if config.model_type in _ALWAYS_ROTATE:
        return rotates
    for module in decoder.modules():
        module_class: Any = type(module)
        for condition, expected in _rotation_conditions(module_class):
            if condition in _IGNORED_CONDITIONS:
                continue
            value, layer = (
                _evaluate_condition(module, condition),
                getattr(module, "layer_idx", None),
            )
            if value is None or not isinstance(layer, int):
                raise Refused(
                    f"{type(module).__name__} rotates only if {condition}: layers that do not "
                    f"rotate {CANNOT_FOLLOW_YET}"
                )
            # An attention that serves several layers has the index -1 (Zamba 2).
            for index in [layer] if layer >= 0 else range(len(rotates)):
                rotates[index] &= value is expected
    return rotates


def _evaluate_condition(module: nn.Module, condition: str) -> bool | None:
    """Return a condition's value if it depends on the module alone, else None."""
    names = {n.id for n in ast.walk(ast.parse(condition)) if isinstance(n, ast.Name)}
    if names != {"self"}:
        return None
    try:
        return bool(eval(condition, {"__builtins__": {}}, {"self": module}))
    except (AttributeError, TypeError):
        return None


@functools.cache
def _rotation_conditions(module_class: Any) -> frozenset[tuple[str, bool]]:
    """Return the conditions on which a module class's forward rotates.

    Returns:
        Conditions, each with the value for which the forward rotates.
    """
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(module_class.forward)))
    except (OSError, TypeError, AttributeError, SyntaxError):
        return frozenset()
    return frozenset(
        (ast.unparse(choice.test), expected)
        for choice in ast.walk(forward)
        if isinstance(choice, ast.If)
        for expected, branch in ((True, choice.body), (False, choice.orelse))
        for part in branch
        for call in ast.walk(part)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == APPLY_ROTATION
    )
