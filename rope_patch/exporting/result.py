"""Result of an export: what to pass to an engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from yaml import safe_dump


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
