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
- Latent attention (DeepSeek-V3) takes YaRN's attention factor into its softmax scale, if the file
  has yarn_log_multiplier and the graph reads it. It does so for any other scale, too, so YaRN is
  the only scaling there.
- DeepSeek-V4's graph gives the flags' YaRN to its compressed branches, unscaled in cos and sin, and
  a theta alone to its windows. The theta of the compressed branches is a key of the file.
- Gemma 4's file has stretches that stop pairs of full attention; flags scale the others.
- Ministral 3's converter asks for YaRN; its graph divides the attention factor by the one of
  mscale_all_dim, and starts the queries' temperature at the original length in the file.
- llama-server limits -c to the context length in the file.

What its graph and its converter read for an architecture is in engine_fields.json. The converter
writes no field of a rotation for Gemma and Gemma 2, for example.
"""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.exporting import deepseek_v4
from rope_patch.exporting.engine_fields import (
    engine_version,
    file_architecture,
    reads_latent_multiplier,
    require_fields_are_read,
    what_engine_reads,
)
from rope_patch.exporting.target import Export, LayerRotation, Target, latent_attention_fields
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import config_rope_type

NAME = "llama.cpp"
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_V4_ARCHITECTURE = "deepseek4"

_SCALINGS_IN_FILE = (
    "llama3",
    "longrope",
    "proportional",
)  # scalings that are tensors in a GGUF file
_STRETCH_TYPES = ("llama", "mistral", "mixtral")  # converted as "llama", which has the tensor
_STRETCH_TENSOR = "rope.freqs.weight"  # the converter's name; rope_freqs.weight in the file


def export(target: Target) -> Export:
    """Return arguments for `llama-server` and the other tools, and fields to convert with.

    Raises:
        ValueError: llama.cpp has no form for the rotation.
    """
    target.require_static(NAME)
    if target.model_type == deepseek_v4.MODEL_TYPE:
        return _deepseek_v4_export(target)
    rotation = single_rotation(target)
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


def single_rotation(target: Target) -> LayerRotation:
    """Return the one rotation that flags and fields can set."""
    rotations = target.rotations
    if not target.layers_differ:
        if target.is_mla:
            _require_latent_attention(target, rotations[None])
        return rotations[None]
    windows = rotations.get("sliding_attention")
    if (
        target.model_type not in ("gemma3_text", *_GEMMA4)
        or windows is None
        or windows.parameters != windows.checkpoint_parameters
        or windows.scaling != "default"
    ):
        raise target.refuse(
            NAME,
            "of models whose layer types rotate differently, it is the full attention of Gemma 3 "
            "and Gemma 4 that has flags there; use vLLM or transformers",
        )
    return rotations["full_attention"]


def _require_latent_attention(target: Target, rotation: LayerRotation) -> None:
    """Raise unless a graph sharpens latent attention as transformers does."""
    if rotation.scaling == "default":
        return
    parameters = latent_attention_fields(target, NAME, rotation)
    architecture, multiplier = file_architecture(target), parameters["mscale_all_dim"]
    if not reads_latent_multiplier(architecture):
        raise target.refuse(
            NAME,
            f"its graph of {architecture} reads no yarn_log_multiplier, by which others put YaRN's "
            "attention factor into the softmax scale of latent attention; use ntk or abf",
        )
    if parameters.get("mscale") != multiplier or (multiplier != 1 and architecture != "deepseek2"):
        raise target.refuse(
            NAME,
            f"its graph of {architecture} takes mscale = {multiplier:g} for 1; use ntk or abf",
        )


def _deepseek_v4_export(target: Target) -> Export:
    """Return flags for DeepSeek-V4, whose file has one theta as a key of its own."""
    thetas, yarn = deepseek_v4.flat_fields(target, NAME)
    changed = deepseek_v4.changed_thetas(target)
    own = config_rope_type(target.rotations["compress"].checkpoint_parameters)
    flags = ["--rope-scaling", "none"] if yarn is None else _yarn_flags(yarn)
    if yarn is None and own == "yarn":
        flags += ["--yarn-ext-factor", "0"]
    if "rope_theta" in changed:
        flags += ["--rope-freq-base", _format_number(thetas["rope_theta"])]
    keys: list[tuple[str, float]] = [("context_length=int", target.length)]
    if "compress_rope_theta" in changed:
        key = "attention.compress_rope_freq_base=float"
        keys.append((key, thetas["compress_rope_theta"]))
    for key, value in keys:
        flags += ["--override-kv", f"{_V4_ARCHITECTURE}.{key}:{_format_number(value)}"]
    return Export(
        engine=NAME,
        arguments=[*flags, "-c", str(target.length)],
        notes=[
            "for a GGUF file that was converted from the model as it was",
            deepseek_v4.PUBLISHED_NOTE.replace("this engine", "its converter"),
        ],
    )


def _flags(target: Target, rotation: LayerRotation) -> list[str] | None:
    if not target.layers_differ and target.has_windows:
        return None
    if _has_untruncated_ramp(rotation):
        return None
    file_scaling = config_rope_type(rotation.checkpoint_parameters)
    if file_scaling in _SCALINGS_IN_FILE:
        is_llama3_file = file_scaling == "llama3" and target.model_type in _STRETCH_TYPES
        return (
            flags_on_file_factors(rotation)
            if is_llama3_file or target.model_type in ("phi3", *_GEMMA4)
            else None
        )
    parameters, scaling = rotation.parameters, rotation.scaling
    flags: list[str]
    if scaling == "default":
        flags = ["--rope-scaling", "none"]
    elif scaling == "linear":
        flags = ["--rope-scaling", "linear", "--rope-scale", _format_number(parameters["factor"])]
    elif scaling == "yarn":
        flags = _yarn_flags(parameters)
    else:
        return None
    if file_scaling == "yarn":  # override the file's YaRN
        flags += ["--yarn-attn-factor", "1"]
        flags += [] if scaling == "yarn" else ["--yarn-ext-factor", "0"]
    if scaling == "default" or rotation.theta != rotation.checkpoint_parameters["rope_theta"]:
        flags += ["--rope-freq-base", _format_number(rotation.theta)]
    return flags


def _yarn_flags(parameters: dict[str, Any]) -> list[str]:
    flags = ["--rope-scaling", "yarn", "--rope-scale", _format_number(parameters["factor"])]
    flags += ["--yarn-orig-ctx", str(parameters["original_max_position_embeddings"])]
    flags += ["--yarn-ext-factor", "1"]
    flags += ["--yarn-beta-fast", _format_number(parameters.get("beta_fast", 32))]
    return [*flags, "--yarn-beta-slow", _format_number(parameters.get("beta_slow", 1))]


def flags_on_file_factors(rotation: LayerRotation) -> list[str] | None:
    """Return flags that multiply a file's stretches to the rotation's; None if no flags do."""
    own, inv_freq = rotation.checkpoint_frequencies.inv_freq, rotation.frequencies.inv_freq
    count, moving = len(own), int((own > 0).sum())
    has_other_attention = (
        rotation.attention_factor != rotation.checkpoint_frequencies.attention_factor
    )
    if has_other_attention or moving < 2 or ((own > 0) != (inv_freq > 0)).any():
        return None
    ratio = own[:moving] / inv_freq[:moving]  # pairs that stop are the last ones
    pair = torch.arange(moving, dtype=torch.float64)
    last = moving - 1
    if torch.allclose(ratio, ratio[:1], rtol=1e-6, atol=0):
        return ["--rope-scaling", "linear", "--rope-scale", _format_number(float(ratio[last]))]
    if torch.allclose(ratio, ratio[last] ** (pair / last), rtol=1e-6, atol=0):
        theta = rotation.checkpoint_parameters["rope_theta"] * float(ratio[last]) ** (count / last)
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
            if not (target.is_mla and "mscale" in key):  # the converter writes its multiplier
                parameters.pop(key, None)
        if rotation.has_temperature:  # the converter of Ministral 3 asks for it
            parameters["mscale_all_dim"] = _file_multiplier(rotation)
    elif scaling == "llama3":
        if target.model_type not in _STRETCH_TYPES:
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
    if target.model_type in _GEMMA4:
        raise target.refuse(
            NAME,
            "a GGUF file of Gemma 4 stops pairs of full attention, and flags scale the others by "
            "one number or change their theta; use linear, ntk or abf",
        )
    if file_architecture(target) != "llama" or target.model_type not in _STRETCH_TYPES:
        raise target.refuse(
            NAME,
            "its YaRN is always truncated; use truncate=True"
            if _has_untruncated_ramp(rotation)
            else "a GGUF file has stretches pair by pair for Llama's own architecture and Phi-3 "
            f"only, none for {target.model_type}; use linear, ntk, abf, yarn or ntk-by-parts"
            + (
                ", with start='unscaled'"
                if config_rope_type(rotation.checkpoint_parameters) != "default"
                else ""
            ),
        )
    return rotation.stretch


def _attention_factor_flags(target: Target, rotation: LayerRotation, scaling: str) -> list[str]:
    """Return arguments for the attention factor, which no other flag sets in newer releases."""
    engine_factor = 1.0  # latent attention has its own in the softmax scale
    if scaling == "yarn" and not target.is_mla:
        engine_factor = yarn_mscale(rotation.parameters["factor"])
        if rotation.has_temperature:
            engine_factor /= yarn_mscale(rotation.parameters["factor"], _file_multiplier(rotation))
    if scaling == "yarn" and target.is_mla:
        multiplier = rotation.parameters["mscale_all_dim"]
        if rotation.checkpoint_parameters.get("mscale_all_dim") == multiplier:
            return []
        key = "rope.scaling.yarn_log_multiplier=float"
        return _override_kv(target, key, 0.1 * multiplier)  # as the converter writes it
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
    architecture = file_architecture(target)
    if architecture is None:
        raise target.refuse(
            NAME, f"what GGUF files call {target.model_type} is not known here; use transformers"
        )
    return ["--override-kv", f"{architecture}.{key}:{_format_number(value)}"]


def _file_multiplier(rotation: LayerRotation) -> float:
    """Return the multiplier of YaRN's attention factor that a file of Ministral 3 has."""
    return float(rotation.checkpoint_parameters.get("mscale_all_dim", 1.0))


def _format_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
