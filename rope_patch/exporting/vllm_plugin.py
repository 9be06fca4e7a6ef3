"""vLLM with rope_patch's plugin: rotations that follow each request, and others it has no form for.

The plugin reads a method's name and options from `rope_parameters`; see `rope_patch.serving.vllm`.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from rope_patch.exporting.engine_fields import engine_version, what_engine_reads
from rope_patch.exporting.target import PRESERVED_KEYS, Export, Target
from rope_patch.geometry import Geometry
from rope_patch.methods import Method
from rope_patch.patching.method_wrappers import ContinuedScaling, unwrap
from rope_patch.serving.vllm.rope_type import BASE_KEY, rope_type_for
from rope_patch.utils.installation import install_hint

# The largest length of a method that follows every length, if the request names none.
_DEFAULT_FACTOR = 4


def plugin_refusal(target: Target) -> str | None:
    """Return why the plugin cannot rotate a target; None if it can."""
    method = target.method
    if method is None:
        return "a config's own scaling is vLLM's to read"
    if target.is_mla:
        return "latent attention has its attention factor in the softmax scale"
    if target.model_type in ("gpt_oss", "deepseek_v4"):
        return f"vLLM's {target.model_type} builds its YaRN itself"
    if (reads := what_engine_reads(target, "vllm")) != "scaling":
        return f"vLLM {engine_version('vllm')} " + (
            f"runs {target.model_type} in transformers' own model, which the plugin does not reach"
            if reads == "transformers"
            else f"hands no scaling of {target.model_type} to the functions that it replaces"
        )
    if getattr(unwrap(method), "growth", None) == "exact":
        return "growth='exact' has another rotation for every length; leave it out"
    if isinstance(method, ContinuedScaling):
        return _continuation_refusal(target, method)
    return None


def _continuation_refusal(target: Target, method: ContinuedScaling) -> str | None:
    """Return why the plugin cannot build on the checkpoint's own scaling; None if it can."""
    geometries = target.geometries.values()
    if (
        method.short_frequencies
        or any(map(method.continued_yarn, geometries))
        or any(geometry.attention_factor != 1 for geometry in geometries)
    ):
        return (
            "it builds on a scaling of the checkpoint's own that has an attention factor or two "
            "sets of frequencies; use start='unscaled' if the scaling was not trained in"
        )
    return None


def export(target: Target) -> Export:
    """Return arguments for `vllm serve` in an environment that has rope_patch.

    Raises:
        ValueError: The plugin cannot rotate the model so; says why.
    """
    if reason := plugin_refusal(target):
        raise target.refuse("vllm", reason)
    method = target.method
    assert method is not None
    length = target.length
    trained_length = next(iter(target.geometries.values())).trained_length
    notes = []
    if length <= trained_length and method.is_dynamic:
        length = _DEFAULT_FACTOR * trained_length
        notes.append(
            f"no length was named, so the longest request is {length:,} tokens, "
            f"{_DEFAULT_FACTOR} times the trained length; --length names another"
        )
    config = _overrides(target, unwrap(method), length, trained_length)
    if method.is_length_dependent(trained_length):
        notes += [
            "each request is rotated for its prompt and max_tokens; one without max_tokens counts "
            "for the whole --max-model-len",
        ]
    return Export(
        engine="vllm",
        config=config,
        arguments=["--hf-overrides", json.dumps(config), "--max-model-len", str(length)],
        notes=[
            f"needs the plugin in vLLM's environment: {install_hint('vllm')}",
            *notes,
        ],
        needs_plugin=True,
    )


def _overrides(target: Target, method: Method, length: int, trained_length: int) -> dict[str, Any]:
    all_parameters: dict[str | None, dict[str, Any]] = {
        layer_type: dict(rotation.checkpoint_parameters)
        for layer_type, rotation in target.rotations.items()
    }
    for layer_type, geometry in target.geometries.items():
        own_fields = {
            key: all_parameters[layer_type][key]
            for key in PRESERVED_KEYS
            if key in all_parameters[layer_type]
        }
        all_parameters[layer_type] = own_fields | _rope_fields(method, geometry, length)
    factor = min(p.get("factor", 1.0) for p in all_parameters.values() if "rope_type" in p)
    # vLLM takes max_position_embeddings times factor for the longest length, but for Gemma 3.
    is_multiplied = "gemma3" not in target.model_type and factor * trained_length >= length
    positions = trained_length if is_multiplied else length
    return target.nest_fields(
        {"max_position_embeddings": positions, **target.fields(all_parameters)}
    )


def _rope_fields(method: Method, geometry: Geometry, length: int) -> dict[str, Any]:
    options = {
        option.name: value
        for option in fields(method)
        if (value := getattr(method, option.name)) is not None and value != option.default
    }
    options.pop("growth", None)  # the plugin fixes every factor at admission
    if method.is_dynamic and not method.factor_is_option:
        options["factor"] = _factor(length, geometry.trained_length)
    elif "factor" in options:
        options["factor"] = float(options["factor"])
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    return {
        "rope_type": rope_type_for(method.name),
        "rope_theta": geometry.theta,
        "original_max_position_embeddings": geometry.trained_length,
        **plain,
        **({BASE_KEY: list(geometry.base)} if geometry.base else {}),
    }


def _factor(length: int, trained_length: int) -> float:
    """Return length / trained length, rounded so that vLLM's product reaches the length."""
    factor = length / trained_length
    while factor * trained_length < length:
        factor = math.nextafter(factor, math.inf)
    return factor
