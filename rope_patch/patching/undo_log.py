"""Change attributes and configs of live objects, and restore them in reverse order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig


class ABSENT:
    """Marker for "the object has no such attribute of its own"; a class, so that copies keep it."""


class UndoLog:
    """A list of changes that can be undone.

    The log is copied and pickled along with the model that holds it, so a deep copy of a patched
    model has a log of its own.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[Any] = []

    def set(self, owner: Any, attribute: str, value: Any, *, old: Any = None) -> None:
        """Set an attribute of the instance, buffers and parameters of modules included.

        Args:
            owner: The object to change.
            attribute: Its attribute, which may be new or shadow one of the class.
            value: The new value. Its method `retire`, if any, is called if the value stays in use
                after `undo`, because another wrapper holds it.
            old: The value to restore, if not the current one.
        """
        current_value = _instance_attribute(owner, attribute)
        setattr(owner, attribute, value)
        self._changes.append((owner, attribute, value, current_value if old is None else old))

    def hook(
        self,
        module: nn.Module,
        before: Callable[..., Any],
        after: Callable[..., None] | None = None,
    ) -> None:
        """Run functions around each of the module's forward calls.

        Args:
            module: The module.
            before: Called with `(module, args, kwargs)`; may return new args and kwargs.
            after: Called with `(module, args, kwargs, output)`, also if the call failed.
        """
        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            self._hooks.append(
                module.register_forward_hook(after, with_kwargs=True, always_call=True)
            )

    def hook_output(self, module: nn.Module, change: Callable[..., Any]) -> None:
        """Replace the output of the module's forward calls.

        Args:
            module: The module.
            change: Called with `(module, args, output)`; returns the new output.
        """
        self._hooks.append(module.register_forward_hook(change))

    def owners(self, attribute: str) -> list[Any]:
        """Return the objects that had an attribute set, each once."""
        return list({id(o): o for o, name, _, _ in self._changes if name == attribute}.values())

    def original(self, owner: Any, attribute: str) -> Any:
        """Return the value of an attribute before its first change; ABSENT if none was logged."""
        for changed, name, _, old in self._changes:
            if changed is owner and name == attribute:
                return old
        return ABSENT

    def set_original(self, owner: Any, attribute: str, original: Any) -> None:
        """Have `undo` restore another value than the one that the first change replaced."""
        for i, (changed, name, value, _) in enumerate(self._changes):
            if changed is owner and name == attribute:
                self._changes[i] = (changed, name, value, original)
                return

    def undo(self) -> list[str]:
        """Restore everything, the latest change first. Calling it again does nothing.

        A value that other code replaced since stays. Tensors are always restored, because forwards,
        casts and moves of the model replace them, too.

        Returns:
            The names of the attributes that stay, as `Class.attribute`.
        """
        foreign = []
        while self._hooks:
            self._hooks.pop().remove()
        while self._changes:
            owner, attribute, value, old = self._changes.pop()
            if vars(owner).get("_old_forward") is value and attribute == "forward":
                # accelerate wrapped the value in its hooks, which stay.
                own = type(owner).forward.__get__(owner) if old is ABSENT else old
                owner._old_forward = own
                continue
            present = _instance_attribute(owner, attribute)
            if not _is_still(present, value):
                foreign.append(f"{type(owner).__name__}.{attribute}")
                if hasattr(value, "retire"):
                    value.retire()
                continue
            if old is ABSENT:
                delattr(owner, attribute)
                continue
            if isinstance(old, torch.Tensor):  # the model may have moved meanwhile
                if isinstance(old, nn.Parameter):  # the same object, which optimizers hold
                    old.data = old.data.to(present.device)
                else:
                    old = old.to(present.device)
            setattr(owner, attribute, old)
        return list(dict.fromkeys(foreign))

    def forget(self) -> None:
        """Leave the changes as they are: from now on there is nothing to undo."""
        self._changes.clear()


def _instance_attribute(owner: Any, attribute: str) -> Any:
    """Return the instance's own attribute, or ABSENT if only its class has it."""
    if isinstance(owner, nn.Module):
        own: Any
        for own in (owner._buffers, owner._parameters, owner._modules):
            if attribute in own:
                return own[attribute]
    return vars(owner).get(attribute, ABSENT)


def _is_still(present: Any, value: Any) -> bool:
    """Return whether an attribute still holds the value set there, or an equal one or a tensor."""
    if present is value:
        return True
    if isinstance(value, torch.Tensor):
        return isinstance(present, torch.Tensor)
    return isinstance(value, str | int | float | dict) and present == value


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
        # transformers makes a new text config if encoder and decoder have one config.
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
    """Compare all attributes, also those that a config's own `==` leaves out."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    # In transformers 5.1 and later, a config's `==` compares the fields of a dataclass, which
    # include neither the attention kernel nor added attributes.
    plain = type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__") and not callable(one)
    if plain or isinstance(one, PreTrainedConfig):
        return _equal(vars(one), vars(other))
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return False
