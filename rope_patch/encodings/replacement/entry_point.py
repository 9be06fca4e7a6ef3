"""Give a decoder another encoding by `encode`, and undo it by the handle of the model."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
from torch import nn

from rope_patch.encodings.active import current
from rope_patch.encodings.replacement import biases, rotations, tables  # noqa: F401 (register)
from rope_patch.encodings.replacement.encoding import (
    ENCODINGS,
    AbsoluteEncoding,
    BiasEncoding,
    DecoderShape,
    Encoding,
    find_encoding,
)
from rope_patch.encodings.replacement.hooks import (
    AttentionHook,
    SharedTensors,
    TableHook,
    require_implementation,
)
from rope_patch.patching.architecture.attention_source import hands_mask_on, undecorated_forward
from rope_patch.patching.architecture.rotary_modules import (
    find_decoder,
    find_reader,
    find_rotaries,
    is_mrope,
    why_no_decoder,
)
from rope_patch.patching.architecture.rotary_traits import call_rotary, make_probe
from rope_patch.patching.dynamic.generation import (
    guard_batching,
    require_no_batching_manager,
    slots_refusal,
)
from rope_patch.patching.length_warning import read_dropped_texts_again
from rope_patch.patching.positions import install_position_rule
from rope_patch.patching.undo_log import ConfigOverride, UndoLog
from rope_patch.transformers_api.forwards import MASK, cache_parameter, parameter_names
from rope_patch.transformers_api.models import (
    ATTENTION_FUNCTIONS,
    attention_implementation,
    installed_release,
)
from rope_patch.utils.errors import Refused, did_you_mean, text_html

logger = logging.getLogger("rope_patch")


def encode(model: nn.Module, name: str, **options: Any) -> EncodedModel:
    """Give a decoder another positional encoding, in place, before it is trained.

    A model that is encoded already gets the new encoding instead. Trained parts are drawn from
    torch's random numbers, in the dtype and on the device of the model's embeddings. They are a
    submodule, so optimizers that are made afterwards train them.

    Args:
        model: A transformers decoder of Llama's kind (Llama, Qwen, Mistral, Gemma, ...).
        name: A name from `rope_patch.list_encodings()`; docs/encode.md describes them.
        **options: The encoding's options.

    Returns:
        The handle, with `.undo()`.

    Raises:
        ValueError: The model is of another kind or is patched, or the name or an option is wrong.
            The model is as before.
        TypeError: Not a torch module.
    """
    decoder = _decoder(model)
    require_no_batching_manager(model)
    before = current_encode(model)
    if (patch := current(model)) is not None:
        raise Refused(
            f"{type(model).__name__} is patched ({patch}): expected an unpatched model; undo the "
            "patch first (rope_patch.unpatch)"
        )
    config: Any = decoder.config
    heads = _head_counts(decoder)
    shape = DecoderShape(
        config.hidden_size,
        max(heads),
        config.max_position_embeddings,
        float(getattr(config, "initializer_range", 0.02)),
    )
    encoding, values = _build_encoding(name, shape, options)
    require_implementation(encoding, attention_implementation(config))
    if isinstance(encoding, BiasEncoding):
        _require_one_bias(decoder, encoding, heads)
    weight: Any = next(decoder.parameters())
    encoding.to(weight.device, weight.dtype)
    encoding.train(decoder.training)
    handle = EncodedModel(model, decoder, encoding, values)
    if before is not None:
        before.undo()
    try:
        handle.apply()
    except BaseException:
        if before is not None:
            before.apply()
        raise
    logger.info("encoded %s: %s", type(model).__name__, handle.summary().replace("\n ", ";"))
    return handle


def list_encodings() -> list[str]:
    """Return the names that `rope_patch.encode` takes."""
    return sorted(ENCODINGS)


def _build_encoding(
    name: str, shape: DecoderShape, options: dict[str, Any]
) -> tuple[Encoding, dict[str, Any]]:
    """Build an encoding from its name and options, and return all its options with their values."""
    names = list_encodings()
    if name not in names:
        raise Refused(
            f"unknown encoding {name!r}{did_you_mean(name, names, 0.5)}: expected one of "
            f"{', '.join(names)}"
        )
    cls = ENCODINGS[name]
    parameters = inspect.signature(cls.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in defaults:
            known = f"its options are: {', '.join(defaults)}" if defaults else "it has none"
            raise Refused(
                f"encoding {name!r} has no option {key!r}{did_you_mean(key, defaults, 0.5)}; "
                f"{known}"
            )
    values = {**defaults, **options}
    factory: Any = cls
    return factory(shape, **values), values


def _decoder(model: nn.Module) -> Any:
    """Return the module that holds the layers, if the model is of Llama's kind."""
    rotary = find_rotaries(model)[0]
    config: Any = rotary.module.config
    name = type(model).__name__
    decoder: Any = find_decoder(model, rotary)
    if decoder is None:
        why = why_no_decoder(find_reader(model, rotary))
        raise Refused(f"the rotation of {name} {why}: expected a decoder of texts")
    layers = list(getattr(decoder, "layers", None) or ())
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    if not layers or not all(_takes_rotation(each) for each in attentions):
        raise Refused(
            f"{name} has layers whose self_attn is not given its rotation, a mask and a cache "
            "(position_embeddings, attention_mask), or calls none of transformers' attention "
            f"functions with them, in {installed_release()}: "
            "expected a decoder of Llama's kind, such as LlamaForCausalLM or Qwen3ForCausalLM"
        )
    if is_mrope(rotary.module, config):
        raise Refused(
            f"{name} gives a token several positions (M-RoPE): expected a decoder of texts alone"
        )
    layer_type, first = next(iter(rotary.prefixes)), torch.zeros(1, 1, dtype=torch.long)
    rotation = call_rotary(make_probe(rotary, config), torch.zeros(1, 1, 1), first, layer_type)
    if not isinstance(rotation, tuple):
        raise Refused(
            f"{name} rotates by complex numbers, not by cos and sin (Llama 4): expected a decoder "
            "of Llama's kind, such as LlamaForCausalLM or Qwen3ForCausalLM"
        )
    return decoder


def _takes_rotation(attention: Any) -> bool:
    if attention is None or not hasattr(attention, "layer_idx"):
        return False
    attention_class: Any = type(attention)
    code = getattr(undecorated_forward(attention_class), "__code__", None)
    if code is None or ATTENTION_FUNCTIONS not in code.co_names:  # linear attention (MiniMax)
        return False
    names = parameter_names(attention)
    return {"position_embeddings", MASK} <= {*names} and cache_parameter(attention) is not None


def _head_counts(decoder: Any) -> set[int]:
    """Return the numbers of query heads that the decoder's attentions have."""
    # Where they differ (Laguna, dots 3 Note), each attention says its own; the config may not.
    heads: set[Any] = {getattr(layer.self_attn, "num_heads", None) for layer in decoder.layers}
    return {decoder.config.num_attention_heads} if None in heads else heads


def _require_one_bias(decoder: Any, encoding: BiasEncoding, heads: set[int]) -> None:
    """Raise unless every attention adds one and the same bias to its logits."""
    if len(heads) > 1:
        counts = ", ".join(map(str, sorted(heads)))
        raise Refused(
            f"the layers of {type(decoder).__name__} have {counts} query heads, and the encoding "
            f"{encoding.name!r} has one bias for each head of all layers: expected a decoder whose "
            "layers have equally many heads"
        )
    classes: set[Any] = {type(layer.self_attn) for layer in decoder.layers}
    if others := sorted(each.__name__ for each in classes if not hands_mask_on(each)):
        raise Refused(
            f"{', '.join(others)} hands its attention function another mask than it is given, and "
            f"the encoding {encoding.name!r} reaches logits by that mask: expected a decoder of "
            "Llama's kind, such as LlamaForCausalLM or Qwen3ForCausalLM"
        )


ATTRIBUTE = "position_encoding"  # the encoding's name in its decoder


class EncodedModel:
    """Handle of a decoder with another positional encoding than its class's.

    Attributes:
        name: The encoding's name.
        options: All its options, with their values.
        encoding: The submodule that computes it and holds its trained parts.
        model: The whole model.
        decoder: The module in it that holds the layers.
        original_rope_parameters: What the config says of the rotation without the encoding.
    """

    def __init__(
        self, model: nn.Module, decoder: nn.Module, encoding: Encoding, options: dict[str, Any]
    ) -> None:
        self.name = encoding.name
        self.options = options
        self.encoding = encoding
        self.model = model
        self.decoder = decoder
        self.original_rope_parameters: dict[str, Any] = {}
        self._undo_log = UndoLog()
        self._config_override = ConfigOverride()

    @property
    def active(self) -> bool:
        """Return whether the encoding is in effect."""
        return getattr(self.decoder, ATTRIBUTE, None) is self.encoding

    def undo(self) -> None:
        """Give the decoder its class's own encoding back; do nothing if that is in effect.

        Raises:
            ValueError: The encoding is extended by a patch, which must be undone first.
        """
        if self.active and (patch := current(self.model)) is not None:
            raise Refused(
                f"the encoding {self.name!r} is patched ({patch}): expected an unpatched model; "
                "undo the patch first (rope_patch.unpatch)"
            )
        self._undo()

    def _undo(self) -> None:
        if foreign := self._undo_log.undo() + self._config_override.undo():
            logger.warning(
                "%s: replaced after the model was encoded, so undoing leaves it as it is",
                ", ".join(foreign),
            )

    def summary(self) -> str:
        """Return two lines that describe what is in effect."""
        return f"{self}{'' if self.active else ' (undone)'}\n  {self.encoding.describe()}"

    def apply(self) -> None:
        """Change the decoder; restore it if any step fails."""
        decoder: Any = self.decoder
        encoding, log, shared = self.encoding, self._undo_log, SharedTensors()
        encoding.handle = self
        self.original_rope_parameters = copy.deepcopy(decoder.config.rope_parameters)
        try:
            encoding.install(self.model, decoder, log, self._config_override)
            log.set(decoder, ATTRIBUTE, encoding)
            refusal = f"the encoding {encoding.name!r}" if encoding.reads_slots else None
            guard_batching(self.model, log, refusal=refusal and slots_refusal(refusal))
            install_position_rule(self.model, find_rotaries(self.model), log, counts_tokens=True)
            read_dropped_texts_again(self.model, log)
            log.hook(decoder, before=shared.forget, after=shared.forget)
            if isinstance(encoding, AbsoluteEncoding):
                log.hook(decoder.layers[0], before=TableHook(encoding))
            for index, layer in enumerate(decoder.layers):
                if isinstance(encoding, BiasEncoding) or not encoding.rotates(index):
                    hook = AttentionHook(encoding, layer, index, shared)
                    log.hook(layer.self_attn, before=hook)
        except BaseException:
            self._undo()
            raise

    def __str__(self) -> str:
        given = [f"{k}={v!r}" for k, v in self.options.items() if v is not None]
        return f"{self.name} ({', '.join(given)})" if given else self.name

    def __repr__(self) -> str:
        return f"<EncodedModel: {self}{'' if self.active else ' (undone)'}>"

    def _repr_html_(self) -> str:
        return text_html(self.summary() if self.active else repr(self))


def current_encode(model: nn.Module) -> EncodedModel | None:
    """Return the handle of the encoding that `rope_patch.encode` gave a model, or None."""
    encoding: Any = find_encoding(model)
    return None if encoding is None else encoding.handle
