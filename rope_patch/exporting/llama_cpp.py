"""llama.cpp: command-line flags, and fields of config.json for its converter.

Read from its code (src/llama-context.cpp, src/llama-model.cpp, src/models, ggml's rope,
common/arg.cpp and conversion/, 2026-10):

- theta, linear and YaRN come from flags or from the GGUF file. Flags reach only layers without a
  sliding window, so windows that rotate alike need the file.
- YaRN is always truncated. Its attention factor is the paper's times the file's
  `rope.scaling.attn_factor`; newer releases ignore --yarn-attn-factor and attention_factor.
- Llama 3's stretches are a tensor that the converter writes for Llama's own architecture. Older
  converters read the original length outside rope_parameters, with 8,192 as the default.
- Other stretches for each pair are tensors that the converter writes for Phi-3. For Llama's own
  architecture it takes them from a tensor beside the weights, `rope.freqs.weight`.
- The converter also copies that tensor for Qwen and SmolLM3, whose files then fail to load ("wrong
  number of tensors"). It fails on the tensor for Gemma, gpt-oss, Granite and OLMo.
- Stretches in the file multiply those of the flags.
- llama-server limits -c to the context length in the file.

What its graph and its converter read for an architecture is in engine_fields.json. The converter
writes no field of a rotation for Gemma and Gemma 2, for example.
"""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.exporting.engine_fields import (
    engine_version,
    require_fields_are_read,
    what_engine_reads,
)
from rope_patch.exporting.target import Export, LayerRotation, Target
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import config_rope_type

NAME = "llama.cpp"

# Names of architectures in GGUF files.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "smollm3": "smollm3",
}
_SCALINGS_IN_FILE = (
    "llama3",
    "longrope",
    "proportional",
)  # scalings that are tensors in a GGUF file
_STRETCH_ARCHITECTURES = ("llama",)  # files and converter support the tensor
_STRETCH_TENSOR = "rope.freqs.weight"  # the converter's name; rope_freqs.weight in the file


def export(target: Target) -> Export:
    """Return arguments for `llama-server` and the other tools, and fields to convert with.

    Raises:
        ValueError: llama.cpp has no form for the rotation.
    """
    target.require_static(NAME)
    rotation = _single_rotation(target)
    flags = _flags(target, rotation)
    fields = _fields(target, rotation) if _are_fields_written(target, flags) else None
    tensors: dict[str, list[float]] = {}
    if flags is None and fields is None:
        tensors = {_STRETCH_TENSOR: _checked_stretch(target, rotation)}
        fields = _fields_with(
            target, rotation, {"rope_type": "default", "rope_theta": rotation.theta}
        )
    notes = []
    if flags is not None:
        flags = [*flags, *_override_kv(target, "context_length=int", target.length)]
    if tensors:
        notes.append(
            "convert from a folder with these fields in config.json and the tensor in a "
            "model*.safetensors beside the weights; `rope-patch export --write FOLDER` and "
            "rope_patch.exporting.write_folder make it, with links to the weights"
        )
    elif flags is None:
        notes.append(
            "convert from a folder with these fields in config.json: no flags say the same for "
            "every layer of a file that was converted without them"
        )
    elif fields is None:
        notes.append("for a GGUF file that was converted from the model as it was")
    else:
        notes.append(
            "the flags are for a GGUF file that was converted from the model as it was; in one "
            "converted from a folder with these fields they change nothing"
        )
    attention = _attention_factor_flags(
        target, rotation, "default" if tensors else rotation.scaling
    )
    if attention and fields is not None:
        notes.append("the attention factor is said by --override-kv in any case, and by no field")
    return Export(
        engine=NAME,
        config=target.nest_fields(fields or {}),
        arguments=[*(flags or []), *attention, "-c", str(target.length)],
        notes=notes,
        tensors=tensors,
    )


def _are_fields_written(target: Target, flags: list[str] | None) -> bool:
    """Return whether the converter writes a rotation's fields; refuse if a layer misses them."""
    require_fields_are_read(target, NAME)
    reads, version = what_engine_reads(target, NAME), f"{NAME} {engine_version(NAME)}"
    if reads == "full attention" and not target.layers_differ and target.has_windows:
        raise target.refuse(
            NAME,
            f"in {version} the sliding windows of {target.model_type} take no scaling and no theta "
            "of the other layers; use vLLM or transformers",
        )
    if reads == "flags" and flags is None:
        raise target.refuse(
            NAME,
            f"the converter of {version} writes no field of a rotation for {target.model_type}, "
            "and no flags say the same for every layer; use vLLM or transformers",
        )
    return reads != "flags"


def _single_rotation(target: Target) -> LayerRotation:
    """Return the one rotation that flags and fields can set."""
    rotations = target.rotations
    for rotation in rotations.values():
        if target.is_mla and rotation.scaling != "default":
            raise target.refuse(
                NAME,
                "how it sharpens multi-head latent attention is not known here; use ntk or abf",
            )
    if not target.layers_differ:
        return rotations[None]
    windows = rotations.get("sliding_attention")
    if (
        target.model_type != "gemma3_text"
        or windows is None
        or windows.parameters != windows.checkpoint_parameters
        or windows.scaling != "default"
    ):
        raise target.refuse(
            NAME,
            "of models whose layer types rotate differently, it is Gemma 3's full attention that "
            "has flags there; use vLLM or transformers",
        )
    return rotations["full_attention"]


def _flags(target: Target, rotation: LayerRotation) -> list[str] | None:
    if not target.layers_differ and target.has_windows:
        return None
    if _has_untruncated_ramp(rotation):
        return None
    file_scaling = config_rope_type(rotation.checkpoint_parameters)
    if file_scaling in _SCALINGS_IN_FILE:
        is_llama3_file = (
            file_scaling == "llama3"
            and _ARCHITECTURES.get(target.model_type) in _STRETCH_ARCHITECTURES
        )
        return (
            _flags_on_file_factors(rotation)
            if is_llama3_file or target.model_type == "phi3"
            else None
        )
    parameters, scaling = rotation.parameters, rotation.scaling
    flags: list[str]
    if scaling == "default":
        flags = ["--rope-scaling", "none"]
    elif scaling == "linear":
        flags = ["--rope-scaling", "linear", "--rope-scale", _format_number(parameters["factor"])]
    elif scaling == "yarn":
        flags = ["--rope-scaling", "yarn", "--rope-scale", _format_number(parameters["factor"])]
        flags += ["--yarn-orig-ctx", str(parameters["original_max_position_embeddings"])]
        flags += ["--yarn-ext-factor", "1"]
        flags += ["--yarn-beta-fast", _format_number(parameters.get("beta_fast", 32))]
        flags += ["--yarn-beta-slow", _format_number(parameters.get("beta_slow", 1))]
    else:
        return None
    if file_scaling == "yarn":  # override the file's YaRN
        flags += ["--yarn-attn-factor", "1"]
        flags += [] if scaling == "yarn" else ["--yarn-ext-factor", "0"]
    if scaling == "default" or rotation.theta != rotation.checkpoint_parameters["rope_theta"]:
        flags += ["--rope-freq-base", _format_number(rotation.theta)]
    return flags


def _flags_on_file_factors(rotation: LayerRotation) -> list[str] | None:
    """Return flags that multiply the file's stretches to the rotation's, or None."""
    has_stopped_pairs = not rotation.frequencies.inv_freq.all()
    if (
        has_stopped_pairs
        or rotation.attention_factor != rotation.checkpoint_frequencies.attention_factor
    ):
        return None
    ratio = rotation.checkpoint_frequencies.inv_freq / rotation.frequencies.inv_freq
    pair = torch.arange(len(ratio), dtype=torch.float64)
    last = len(ratio) - 1
    if torch.allclose(ratio, ratio[:1], rtol=1e-6, atol=0):
        return ["--rope-scaling", "linear", "--rope-scale", _format_number(float(ratio[last]))]
    if torch.allclose(ratio, ratio[last] ** (pair / last), rtol=1e-6, atol=0):
        theta = rotation.checkpoint_parameters["rope_theta"] * float(ratio[last]) ** (
            len(ratio) / last
        )
        return ["--rope-scaling", "none", "--rope-freq-base", _format_number(theta)]
    return None


def _fields(target: Target, rotation: LayerRotation) -> dict[str, Any] | None:
    """Return fields for the converter, or None if no field expresses the rotation."""
    parameters, scaling = dict(rotation.parameters), rotation.scaling
    original = rotation.trained_length
    extra: dict[str, Any] = {}
    if target.model_type == "phi3":
        if scaling != "default":
            parameters = rotation.as_longrope(target.length)
        parameters["original_max_position_embeddings"] = original
        extra = {"original_max_position_embeddings": original}
    elif _has_untruncated_ramp(rotation):
        return None
    elif scaling == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
            parameters.pop(key, None)
    elif scaling == "llama3":
        if _ARCHITECTURES.get(target.model_type) != "llama":
            return None
        extra = {"original_max_position_embeddings": parameters["original_max_position_embeddings"]}
    elif scaling not in ("default", "linear"):
        return None
    return _fields_with(target, rotation, parameters) | extra


def _fields_with(
    target: Target, rotation: LayerRotation, parameters: dict[str, Any]
) -> dict[str, Any]:
    """Return all fields, with other parameters for one rotation."""
    all_parameters = {name: r.parameters for name, r in target.rotations.items()}
    (layer_type,) = (name for name, r in target.rotations.items() if r is rotation)
    all_parameters[layer_type] = parameters
    return {"max_position_embeddings": target.length, **target.fields(all_parameters)}


def _has_untruncated_ramp(rotation: LayerRotation) -> bool:
    return rotation.scaling == "yarn" and not rotation.parameters.get("truncate", True)


def _checked_stretch(target: Target, rotation: LayerRotation) -> list[float]:
    """Return the stretches for the tensor, or raise if the architecture has no such tensor."""
    if _ARCHITECTURES.get(target.model_type) not in _STRETCH_ARCHITECTURES:
        raise target.refuse(
            NAME,
            "its YaRN is always truncated; use truncate=True"
            if _has_untruncated_ramp(rotation)
            else "a GGUF file has stretches pair by pair for Llama's own architecture and Phi-3 "
            f"only, none for {target.model_type}; use linear, ntk, abf, yarn or ntk-by-parts"
            + (
                ", with start='unscaled'"
                if config_rope_type(rotation.checkpoint_parameters) in _SCALINGS_IN_FILE
                else ""
            ),
        )
    return rotation.stretch


def _attention_factor_flags(target: Target, rotation: LayerRotation, scaling: str) -> list[str]:
    """Return arguments for the attention factor, which no other flag sets in newer releases."""
    engine_factor = yarn_mscale(rotation.parameters["factor"]) if scaling == "yarn" else 1.0
    if rotation.attention_factor == engine_factor and target.model_type != "phi3":
        return []
    if target.model_type == "phi3" and scaling == "default":
        return []
    if target.layers_differ:
        raise target.refuse(
            NAME,
            "another attention factor than YaRN's own would reach the windows, too; leave "
            "attention_factor out, or use linear, ntk or abf",
        )
    return _override_kv(
        target, "rope.scaling.attn_factor=float", rotation.attention_factor / engine_factor
    )


def _override_kv(target: Target, key: str, value: float) -> list[str]:
    """Return arguments that override a key of a GGUF file."""
    architecture = _ARCHITECTURES.get(target.model_type)
    if architecture is None:
        raise target.refuse(
            NAME,
            f"what GGUF files call {target.model_type} is not known here; known are "
            f"{', '.join(_ARCHITECTURES)}",
        )
    return ["--override-kv", f"{architecture}.{key}:{_format_number(value)}"]


def _format_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
