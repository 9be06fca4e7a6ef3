"""The handle of a model that `rope_patch.encode` gave another encoding."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import nn

from rope_patch.patching.active import current
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.config_copy import ConfigOverride
from rope_patch.patching.dynamic.batching_guard import guard_batching, slots_refusal
from rope_patch.patching.positions import install_position_rule
from rope_patch.patching.replacement.encoding import (
    AbsoluteEncoding,
    BiasEncoding,
    Encoding,
    find_encoding,
)
from rope_patch.patching.replacement.hooks import AttentionHook, SharedTensors, TableHook
from rope_patch.patching.undo_log import UndoLog
from rope_patch.patching.whole_text import read_dropped_texts_again
from rope_patch.utils.errors import Refused
from rope_patch.utils.notebook import text_html

logger = logging.getLogger("rope_patch")
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
