"""What each engine's model files read of a rotation, by architecture.

An engine's formulas may be right and its model file for an architecture may never pass the fields
to them. engine_fields.json says what reaches them, for one version of each engine; docs/generate
writes it from the engines' own files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from rope_patch.exporting.target import Target

_TABLE = Path(__file__).with_suffix(".json")
_KINDS = ("scaling", "theta", "transformers", "flags", "full attention")


@cache
def _table() -> dict[str, dict[str, Any]]:
    return dict(json.loads(_TABLE.read_text(encoding="utf-8")))


def engine_version(engine: str) -> str:
    """Return the version of an engine whose files were read."""
    return str(_table()[engine]["version"])


def what_engine_reads(target: Target, engine: str) -> str | None:
    """Return what an engine's model file reads.

    Returns:
        "scaling" (theta, too), "theta", "transformers" (the engine runs transformers' own model);
        for llama.cpp also "flags" (its converter writes neither into a file) and "full attention"
        (as "scaling", but no window takes it); or None where it reads neither or that is unknown.
    """
    for model_type in _model_types(target):
        for kind in _KINDS:
            if model_type in _table()[engine].get(kind, ()):
                return kind
    return None


def reads_rope_parameters(target: Target, engine: str) -> bool:
    """Return whether a model file of mlx-lm or mlx-vlm names transformers 5's field."""
    return any(name in _table()[engine]["rope_parameters"] for name in _model_types(target))


def file_architecture(target: Target) -> str | None:
    """Return the name of the architecture in llama.cpp's GGUF files; None where that is unknown."""
    names = _table()["llama.cpp"]["architectures"]
    return next((names[name] for name in _model_types(target) if name in names), None)


def what_graph_reads(architecture: str) -> str | None:
    """Return what llama.cpp's graph of a GGUF file's architecture takes from the file.

    Returns:
        "scaling" or "full attention", as in `what_engine_reads`; None where that is unknown.
    """
    graphs = _table()["llama.cpp"]["graphs"]
    kinds = (kind for kind in ("scaling", "full attention") if architecture in graphs[kind])
    return next(kinds, None)


def reads_latent_multiplier(architecture: str | None) -> bool:
    """Return whether llama.cpp's graph takes YaRN's attention factor into latent attention."""
    return architecture in _table()["llama.cpp"]["graphs"]["latent multiplier"]


def require_fields_are_read(target: Target, engine: str) -> None:
    """Raise unless the engine's model file for an architecture reads what an export writes."""
    reads, name = what_engine_reads(target, engine), f"{engine} {engine_version(engine)}"
    if reads is None:
        raise target.refuse(
            engine,
            f"{name} has no model of {target.model_type} that is known to read rope_theta and a "
            "scaling from what is written; use transformers with rope_patch",
        )
    if reads == "theta" and any(r.scaling != "default" for r in target.rotations.values()):
        raise target.refuse(
            engine,
            f"in {name} the model of {target.model_type} reads a theta and no scaling; use ntk or "
            "abf",
        )


def _model_types(target: Target) -> dict[str, None]:
    """Return the whole config's model type, then the decoder's."""
    return dict.fromkeys((target.config.model_type, target.model_type))
