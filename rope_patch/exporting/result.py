"""Result of an export: what to pass to an engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Export:
    """Fields and arguments that make an engine rotate as a patched model does; print it to read it.

    Attributes:
        engine: One of `rope_patch.exporting.ENGINES`.
        config: Fields of `config.json`, nested like the model's config, to write there or to pass
            on the command line; empty if no field expresses the rotation.
        arguments: Arguments to add to the engine's command line.
        notes: Further instructions, one sentence each.
        tensors: Tensors that a converter reads beside the weights, by name; `write_folder` writes
            them.
        needs_plugin: Whether the engine rotates so only with this package in its environment.
    """

    engine: str
    config: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: dict[str, list[float]] = field(default_factory=dict)
    needs_plugin: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `needs_plugin` only where it is true, as files of 0.1 are."""
        plain = asdict(self)
        if not self.needs_plugin:
            del plain["needs_plugin"]
        return plain

    def __str__(self) -> str:
        lines = [self.engine]
        if self.arguments:
            lines += ["  command line:", f"    {shlex.join(self.arguments)}"]
        if self.config:
            lines += ["  config.json:", f"    {json.dumps(self.config)}"]
        for name, numbers in self.tensors.items():
            lines += ["  tensor:", f"    {name}: {len(numbers)} numbers, float32"]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])
