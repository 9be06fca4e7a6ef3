"""What is to be exported: a patched model, a plan, or a config that says its rotation itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.exporting.rotation import LayerRotation
from rope_patch.methods import Frequencies, Method
from rope_patch.patching import Patch, current
from rope_patch.patching.architecture.layout import is_interleaved
from rope_patch.patching.architecture.probe import reference_frequencies
from rope_patch.patching.architecture.rotary_modules import RotaryModule, find_owner, find_rotaries
from rope_patch.patching.mla_scale import SoftmaxScaled, find_mla_attentions
from rope_patch.patching.plan import PatchPlan
from rope_patch.pretrained.loading import empty_model
from rope_patch.rope_config import LONGROPE_ONLY, by_layer_type, config_rope_type

STATIC_ALTERNATIVE = (
    "use a method whose frequencies stay, such as yarn, or transformers with rope_patch"
)

_NATIVE_ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}


@dataclass(frozen=True)
class Target:
    """A model to export.

    Attributes:
        name: What it rotates by, for messages.
        config: Its config as the checkpoint has it, whole.
        rotations: Every layer type's, None for all layers alike.
        extended_layer_types: The layer types that the method is about.
        length: Tokens the model is meant for.
        has_config_form: Whether a config of transformers says it.
        is_length_dependent: Whether short sequences are rotated otherwise than long ones.
        is_mla: Whether the architecture sharpens in its softmax scale (`SoftmaxScaled`).
        rotary: One of the model's rotary modules, with the config it is made from.
        start_token_count: How many first positions keep the rotation from before, which no config
            says.
    """

    name: str
    config: Any
    rotations: dict[str | None, LayerRotation]
    extended_layer_types: tuple[str | None, ...]
    length: int
    has_config_form: bool
    is_length_dependent: bool
    is_mla: bool
    rotary: tuple[RotaryModule, Any]
    start_token_count: int = 0

    @classmethod
    def from_model(cls, model_or_config: Any) -> Target:
        """Reads a model, patched or not, or a config.

        Raises:
            TypeError: It is neither.
            ValueError: It has no rotation.
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
        """A patch that is not made.

        Args:
            plan: What `rope_patch.patching.check` returned.
            config: The checkpoint's config, whole.
        """
        before = {kind: found for _, each in plan.rotaries for kind, found in each.items()}
        return cls._from_method(
            plan.method,
            config=config,
            parameters=plan.rope_parameters(),
            frequencies=plan.frequencies(),
            before=before,
            text=plan.config,
            length=plan.length or plan.trained_length,
            trained_length=plan.trained_length,
            latent=bool(plan.mla_attentions),
            rotary=plan.rotaries[0][0],
        )

    @classmethod
    def _from_patched(cls, model: nn.Module, handle: Patch) -> Target:
        rotaries = find_rotaries(model)
        patched: Any = rotaries[0].module.config
        found = [reference_frequencies(rotary, handle.original_config) for rotary in rotaries]
        method = handle.method
        return cls._from_method(
            method,
            config=_whole_config(model, patched, handle.original_config),
            parameters=patched.rope_parameters,
            frequencies=handle.frequencies,
            before={kind: each for one in found for kind, each in one.items()},
            text=handle.original_config,
            length=handle.length or handle.trained_length,
            trained_length=handle.trained_length,
            latent=isinstance(method, SoftmaxScaled),
            rotary=rotaries[0],
        )

    @classmethod
    def _from_method(
        cls,
        method: Method,
        *,
        config: Any,
        parameters: dict[str, Any],
        frequencies: dict[str | None, Frequencies],
        before: dict[str | None, Frequencies],
        text: Any,
        length: int,
        trained_length: int,
        latent: bool,
        rotary: RotaryModule,
    ) -> Target:
        standing = by_layer_type(text.rope_parameters)
        rotations = {
            kind: LayerRotation(
                parameters=copy.deepcopy(spelled),
                frequencies=frequencies.get(kind, before[kind]),
                checkpoint_parameters=standing[kind],
                checkpoint_frequencies=before[kind],
                trained_length=trained_length,
            )
            for kind, spelled in by_layer_type(parameters).items()
            if kind in before
        }
        native, follows = method.has_config_form, method.is_length_dependent(trained_length)
        if method.start_token_count:
            native = False
        elif not follows and (not native or text.model_type in LONGROPE_ONLY):
            # As numbers it can be said even so.
            for kind, rotation in rotations.items():
                if kind in frequencies and (not native or not _fits_longrope(rotation)):
                    rotations[kind] = replace(rotation, parameters=rotation.as_longrope(length))
            native = True
        return cls(
            name=str(method),
            config=config,
            rotations=rotations,
            extended_layer_types=tuple(frequencies),
            length=length,
            has_config_form=native,
            is_length_dependent=follows,
            is_mla=latent,
            rotary=(rotary, text),
            start_token_count=method.start_token_count,
        )

    @classmethod
    def _from_unpatched(cls, model: nn.Module) -> Target:
        """A config that says itself what to rotate by."""
        rotaries = find_rotaries(model)
        text: Any = rotaries[0].module.config
        found = {k: each for r in rotaries for k, each in reference_frequencies(r, text).items()}
        spelled = by_layer_type(text.rope_parameters)
        kinds = dict.fromkeys(config_rope_type(each) for each in spelled.values())
        scalings = [kind for kind in kinds if kind != "default"]
        latent = any(find_mla_attentions(find_owner(model, rotary)) for rotary in rotaries)
        rotations = {
            kind: LayerRotation(
                parameters=copy.deepcopy(each),
                frequencies=found[kind],
                checkpoint_parameters=each,
                checkpoint_frequencies=found[kind],
                trained_length=each.get("original_max_position_embeddings")
                or text.max_position_embeddings,
            )
            for kind, each in spelled.items()
            if kind in found
        }
        return cls(
            name=f"the config's own {' and '.join(scalings) or 'rotation'}",
            config=_whole_config(model, text, text),
            rotations=rotations,
            extended_layer_types=tuple(rotations),
            length=text.max_position_embeddings,
            has_config_form=set(kinds) <= _NATIVE_ROPE_TYPES,
            is_length_dependent=any(
                config_rope_type(each) == "dynamic"
                or (each.get("short_factor") or each.get("long_factor")) != each.get("long_factor")
                for each in spelled.values()
            ),
            is_mla=latent,
            rotary=(rotaries[0], text),
        )

    @property
    def text(self) -> Any:
        """The decoder's part of the config."""
        return self.config.get_text_config(decoder=True)

    @property
    def model_type(self) -> str:
        """The decoder's architecture."""
        return str(self.text.model_type)

    @property
    def is_half_layout(self) -> bool:
        """Whether pairs are known to be halves of a head apart, rather than neighbours."""
        try:
            return not is_interleaved(*self.rotary)
        except ValueError:
            return False

    @property
    def layers_differ(self) -> bool:
        """Whether layer types have rotations of their own."""
        return None not in self.rotations

    def fields(self, spelled: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
        """The fields of `config.json` for rotations as transformers 5 nests them.

        Args:
            spelled: `rope_parameters` of each layer type.
        """
        found: dict[str, Any] = {"rope_parameters": spelled.get(None, spelled)}
        original = [p.get("original_max_position_embeddings") for p in spelled.values()]
        # Some configs say it twice, and the outer one wins (Phi-3).
        if getattr(self.text, "original_max_position_embeddings", None) and any(original):
            found["original_max_position_embeddings"] = max(filter(None, original))
        return found

    def nest_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of the text config, where they belong in the whole config."""
        return nest_fields(self.config, fields)

    def refuse(self, engine: str, reason: str) -> ValueError:
        """The error for what an engine cannot do."""
        return ValueError(f"{engine} cannot run {self.name}: {reason}")

    def require_config_form(self, engine: str, instead: str) -> None:
        """Refuses what no config of transformers has a form for; `instead` says what to do."""
        if self.start_token_count:
            raise self.refuse(
                engine,
                f"positions below {self.start_token_count} keep a rotation of their own (start_tokens), "
                f"which no config can say; leave start_tokens out, or {instead}",
            )
        if not self.has_config_form:
            raise self.refuse(engine, "no config has a form for it; " + instead)

    def require_static(self, engine: str) -> None:
        """Refuses what has no form, and what follows the length, for an engine that does not."""
        self.require_config_form(engine, STATIC_ALTERNATIVE)
        if self.is_length_dependent:
            raise self.refuse(
                engine,
                "its rotation follows the length of each sequence, and this engine rotates all of "
                "them alike or leaves cached keys behind; " + STATIC_ALTERNATIVE,
            )


def _fits_longrope(rotation: LayerRotation) -> bool:
    return rotation.scaling in ("default", "longrope")


def nest_fields(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config's text config, where they belong in the config."""
    text = config.get_text_config(decoder=True)
    if text is config or not fields:
        return fields
    (name,) = (name for name in config.sub_configs if getattr(config, name, None) is text)
    return {name: fields}


def _whole_config(model: nn.Module, text: Any, original: Any) -> Any:
    """The config around a text config, as the checkpoint has it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config.get_text_config(decoder=True) is text:
            if config is text:
                return original
            whole = copy.deepcopy(config)
            for name in ("max_position_embeddings", "rope_parameters"):
                value = copy.deepcopy(getattr(original, name))
                setattr(whole.get_text_config(decoder=True), name, value)
            return whole
    return original
