"""The files beside a search's result: a config, the engines' arguments and a picture."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.utils import atomic_files
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    from rope_patch.exporting import Export
    from rope_patch.searching.result.search_result import SearchResult

CONFIG_FILE, EXPORTS_FILE, PICTURE_FILE = "config.json", "exports.json", "picture.svg"
_REFERENCE_ENGINE = "transformers"  # the one engine with both sets of stretches


def write_artifacts(result: SearchResult, folder: Path) -> None:
    """Write the files that the result and the installed packages allow; see `SearchResult.save`."""
    from rope_patch.exporting.folder import merge_config

    exports = all_exports(result)
    if exports:
        reference = exports.get(_REFERENCE_ENGINE, {})
        if "refused" not in reference:
            config = merge_config(result.config, reference["config"])
            atomic_files.atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        else:
            (folder / CONFIG_FILE).unlink(missing_ok=True)  # the file of an earlier result
        atomic_files.write_json(folder / EXPORTS_FILE, exports)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    result.plot(folder / PICTURE_FILE)


def all_exports(result: SearchResult) -> dict[str, Any]:
    """Return each engine's config and arguments, or under `refused` why it has no such rotation.

    transformers gets both sets of stretches. The other engines rotate sequences of all lengths
    alike: they get the candidate's method if they have it, else its stretches pair by pair.
    """
    from rope_patch.exporting import ENGINES

    if not result.config:
        return {}
    exports: dict[str, Any] = {}
    for engine in ENGINES:
        try:
            exports[engine] = export_for(result, engine).to_dict()
        except Refused as error:
            exports[engine] = {"engine": engine, "refused": str(error)}
    return exports


def export_for(result: SearchResult, engine: str, config: Any = None) -> Export:
    """Return the export for one engine; see `all_exports`.

    Args:
        result: The search's result.
        engine: One of `rope_patch.exporting.ENGINES`.
        config: The unpatched config of the checkpoint to serve; that of the search unless given.

    Raises:
        ValueError: The engine cannot express the rotation, or the result is not for this model.
    """
    from rope_patch.exporting import export

    config = base_config(result) if config is None else config
    arguments = result.arguments()
    if engine.startswith(_REFERENCE_ENGINE):
        return export(_patched_empty_model(result, config, "longrope", arguments), engine)
    arguments["short_factor"] = arguments["long_factor"]
    candidate = result.candidate
    exported = None
    if candidate.method != "longrope":  # a form that more engines know
        own_arguments = {"factor": result.factor, **candidate.options, **result.asked}
        with contextlib.suppress(ValueError):
            exported = export(
                _patched_empty_model(result, config, candidate.method, own_arguments), engine
            )
    if exported is None:
        exported = export(_patched_empty_model(result, config, "longrope", arguments), engine)
    exported.notes.append(
        "rotates sequences up to the trained length by the found stretches, too; rope_patch and "
        "transformers leave their frequencies as they were"
    )
    return exported


def _patched_empty_model(
    result: SearchResult, config: Any, method: str, arguments: dict[str, Any]
) -> Any:
    """Return the result's model without weights, patched.

    Raises:
        ValueError: The result is not for a model with this config.
    """
    from rope_patch.patching import patch_rotation
    from rope_patch.pretrained.loading import empty_model

    model = empty_model(result.model, copy.deepcopy(config))
    handle = patch_rotation(model, method, kernels="hf", **arguments)
    geometry = handle.geometries.get(result.layer_type)
    shapes = [(g.theta, g.rotary_dim, g.trained_length) for g in (geometry, result.geometry) if g]
    if shapes[0] != shapes[-1] or geometry is None:
        raise Refused(
            f"what was found for {result.model} is not for this model: expected theta, rotating "
            f"dimensions and trained length {shapes[-1]}, got "
            f"{shapes[0] if geometry else 'no such layer'}"
        )
    return model


def base_config(result: SearchResult) -> Any:
    """Return the unpatched config of the model that was searched.

    Raises:
        ValueError: transformers does not know the model type.
    """
    from transformers import AutoConfig

    fields = copy.deepcopy(result.config)
    try:
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except KeyError as error:
        raise Refused(f"the config of {result.model} names no model_type") from error
