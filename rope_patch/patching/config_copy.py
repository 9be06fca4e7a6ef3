"""Config of a patched model: a corrected copy on every module that holds one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.patching.undo_log import UndoLog


class ConfigOverride:
    """Per-model copies of configs, so that other models made from the same object do not change.

    Undoing restores the changed fields, and then the original objects, unless the user changed the
    copies meanwhile (a resized vocabulary, another attention kernel): such changes stay.
    """

    def __init__(self) -> None:
        self._undo_log = UndoLog()
        self._field_log = UndoLog()
        self._copies: list[tuple[PreTrainedConfig, PreTrainedConfig]] = []

    def apply(self, model: nn.Module, config_class: type, fields: dict[str, Any]) -> None:
        """Copy the model's configs and change fields of the copies.

        Args:
            model: The model whose modules hold configs.
            config_class: The class of the configs to change.
            fields: Their new values.
        """
        copies: dict[int, Any] = {}  # deepcopy's memo: also maps configs inside other configs
        for module in model.modules():
            for attribute, value in list(vars(module).items()):
                if not isinstance(value, PreTrainedConfig):
                    continue
                if id(value) not in copies:
                    own = copy.deepcopy(value, copies)
                    self._copies.append((own, copy.deepcopy(own)))
                self._undo_log.set(module, attribute, copies[id(value)])
        # Of an encoder and decoder with one config, transformers makes a new text config.
        texts = [
            part for own, _ in self._copies for part in (own, own.get_text_config(decoder=True))
        ]
        for config in {id(text): text for text in texts if isinstance(text, config_class)}.values():
            for name, value in fields.items():
                name = config.attribute_map.get(name, name)
                self._field_log.set(config, name, copy.deepcopy(value))

    def undo(self) -> list[str]:
        """Restore the fields, and the original objects if nothing else was changed.

        Returns:
            The names of the fields that other code has set since; those keep their values.
        """
        foreign = self._field_log.undo()
        if not foreign and all(_equal(own, unchanged) for own, unchanged in self._copies):
            foreign += self._undo_log.undo()
        else:
            self._undo_log.forget()
        self._copies.clear()
        return foreign


def _equal(one: Any, other: Any) -> bool:
    """Compare all attributes, also those that a config's own `==` leaves out.

    In transformers 5.1 and later, `==` compares the fields of a dataclass, which include neither
    the attention kernel nor added attributes.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    plain = type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__") and not callable(one)
    if plain or isinstance(one, PreTrainedConfig):
        return _equal(vars(one), vars(other))
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return False
