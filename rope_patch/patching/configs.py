"""The config of a patched model: a copy that tells the truth, on every module that holds it."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.patching.swap import Swaps


class ConfigSwap:
    """Gives one model configs of its own, so that another made from the same object is untouched.

    Undoing restores the changed fields, and then the very objects that stood there, unless somebody
    changed the copies meanwhile (a resized vocabulary, another attention kernel): those changes are
    the user's and stay.
    """

    def __init__(self) -> None:
        self._swaps = Swaps()
        self._fields = Swaps()
        self._pairs: list[tuple[PreTrainedConfig, PreTrainedConfig]] = []

    def apply(self, model: nn.Module, kind: type, fields: dict[str, Any]) -> None:
        """Makes the copies and changes them.

        Args:
            model: The model whose modules hold configs.
            kind: The class of the configs to change.
            fields: Their new values.
        """
        copies: dict[int, Any] = {}  # deepcopy's memo: also maps configs inside other configs
        for module in model.modules():
            for attribute, value in list(vars(module).items()):
                if not isinstance(value, PreTrainedConfig):
                    continue
                if id(value) not in copies:
                    self._pairs.append((value, copy.deepcopy(value, copies)))
                self._swaps.set(module, attribute, copies[id(value)])
        texts = [own.get_text_config(decoder=True) for _, own in self._pairs]
        for config in {id(text): text for text in texts if isinstance(text, kind)}.values():
            for name, value in fields.items():
                self._fields.set(config, name, copy.deepcopy(value))

    def undo(self) -> None:
        """Restores the fields, and the original objects where nothing else was changed."""
        self._fields.undo()
        if all(_alike(own, original) for original, own in self._pairs):
            self._swaps.undo()
        self._pairs.clear()


def _alike(own: PreTrainedConfig, original: PreTrainedConfig) -> bool:
    try:
        return own == original
    except RuntimeError:  # configs that differ by layer will not be compared (Gemma 4)
        return own.to_dict() == original.to_dict()
