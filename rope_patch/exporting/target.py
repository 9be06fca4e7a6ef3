"""Read what to export from a patched model, a plan or a config, and hold what an exporter returns.

An exporter gets a `Target` with a `LayerRotation` for each layer type, and returns an `Export`.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from yaml import safe_dump

from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import NO_ROTATION
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.mla_scale import SoftmaxScaled, find_mla_attentions
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import RotaryTraits, reference_frequencies
from rope_patch.patching.geometry_selection import FAR
from rope_patch.patching.method_wrappers import describe_yarn, unwrap
from rope_patch.patching.plan import PatchPlan
from rope_patch.pretrained.loading import empty_model
from rope_patch.rope_config import (
    LONGROPE_ONLY,
    NATIVE_ROPE_TYPES,
    TEMPERATURE_KEY,
    by_layer_type,
    config_rope_type,
    read_geometries,
)
from rope_patch.utils.errors import Refused

# Keys of `rope_parameters` that are independent of the scaling.
PRESERVED_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")

STATIC_ALTERNATIVE = (
    "use a method whose frequencies stay, such as yarn, or transformers with rope_patch"
)

YARN_OR_UNSCALED = "use yarn, or ntk or abf on unscaled frequencies (start='unscaled')"

# What engines have of their own, by engine and map.
_OWN_MAPS = {
    ("llama.cpp", "self-extend"): (
        ". llama-completion has Self-Extend of its own with a fixed group, as --grp-attn-n GROUP "
        "--grp-attn-w WINDOW; llama-server has not"
    ),
    ("sglang", "dca"): (
        ". SGLang has dual chunk attention of its own, as dual_chunk_attention_config in "
        "config.json (chunk_size is our top, local_size our top - chunk), with another temperature"
    ),
    ("vllm", "dca"): (
        ". vLLM up to 0.10 had dual chunk attention of its own; later releases cannot run it"
    ),
}


@dataclass(frozen=True)
class Target:
    """A model to export.

    Attributes:
        name: Name of the rotation, for messages.
        config: The checkpoint's whole config.
        rotations: The rotation of every layer type, under None if all layers are alike.
        extended_layer_types: The layer types that the method extends.
        length: Context length of the exported model, in tokens.
        has_config_form: Whether a transformers config expresses the rotation.
        is_length_dependent: Whether frequencies depend on the sequence length.
        is_mla: Whether the architecture has the attention factor in its softmax scale
            (`SoftmaxScaled`).
        traits: Facts about one of the model's rotary modules.
        start_token_count: Number of first positions that keep the unextended rotation, which no
            config expresses.
        position_map: The map of positions in attention, which no config expresses; None without.
        method: The method, in its wrappers; None for a config with a scaling of its own.
        geometries: The unextended rotation of each layer type that the method extends.
        extension: The request that leads to the rotation; None for a config's own scaling.
    """

    name: str
    config: Any
    rotations: dict[str | None, LayerRotation]
    extended_layer_types: tuple[str | None, ...]
    length: int
    has_config_form: bool
    is_length_dependent: bool
    is_mla: bool
    traits: RotaryTraits
    start_token_count: int = 0
    position_map: PositionMap | None = None
    method: Method | None = None
    geometries: Mapping[str | None, Geometry] = field(default_factory=dict)
    extension: Extension | None = None

    @classmethod
    def from_model(cls, model_or_config: Any) -> Target:
        """Return the target of a patched or unpatched model, or of a config.

        Raises:
            TypeError: The argument is neither a model nor a config.
            ValueError: The model has no rotation.
        """
        if isinstance(model_or_config, PreTrainedConfig):
            return cls.from_model(empty_model(type(model_or_config).__name__, model_or_config))
        if not isinstance(model_or_config, nn.Module):
            raise TypeError(
                "expected a model of transformers or a config, got "
                f"{type(model_or_config).__name__}; "
                "rope_patch.pretrained.loading.read_config reads a folder's"
            )
        handle = current(model_or_config)
        if handle is None:
            return cls._from_unpatched(model_or_config)
        return cls._from_patched(model_or_config, handle)

    @classmethod
    def from_plan(cls, plan: PatchPlan, config: Any) -> Target:
        """Return the target of a patch that is planned but not applied.

        Args:
            plan: The plan from `rope_patch.entry_points.check`.
            config: The checkpoint's whole config.
        """
        return cls._from_extended(
            plan,
            config=config,
            parameters=plan.rope_parameters(),
            frequencies=plan.frequencies(),
            rotaries=plan.rotaries,
            text_config=plan.config,
            extension=plan.resolved_extension,
        )

    @classmethod
    def _from_patched(cls, model: nn.Module, handle: Patch) -> Target:
        rotaries = find_rotaries(model)
        patched: Any = rotaries[0].module.config
        return cls._from_extended(
            handle,
            config=_whole_config(model, patched, handle.original_config),
            parameters=patched.rope_parameters,
            frequencies=handle.frequencies,
            rotaries=[
                RotaryTraits.of(model, rotary, handle.original_config) for rotary in rotaries
            ],
            text_config=handle.original_config,
            extension=handle.extension,
        )

    @classmethod
    def _from_extended(
        cls,
        extended: PatchPlan | Patch,
        *,
        config: Any,
        parameters: dict[str, Any],
        frequencies: dict[str | None, Frequencies],
        rotaries: list[RotaryTraits],
        text_config: Any,
        extension: Extension,
    ) -> Target:
        """Return the target of a rotation by a method, planned or in effect."""
        method, trained_length = extended.method, extended.trained_length
        length = extended.length or trained_length
        checkpoint_frequencies = _unpatched_frequencies(rotaries)
        checkpoint_parameters = by_layer_type(text_config.rope_parameters)
        rotations = {
            layer_type: LayerRotation(
                parameters=copy.deepcopy(layer_parameters),
                frequencies=frequencies.get(layer_type, checkpoint_frequencies[layer_type]),
                checkpoint_parameters=checkpoint_parameters[layer_type],
                checkpoint_frequencies=checkpoint_frequencies[layer_type],
                trained_length=trained_length,
            )
            for layer_type, layer_parameters in by_layer_type(parameters).items()
            if layer_type in checkpoint_frequencies
        }
        inner = unwrap(method)
        position_map = inner if isinstance(inner, PositionMap) else None
        if method.query_temperature is not None and position_map is None:
            raise Refused(
                f"{method} with temperature={method.temperature!r} cannot be exported: no config "
                "and no engine has a form for the temperature; leave temperature out, or serve the "
                "model with transformers and rope_patch"
            )
        has_config_form = method.has_config_form
        is_length_dependent = method.is_length_dependent(trained_length)
        if method.start_token_count:
            has_config_form = False
        elif not is_length_dependent and (
            not has_config_form or text_config.model_type in LONGROPE_ONLY
        ):
            # A config can express the rotation as a number for each pair.
            for layer_type, rotation in rotations.items():
                fits = has_config_form and rotation.scaling in ("default", "longrope")
                if layer_type in frequencies and not fits:
                    rotations[layer_type] = replace(
                        rotation, parameters=rotation.as_longrope(length)
                    )
            has_config_form = True
        return cls(
            name=str(method),
            config=config,
            rotations=rotations,
            extended_layer_types=tuple(frequencies),
            length=length,
            has_config_form=has_config_form,
            is_length_dependent=is_length_dependent,
            is_mla=isinstance(method, SoftmaxScaled),
            traits=rotaries[0],
            start_token_count=method.start_token_count,
            position_map=position_map,
            method=method,
            geometries=extended.geometries,
            extension=extension,
        )

    @classmethod
    def _from_unpatched(cls, model: nn.Module) -> Target:
        """Return the target of an unpatched model with a scaling of its own."""
        modules = find_rotaries(model)
        text_config: Any = modules[0].module.config
        read_geometries(text_config, text_config.max_position_embeddings)  # raises for bad numbers
        rotaries = [RotaryTraits.of(model, rotary, text_config) for rotary in modules]
        frequencies = _unpatched_frequencies(rotaries)
        all_parameters = by_layer_type(text_config.rope_parameters)
        rope_types = dict.fromkeys(
            config_rope_type(parameters) for parameters in all_parameters.values()
        )
        scalings = [name for name in rope_types if name != "default"]
        is_mla = any(find_mla_attentions(traits.owner) for traits in rotaries)
        rotations = {
            layer_type: LayerRotation(
                parameters=copy.deepcopy(parameters),
                frequencies=frequencies[layer_type],
                checkpoint_parameters=parameters,
                checkpoint_frequencies=frequencies[layer_type],
                trained_length=parameters.get("original_max_position_embeddings")
                or text_config.max_position_embeddings,
            )
            for layer_type, parameters in all_parameters.items()
            if layer_type in frequencies
        }
        return cls(
            name=f"the config's own {' and '.join(scalings) or 'rotation'}",
            config=_whole_config(model, text_config, text_config),
            rotations=rotations,
            extended_layer_types=tuple(rotations),
            length=text_config.max_position_embeddings,
            has_config_form=set(rope_types) <= NATIVE_ROPE_TYPES,
            is_length_dependent=any(
                config_rope_type(parameters) == "dynamic"
                or (parameters.get("short_factor") or parameters.get("long_factor"))
                != parameters.get("long_factor")
                for parameters in all_parameters.values()
            )
            or any(  # another attention factor for long texts (Phi-3.5-MoE)
                not own.close_to(frequencies[layer_type])
                for rotary in modules
                for layer_type, own in reference_frequencies(rotary, text_config, FAR).items()
            ),
            is_mla=is_mla,
            traits=rotaries[0],
        )

    @property
    def text(self) -> Any:
        """Return the decoder's part of the config."""
        return self.config.get_text_config(decoder=True)

    @property
    def model_type(self) -> str:
        """Return the decoder's architecture."""
        return str(self.text.model_type)

    @property
    def is_half_layout(self) -> bool:
        """Return whether pairs are known to be half a head apart, rather than neighbours."""
        try:
            return not self.traits.is_interleaved
        except Refused:
            return False

    @property
    def layers_differ(self) -> bool:
        """Return whether layer types have different rotations."""
        return None not in self.rotations

    @property
    def has_windows(self) -> bool:
        """Return whether some layers have a sliding window, by the config's layer types."""
        return "sliding_attention" in (getattr(self.text, "layer_types", None) or [])

    def fields(self, all_parameters: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of `config.json` for `rope_parameters`, nested as in transformers 5.

        Args:
            all_parameters: `rope_parameters` of each layer type.
        """
        config_fields: dict[str, Any] = {
            "rope_parameters": all_parameters.get(None, all_parameters)
        }
        lengths = [p.get("original_max_position_embeddings") for p in all_parameters.values()]
        # Some configs have the length twice, and the outer one wins (Phi-3).
        if getattr(self.text, "original_max_position_embeddings", None) and any(lengths):
            config_fields["original_max_position_embeddings"] = max(filter(None, lengths))
        return config_fields

    def nest_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Nest fields of the text config as in the whole config."""
        return nest_fields(self.config, fields)

    def unchanged_notes(self) -> list[str]:
        """Return a note if the target is a model as it was trained: no method, and no scaling."""
        if self.extension is not None or any(
            rotation.scaling != "default" for rotation in self.rotations.values()
        ):
            return []
        return [
            "nothing changes: the model has no patch, and its config no scaling, so the engine "
            f"rotates as it was trained, for {self.length:,} tokens. To extend it, name a method, "
            "such as --method yarn --factor 4, or patch the model first"
        ]

    def yarn_notes(self) -> list[str]:
        """Return a note on each YaRN of the checkpoint's own config: whether it was trained in."""
        phrases = [describe_yarn(self.text, layer_type) for layer_type in self.extended_layer_types]
        return list(dict.fromkeys(phrase for phrase in phrases if phrase))

    def refuse(self, engine: str, reason: str) -> Refused:
        """Return the error for a rotation that an engine has no form for."""
        return Refused(f"{engine} cannot run {self.name}: {reason}")

    def require_no_position_map(self, engine: str) -> None:
        """Raise if attention compares at mapped positions, which no engine reads from a config."""
        if self.position_map is None:
            return
        own = _OWN_MAPS.get((engine, self.position_map.name), "")
        raise self.refuse(
            engine,
            "it compares tokens at mapped positions, which no config can say"
            + own
            + "; serve it with transformers and rope_patch.load, or use a method that changes "
            "frequencies, such as yarn",
        )

    def require_config_form(self, engine: str, instead: str) -> None:
        """Raise unless a transformers config expresses the rotation; `instead` is the advice."""
        if self.start_token_count:
            raise self.refuse(
                engine,
                f"positions below {self.start_token_count} keep a rotation of their own "
                f"(start_tokens), which no config can say; leave start_tokens out, or {instead}",
            )
        if not self.has_config_form:
            raise self.refuse(engine, "no config has a form for it; " + instead)

    def require_valid(self, engine: str, all_parameters: dict[str | None, dict[str, Any]]) -> None:
        """Raise if transformers' check of the fields fails, which engines on transformers run."""
        if not any(config_rope_type(p) == "longrope" for p in all_parameters.values()):
            return
        own_keys = {key for r in self.rotations.values() for key in r.checkpoint_parameters}
        known = {  # transformers would warn of the engines' own names
            kind: {k: v for k, v in p.items() if k in own_keys or not k.endswith("_mscale")}
            for kind, p in all_parameters.items()
        }
        text = copy.deepcopy(self.text)
        text.rope_parameters = copy.deepcopy(known.get(None, known))
        try:
            text.validate_rope()
        except Exception as error:  # such as Gemma 4's, for a head_dim that differs by layer
            raise self.refuse(
                engine,
                f"transformers' own check of longrope fails for {self.model_type} "
                f"({type(error).__name__}); save the model with rope_patch.save and load it with "
                "rope_patch.load, or use linear or ntk",
            ) from error

    def require_static(self, engine: str) -> None:
        """Raise unless a config expresses the rotation and it is the same for all lengths."""
        self.require_config_form(engine, STATIC_ALTERNATIVE)
        if self.is_length_dependent:
            raise self.refuse(
                engine,
                "its rotation follows the length of each sequence, and this engine rotates all of "
                "them alike or leaves cached keys behind; " + STATIC_ALTERNATIVE,
            )


def nest_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Nest fields of a config's text config as in the config."""
    text = config.get_text_config(decoder=True)
    if text is config or not fields:
        return fields
    (name,) = (name for name in config.sub_configs if getattr(config, name, None) is text)
    return {name: fields}


def _unpatched_frequencies(rotaries: list[RotaryTraits]) -> dict[str | None, Frequencies]:
    return {
        layer_type: frequencies
        for traits in rotaries
        for layer_type, frequencies in traits.frequencies.items()
    }


def _whole_config(model: nn.Module, text_config: Any, original: Any) -> Any:
    """Return the checkpoint's config around a text config."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if (
            isinstance(config, PreTrainedConfig)
            and config.get_text_config(decoder=True) is text_config
        ):
            if config is text_config:
                return original
            whole = copy.deepcopy(config)
            for name in ("max_position_embeddings", "rope_parameters"):
                value = copy.deepcopy(getattr(original, name))
                setattr(whole.get_text_config(decoder=True), name, value)
            return whole
    return original


@dataclass(frozen=True)
class Export:
    """Fields and arguments that make an engine rotate as a patched model does; print it to read it.

    Attributes:
        engine: One of `rope_patch.exporting.ENGINES` or `TRAINERS`.
        config: Fields of `config.json`, nested like the model's config, to write there or to pass
            on the command line; empty if no field expresses the rotation.
        arguments: Arguments to add to the engine's command line.
        notes: Further instructions, one sentence each.
        tensors: Tensors that a converter reads beside the weights, by name; `write_folder` writes
            them.
        needs_plugin: Whether the engine rotates so only with this package in its environment.
        yaml: Keys of a trainer's YAML file.
    """

    engine: str
    config: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: dict[str, list[float]] = field(default_factory=dict)
    needs_plugin: bool = False
    yaml: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; files of 0.1 have neither `needs_plugin` nor `yaml`."""
        plain = asdict(self)
        for name in ("needs_plugin", "yaml"):
            if not plain[name]:
                del plain[name]
        return plain

    def yaml_lines(self) -> str:
        """Return `yaml` as lines of a YAML file."""
        return safe_dump(self.yaml, sort_keys=False, width=10**6)

    def __str__(self) -> str:
        lines = [self.engine]
        if self.arguments:
            lines += ["  command line:", f"    {shlex.join(self.arguments)}"]
        if self.config:
            lines += ["  config.json:", f"    {json.dumps(self.config)}"]
        if self.yaml:
            lines += ["  YAML:", *(f"    {line}" for line in self.yaml_lines().splitlines())]
        for name, numbers in self.tensors.items():
            lines += ["  tensor:", f"    {name}: {len(numbers)} numbers, float32"]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of one layer type.

    Attributes:
        parameters: `rope_parameters` of this layer type in transformers 5.
        frequencies: The same as numbers, at the target length.
        checkpoint_parameters: The checkpoint's own `rope_parameters`.
        checkpoint_frequencies: The checkpoint's own rotation.
        trained_length: Tokens at which an extension starts.
    """

    parameters: dict[str, Any]
    frequencies: Frequencies
    checkpoint_parameters: dict[str, Any]
    checkpoint_frequencies: Frequencies
    trained_length: int

    @property
    def scaling(self) -> str:
        """Return the rope_type of transformers; "default" is none."""
        return config_rope_type(self.parameters)

    @property
    def theta(self) -> float:
        """Return the rope base that `parameters` names."""
        return float(self.parameters["rope_theta"])

    @property
    def attention_factor(self) -> float:
        """Return the multiplier of cos and sin."""
        return self.frequencies.attention_factor

    @property
    def has_temperature(self) -> bool:
        """Return whether queries grow beyond the checkpoint's original length (Ministral 3)."""
        return TEMPERATURE_KEY in self.checkpoint_parameters

    @property
    def stretch(self) -> list[float]:
        """Return the ratio of each pair's wavelength to that of theta alone, `[R / 2]`."""
        inv_freq = self.frequencies.inv_freq
        pair = torch.arange(len(inv_freq), dtype=torch.float64)
        stretch = self.theta ** (-pair / len(inv_freq)) / inv_freq
        return stretch.clamp(max=NO_ROTATION).tolist()

    @property
    def plain_theta(self) -> float | None:
        """Return a theta that says the rotating pairs without a scaling, or None.

        Pairs that stop may follow them, as in p-RoPE.
        """
        inv_freq = self.frequencies.inv_freq
        count, moving = len(inv_freq), int((inv_freq > 0).sum())
        if self.attention_factor != 1 or moving < 2 or not inv_freq[:moving].all():
            return None
        last = moving - 1
        theta = float(inv_freq[last]) ** (-count / last)
        plain = theta ** (-torch.arange(moving, dtype=torch.float64) / count)
        return theta if torch.allclose(inv_freq[:moving], plain, rtol=1e-6, atol=0) else None

    def as_proportional(self) -> dict[str, Any] | None:
        """Return the checkpoint's p-RoPE with a theta that says the rotation, or None."""
        own, inv_freq = self.checkpoint_frequencies.inv_freq, self.frequencies.inv_freq
        is_proportional = config_rope_type(self.checkpoint_parameters) == "proportional"
        theta = self.plain_theta
        if not is_proportional or theta is None or ((own > 0) != (inv_freq > 0)).any():
            return None
        fields = {k: v for k, v in self.checkpoint_parameters.items() if k != "factor"}
        is_own = self.parameters == self.checkpoint_parameters
        return fields if is_own else {**fields, "rope_theta": theta}

    def as_longrope(self, length: int) -> dict[str, Any]:
        """Return `rope_parameters` of the same rotation as `longrope` with one set of stretches.

        Args:
            length: Tokens at the target.
        """
        preserved = {
            key: self.checkpoint_parameters[key]
            for key in PRESERVED_KEYS
            if key in self.checkpoint_parameters
        }
        if config_rope_type(self.checkpoint_parameters) == "proportional":
            # For `proportional` it is the share of pairs that rotate.
            preserved.pop("partial_rotary_factor", None)
        if self.has_temperature:
            names = (TEMPERATURE_KEY, "original_max_position_embeddings")
            preserved |= {key: self.checkpoint_parameters[key] for key in names}
        return {
            "rope_type": "longrope",
            "factor": length / self.trained_length,
            "long_factor": self.stretch,
            "short_factor": self.stretch,
            "attention_factor": self.attention_factor,
            "rope_theta": self.theta,
            "original_max_position_embeddings": self.trained_length,
            **preserved,
        }


def latent_attention_fields(target: Target, engine: str, rotation: LayerRotation) -> dict[str, Any]:
    """Return `rope_parameters` of latent attention: a theta, or YaRN as in DeepSeek's configs.

    Engines that read DeepSeek's YaRN truncate its ramp and put its attention factor into the
    softmax scale, by mscale_all_dim; cos and sin stay unscaled.

    Raises:
        ValueError: It is another scaling or another YaRN.
    """
    parameters = rotation.parameters
    is_deepseek = parameters.get("mscale_all_dim") and "attention_factor" not in parameters
    if rotation.scaling == "default" or (
        rotation.scaling == "yarn" and is_deepseek and parameters.get("truncate", True)
    ):
        return parameters
    raise target.refuse(
        engine,
        "multi-head latent attention takes there a new theta or YaRN with its own attention "
        f"factor; {YARN_OR_UNSCALED}",
    )


def original_length_for_factor(
    target: Target, engine: str, length: int, attention_factor: float
) -> float:
    """Return the original length that yields an attention factor, usually no whole number.

    For engines that compute LongRoPE's attention factor from two lengths. It is sqrt(1 + ln(length
    / original) / ln(original)) (arXiv:2402.13753), which equals sqrt(ln(length) / ln(original)). So
    an original length exists for any factor of at least 1.

    Args:
        target: The model, for the error.
        engine: The engine, for the error.
        length: `max_position_embeddings`, in tokens.
        attention_factor: Multiplier of cos and sin to reach.

    Raises:
        ValueError: It is below 1, which no length yields.
    """
    if attention_factor < 1:
        raise target.refuse(
            engine,
            f"an attention factor below 1 ({attention_factor:g}) cannot be said pair by pair "
            "there; leave it out, or " + STATIC_ALTERNATIVE,
        )
    return length if attention_factor == 1 else length ** (1 / attention_factor**2)
