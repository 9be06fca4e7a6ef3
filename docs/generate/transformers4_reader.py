"""Compare rotations in transformers 4: run by transformers4_fields.py in that environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_TOLERANCE = 1e-5
_OTHER_MODALITIES = ("visual", "vision", "vq", "audio")


def v4_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as transformers 4 wrote it, without a scaling."""
    plain = {k: v4_config(v) if isinstance(v, dict) else v for k, v in config.items()}
    parameters = plain.pop("rope_parameters", None) or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if isinstance(parameters.get(key), float):
            plain.setdefault(key, parameters[key])
    plain.pop("transformers_version", None)
    for name in ("layer_types", "layers_block_type"):  # transformers 5's names of layers
        old = {"linear_attention": "mamba"}
        if plain.get("model_type") in ("granitemoehybrid", "zamba2") and plain.get(name):
            plain[name] = [
                {**old, "full_attention": "attention"}.get(kind, kind) for kind in plain[name]
            ]
    return plain


def merge(config: dict[str, Any], fields: dict[str, Any]) -> None:
    """Write exported fields into a config, nested ones into the nested config."""
    for key, value in fields.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict) and key != "rope_scaling":
            merge(config[key], value)
        else:
            config[key] = value


def outcome_of(row: dict[str, Any]) -> str:
    """Return "equal", or what differs or fails."""
    if row["config"]["model_type"] not in CONFIG_MAPPING:
        return "unknown architecture"
    config = v4_config(row["config"])
    merge(config, row["fields"])
    try:
        return differences(build(config), row) or "equal"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def build(config: dict[str, Any]) -> Any:
    """Return the model of a config.json."""
    made = CONFIG_MAPPING[config.pop("model_type")](**config)
    kind = AutoModelForCausalLM
    if type(made) in AutoModelForImageTextToText._model_mapping and "text_config" in config:
        kind = AutoModelForImageTextToText
    return kind.from_config(made, attn_implementation="eager")


def differences(model: Any, row: dict[str, Any]) -> str:
    """Return how a model's rotation differs from the wanted one; empty if it does not."""
    rotaries = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        and not any(word in name for word in _OTHER_MODALITIES)
    ]
    if not rotaries:
        return "no inv_freq"
    for layer_type, (inv_freq, factor) in row["rotations"].items():
        wanted = torch.tensor(inv_freq, dtype=torch.float64)
        for name, module in rotaries:
            if layer_type and ("local" in name) != (layer_type == "sliding_attention"):
                continue
            got = module.inv_freq.double()
            if got.shape != wanted.shape:
                return f"{len(got)} pairs, not {len(wanted)}"
            if not torch.allclose(got, wanted, rtol=_TOLERANCE, atol=1e-12):
                return f"inv_freq off by {float((got / wanted - 1).abs().max()):.3g}"
            if abs(float(getattr(module, "attention_scaling", 1.0)) - factor) > _TOLERANCE:
                return f"attention factor {module.attention_scaling}, not {factor}"
    for name, module in model.named_modules():
        scale = getattr(module, "scaling", None)
        if name.endswith("self_attn") and isinstance(scale, float) and row["softmax_scale"]:
            if abs(scale / row["softmax_scale"] - 1) > _TOLERANCE:
                return f"softmax scale {scale}, not {row['softmax_scale']}"
            break
    return ""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    outcomes = [outcome_of(row) for row in json.loads(Path(sys.argv[1]).read_text())]
    print(json.dumps({"version": transformers.__version__, "outcomes": outcomes}))
