"""Find a model's rotary modules, their owners and decoders, and Liger's rotation in their place."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.forwards import CACHE, MASK, POSITIONS, TOKENS, missing_parameters
from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

CANNOT_FOLLOW_YET = (
    "cannot be followed in a cache yet: use a method whose frequencies stay, such as yarn"
)

_COS_OR_SIN = re.compile(r"(?:^|_)(?:cos|sin)(?:_|$)")

# What the forward of a decoder must be given, so that the length of each row can be followed.
DECODER_ARGUMENTS = (TOKENS, POSITIONS, MASK, CACHE)


@dataclass(frozen=True, eq=False)
class RotaryModule:
    """A module that computes cos and sin from positions, for one or several layer types.

    Attributes:
        module: The rotary module.
        prefixes: Prefix of `inv_freq` and `attention_scaling` in the module's attributes, for each
            of its layer types; {None: ""} for a module that serves all layers.
    """

    module: nn.Module
    prefixes: dict[str | None, str]


def find_rotaries(model: nn.Module) -> list[RotaryModule]:
    """Return the rotary modules of a model's text decoder, in transformers 5's shape.

    Raises:
        TypeError: Not a torch module.
        ValueError: There is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}")
    text_config = _text_config(model)
    rotaries = [
        RotaryModule(module, prefixes)
        for module in model.modules()
        if isinstance(getattr(module, "config", None), text_config)
        and (prefixes := _prefixes(module))
    ]
    if not rotaries:
        if (reason := unreached_rotation(model, text_config)) is not None:
            raise Refused(reason)
        others = {type(m).__name__ for m in model.modules() if "Rotary" in type(m).__name__}
        raise Refused(
            f"no rotary embedding found in {type(model).__name__} that its text config describes: "
            "expected a decoder with RoPE from transformers 5 (Llama, Qwen, Gemma, ...)"
            + (f" (other parts of it have {', '.join(sorted(others))})" if others else "")
        )
    if getattr(rotaries[0].module.config, "alibi", False):
        raise Refused(
            f"{type(model).__name__} tells positions by ALiBi, as its config says, and never turns "
            "anything: there is no rotation to extend"
        )
    return rotaries


def unreached_rotation(model: nn.Module, text_config: type) -> str | None:
    """Return why the rotary modules within a text decoder cannot be extended; None without any.

    They are of another shape than transformers 5's, as code that checkpoints bring often is.

    Args:
        model: The model.
        text_config: The class of the text decoder's config.
    """
    decoders = [m for m in model.modules() if isinstance(getattr(m, "config", None), text_config)]
    inner = {id(module) for decoder in decoders for module in decoder.modules()}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if id(module) in inner
        and "rotary" in type(module).__name__.lower()
        and _tables(module) is not None
        and not _prefixes(module)  # BLT's are of that shape, under configs of other parts
    ]
    if not found:
        return None
    name, module = found[0]
    tables = _tables(module)
    return (
        f"{type(model).__name__} is not extended: it rotates by {type(module).__name__}, in "
        + (f"each of {len(found)} modules, such as {name}" if len(found) > 1 else name)
        + (
            f", which caches tables of its own ({', '.join(tables)}) that no method reaches"
            if tables
            else ", which keeps its frequencies in a way that no method reaches"
        )
        + ". Leave trust_remote_code off if transformers has this architecture itself; or change "
        "the model's code: one module of the decoder, with config, inv_freq and "
        "attention_scaling, that computes cos and sin from position_ids, as LlamaRotaryEmbedding"
    )


def _tables(module: nn.Module) -> list[str] | None:
    """Return the names of a module's tables, or of what makes them; None if nothing rotates."""
    made, making = ({*vars(module), *module._buffers}, vars(type(module)))
    tables = sorted(filter(_COS_OR_SIN.search, made)) or sorted(filter(_COS_OR_SIN.search, making))
    return tables if tables or "inv_freq" in made else None


def find_owner(model: nn.Module, rotary: RotaryModule) -> nn.Module:
    """Return the parent of a rotary module; the model itself if no module has it as a child."""
    for module in model.modules():
        if any(child is rotary.module for child in module.children()):
            return module
    return model


def find_decoder(model: nn.Module, rotary: RotaryModule) -> nn.Module | None:
    """Return the innermost module around a rotary module that is given all `DECODER_ARGUMENTS`."""
    return _innermost(model, rotary, DECODER_ARGUMENTS)


def find_reader(model: nn.Module, rotary: RotaryModule) -> nn.Module | None:
    """Return the innermost module around a rotary module that is given tokens."""
    return _innermost(model, rotary, (TOKENS,))


def why_no_decoder(reader: nn.Module | None) -> str:
    """Return why a rotary module belongs to no decoder that can be followed.

    Args:
        reader: From `find_reader`.
    """
    release = installed_release()
    if reader is None:
        return f"is within no module that is given tokens, in {release}"
    missing = " and no ".join(missing_parameters(reader, DECODER_ARGUMENTS))
    return (
        f"belongs to {type(reader).__name__}, whose forward in {release} takes no {missing} under "
        "a name that this package knows"
    )


def _innermost(model: nn.Module, rotary: RotaryModule, needed: tuple[str, ...]) -> nn.Module | None:
    innermost = None
    for module in model.modules():  # outer modules come first
        if not missing_parameters(module, needed) and any(
            inner is rotary.module for inner in module.modules()
        ):
            innermost = module
    return innermost


def is_mrope(module: Any, config: Any) -> bool:
    """Return whether a rotary module gives a token several positions (M-RoPE), each for some pairs.

    Args:
        module: A rotary module.
        config: The text config.
    """
    rope_parameters = by_layer_type(config.rope_parameters).values()
    return hasattr(module, "mrope_section") or any("mrope_section" in p for p in rope_parameters)


def _text_config(model: nn.Module) -> type:
    """Return the text decoder's config class, which a vision tower's rotary modules lack."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            return type(config.get_text_config(decoder=True))
    raise Refused(
        f"{type(model).__name__} has no transformers config: expected a transformers model"
    )


def _prefixes(module: nn.Module) -> dict[str | None, str]:
    rope_type: Any = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        names: dict[str | None, str] = {layer_type: f"{layer_type}_" for layer_type in rope_type}
    else:
        names = {None: ""}
    return {
        layer_type: prefix
        for layer_type, prefix in names.items()
        if f"{prefix}inv_freq" in module._buffers and hasattr(module, f"{prefix}attention_scaling")
    }


# What Liger replaces: in most files, in Qwen 2 VL's, in Llama 4's.
_ROTATIONS = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb", "apply_rotary_emb")


def is_liger_function(function: Any) -> bool:
    """Return whether a function is one of Liger's."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "liger_kernel"


class LigerWarning:
    """Hook that warns, once for each patched model, that Liger's rotation is installed.

    `TrainingArguments(use_liger_kernel=True)` replaces the rotation in the modeling file when
    training starts, for every model of that file in the process, and never restores it.
    """

    def __init__(self, rotary: RotaryModule, ours: bool) -> None:
        self.file = type(rotary.module).__module__
        self.uses_our_kernels = ours
        self.has_warned = False

    def __call__(self, *_: Any) -> None:
        if self.has_warned or torch.compiler.is_compiling():
            return
        module = sys.modules.get(self.file)
        for name in _ROTATIONS:
            if is_liger_function(getattr(module, name, None)):
                self.has_warned = True
                logger.warning(
                    _MESSAGE, name, self.file, _OURS if self.uses_our_kernels else _THEIRS
                )


_MESSAGE = (
    "Liger's rotation stands in the place of %s of %s, as the Trainer's use_liger_kernel=True puts "
    "it there: %s. To leave it out, and keep all else of Liger, train with "
    "liger_kernel_config={'rope': False}."
)
_OURS = "this model goes on rotating by rope_patch's own, which Liger's does not reach"
_THEIRS = (
    "it rotates this model now, by the frequencies of the patch; that is right only for heads that "
    "rotate as Llama's do, in halves"
)


def warn_about_liger(
    owner: nn.Module, rotary: RotaryModule, *, uses_our_kernels: bool, undo_log: UndoLog
) -> None:
    """Warn if Liger's rotation is installed now, or as soon as a forward meets it.

    Args:
        owner: The parent of a rotary module, called in every forward.
        rotary: The rotary module.
        uses_our_kernels: Whether the attentions' rotation is rope_patch's.
        undo_log: Log of the changes.
    """
    watch = LigerWarning(rotary, uses_our_kernels)
    watch()
    undo_log.hook(owner, before=watch)
