"""llama.cpp: words for its command line, and fields of config.json for its converter.

As its own code reads them (src/llama-context.cpp, src/llama-model.cpp, src/models, ggml's rope,
common/arg.cpp and conversion/, 2026-10):

- theta, linear and YaRN come from flags or from the GGUF file; flags reach the layers without a
  window only, so windows that rotate alike need the file;
- YaRN is always truncated, and its attention factor is the paper's times the file's
  `rope.scaling.attn_factor`: newer releases ignore --yarn-attn-factor and attention_factor;
- Llama 3's stretches are a tensor that the converter writes for Llama's own architecture; older
  converters take the original length from outside rope_parameters, 8,192 unless given;
- other stretches pair by pair are tensors that the converter writes for Phi-3; for Llama's own
  architecture it takes them from a tensor beside the weights, `rope.freqs.weight`;
- the converter passes that tensor on for Qwen and SmolLM3, too, and then their files do not load
  ("wrong number of tensors"), and stops at it for Gemma, gpt-oss, Granite and OLMo;
- stretches in the file act on top of what flags say;
- llama-server cuts -c down to the context length that the file names.
"""

from __future__ import annotations

from typing import Any

import torch

from rope_patch.exporting.result import Export
from rope_patch.exporting.rotation import LayerRotation
from rope_patch.exporting.target import Target
from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.rope_config import config_rope_type

NAME = "llama.cpp"

# What GGUF files call an architecture.
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
)  # scalings that are tensors of a GGUF file
_STRETCH_ARCHITECTURES = (
    "llama",
)  # whose files may have stretches, and whose converter passes them on
_STRETCH_TENSOR = "rope.freqs.weight"  # as the converter knows it; rope_freqs.weight in the file


def export(target: Target) -> Export:
    """What to pass to `llama-server` and its kin, and what to convert from.

    Raises:
        ValueError: llama.cpp has no form for the rotation.
    """
    target.require_static(NAME)
    rotation = _single_rotation(target)
    flags, fields = _flags(target, rotation), _fields(target, rotation)
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


def _single_rotation(target: Target) -> LayerRotation:
    """The rotation that there are flags and fields for."""
    rotations = target.rotations
    for rotation in rotations.values():
        if target.is_mla and rotation.scaling != "default":
            raise target.refuse(
                NAME,
                "how it sharpens multi-head latent attention is not known here; use ntk or abf",
            )
    if not target.layers_differ:
        return rotations[None]
    if target.model_type != "gemma3_text" or target.extended_layer_types != ("full_attention",):
        raise target.refuse(
            NAME,
            "of models whose layer types rotate differently, it is Gemma 3's full attention that "
            "has flags there; use vLLM or transformers",
        )
    return rotations["full_attention"]


def _flags(target: Target, rotation: LayerRotation) -> list[str] | None:
    kinds = getattr(target.text, "layer_types", None) or []
    if not target.layers_differ and "sliding_attention" in kinds:
        return None
    if _has_untruncated_ramp(rotation):
        return None
    own = config_rope_type(rotation.checkpoint_parameters)
    if own in _SCALINGS_IN_FILE:
        llamas = own == "llama3" and _ARCHITECTURES.get(target.model_type) in _STRETCH_ARCHITECTURES
        return _flags_on_file_factors(rotation) if llamas or target.model_type == "phi3" else None
    parameters, scaling = rotation.parameters, rotation.scaling
    words: list[str]
    if scaling == "default":
        words = ["--rope-scaling", "none"]
    elif scaling == "linear":
        words = ["--rope-scaling", "linear", "--rope-scale", _read_number(parameters["factor"])]
    elif scaling == "yarn":
        words = ["--rope-scaling", "yarn", "--rope-scale", _read_number(parameters["factor"])]
        words += ["--yarn-orig-ctx", str(parameters["original_max_position_embeddings"])]
        words += ["--yarn-ext-factor", "1"]
        words += ["--yarn-beta-fast", _read_number(parameters.get("beta_fast", 32))]
        words += ["--yarn-beta-slow", _read_number(parameters.get("beta_slow", 1))]
    else:
        return None
    if own == "yarn":  # what the file says of that
        words += ["--yarn-attn-factor", "1"]
        words += [] if scaling == "yarn" else ["--yarn-ext-factor", "0"]
    if scaling == "default" or rotation.theta != rotation.checkpoint_parameters["rope_theta"]:
        words += ["--rope-freq-base", _read_number(rotation.theta)]
    return words


def _flags_on_file_factors(rotation: LayerRotation) -> list[str] | None:
    """Flags that turn the stretches in a file into wider ones, where flags can."""
    still = not rotation.frequencies.inv_freq.all()
    if still or rotation.attention_factor != rotation.checkpoint_frequencies.attention_factor:
        return None
    wider = rotation.checkpoint_frequencies.inv_freq / rotation.frequencies.inv_freq
    pair = torch.arange(len(wider), dtype=torch.float64)
    last = len(wider) - 1
    if torch.allclose(wider, wider[:1], rtol=1e-6, atol=0):
        return ["--rope-scaling", "linear", "--rope-scale", _read_number(float(wider[last]))]
    if torch.allclose(wider, wider[last] ** (pair / last), rtol=1e-6, atol=0):
        theta = rotation.checkpoint_parameters["rope_theta"] * float(wider[last]) ** (
            len(wider) / last
        )
        return ["--rope-scaling", "none", "--rope-freq-base", _read_number(theta)]
    return None


def _fields(target: Target, rotation: LayerRotation) -> dict[str, Any] | None:
    """Fields that the converter reads."""
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
    """The fields for a rotation, spelled otherwise."""
    spelled = {k: r.parameters for k, r in target.rotations.items()}
    (kind,) = (k for k, r in target.rotations.items() if r is rotation)
    spelled[kind] = parameters
    return {"max_position_embeddings": target.length, **target.fields(spelled)}


def _has_untruncated_ramp(rotation: LayerRotation) -> bool:
    return rotation.scaling == "yarn" and not rotation.parameters.get("truncate", True)


def _checked_stretch(target: Target, rotation: LayerRotation) -> list[float]:
    """The tensor that says it pair by pair, for what nothing else says."""
    if _ARCHITECTURES.get(target.model_type) not in _STRETCH_ARCHITECTURES:
        raise target.refuse(
            NAME,
            "its YaRN is always truncated; leave truncate=False out"
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
    """What makes the attention factor that no flag sets any more.

    Args:
        target: The model.
        rotation: Its rotation.
        scaling: What it is passed as.
    """
    made = yarn_mscale(rotation.parameters["factor"]) if scaling == "yarn" else 1.0
    if rotation.attention_factor == made and target.model_type != "phi3":
        return []
    if target.model_type == "phi3" and scaling == "default":
        return []
    if target.layers_differ:
        raise target.refuse(
            NAME,
            "another attention factor than YaRN's own would reach the windows, too; leave "
            "attention_factor out, or use linear, ntk or abf",
        )
    return _override_kv(target, "rope.scaling.attn_factor=float", rotation.attention_factor / made)


def _override_kv(target: Target, key: str, value: float) -> list[str]:
    """Says an entry of a GGUF file otherwise."""
    architecture = _ARCHITECTURES.get(target.model_type)
    if architecture is None:
        raise target.refuse(
            NAME,
            f"what GGUF files call {target.model_type} is not known here; known are "
            f"{', '.join(_ARCHITECTURES)}",
        )
    return ["--override-kv", f"{architecture}.{key}:{_read_number(value)}"]


def _read_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
