"""Export a model's rotation to other engines: config fields and command-line arguments.

Each engine has one file, written from what the engine's own code reads. Installed packages
add engines: a module or an object with `NAME` and `export(target)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rope_patch.exporting import axolotl
from rope_patch.exporting.encoding import export_encoding
from rope_patch.exporting.engines import (
    ENGINES,
    TRAINERS,
    require_engine,
    run_exporter,
    serving_engines,
)
from rope_patch.exporting.folder import write_folder
from rope_patch.exporting.gguf_file import PatchedFile, patch_gguf
from rope_patch.exporting.target import Export, Target
from rope_patch.utils.errors import Refused

__all__ = [
    "ENGINES",
    "TRAINERS",
    "Export",
    "PatchedFile",
    "Target",
    "engine_refusals",
    "export",
    "patch_gguf",
    "require_engine",
    "serving_engines",
    "write_folder",
]


def export(model_or_config: Any, engine: str) -> Export:
    """Return what makes another engine rotate as a model does here.

    Nothing is written and weights are not read, so a model on the meta device is enough.

    Args:
        model_or_config: A patched model; or a config or an unpatched model with a scaling of its
            own, such as one that `rope_patch.save` wrote.
        engine: One of "transformers" (5), "transformers4", "vllm", "sglang", "llama.cpp", "mlx"
            (mlx-lm) and "mlx-vlm"; of the trainers "axolotl" and "llama-factory"; or one that an
            installed package adds (entry points `rope_patch.engines`).

    Returns:
        Fields of config.json, command-line arguments, YAML, tensors and notes; print it to read it.

    Raises:
        ValueError: The engine is unknown, or has no form for the rotation; says why and what to do
            instead.
        TypeError: The argument is neither a model nor a config.
    """
    require_engine(engine)
    if (encoding := export_encoding(model_or_config, engine)) is not None:
        return encoding
    target = Target.from_model(model_or_config)
    if engine != axolotl.NAME:  # axolotl's plugin patches the model
        target.require_no_position_map(engine)
    result = run_exporter(engine, target)
    return replace(result, notes=[*target.unchanged_notes(), *result.notes, *target.yarn_notes()])


def engine_refusals(model: Any, engines: Sequence[str] = ENGINES) -> dict[str, str]:
    """Return why engines cannot run a model as it rotates here, without this package.

    Args:
        model: See `export`.
        engines: The engines to ask.

    Returns:
        The reason by engine; engines that can run it have none.
    """
    refusals = {}
    for engine in engines:
        try:
            if export(model, engine).needs_plugin:
                refusals[engine] = f"{engine} needs rope_patch's plugin for it"
        except Refused as error:
            refusals[engine] = str(error)
    return refusals
