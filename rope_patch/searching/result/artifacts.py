"""What is written beside a search's result: a config, words for engines, a picture."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.utils import atomic_files

if TYPE_CHECKING:
    from rope_patch.exporting import Export
    from rope_patch.searching.result.search_result import SearchResult

CONFIG_FILE, EXPORTS_FILE, PICTURE_FILE = "config.json", "exports.json", "picture.svg"
_REFERENCE_ENGINE = "transformers"  # the engine that has both sets of stretches


def write_artifacts(found: SearchResult, folder: Path) -> None:
    """Writes what can be written; see `SearchResult.save`."""
    from rope_patch.exporting.folder import merge_config

    exports = all_exports(found)
    if exports:
        said = exports.get(_REFERENCE_ENGINE, {})
        if "refused" not in said:
            config = merge_config(found.config, said["config"])
            atomic_files.atomic_write(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        else:
            (folder / CONFIG_FILE).unlink(missing_ok=True)  # an earlier result's would be wrong
        atomic_files.write_json(folder / EXPORTS_FILE, exports)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    found.plot(folder / PICTURE_FILE)


def all_exports(found: SearchResult) -> dict[str, Any]:
    """What each engine is to be given, by name, or under `refused` why it cannot rotate so.

    transformers gets both sets of stretches. The others rotate all sequences alike, whatever their
    length: they get the method that was found, or else its stretches pair by pair, for all of them.
    """
    from rope_patch.exporting import ENGINES

    if not found.config:
        return {}
    exports: dict[str, Any] = {}
    for engine in ENGINES:
        try:
            exports[engine] = export_for(found, engine).to_dict()
        except ValueError as error:
            exports[engine] = {"engine": engine, "refused": str(error)}
    return exports


def export_for(result: SearchResult, engine: str, config: Any = None) -> Export:
    """What one engine is to be given; see `all_exports`.

    Args:
        result: The search's result.
        engine: One of `rope_patch.exporting.ENGINES`.
        config: Of the checkpoint that it is for, without a patch; else of the one that was
            searched.

    Raises:
        ValueError: The engine has no form for it, or the result is not for this model.
    """
    from rope_patch.exporting import export

    config = base_config(result) if config is None else config
    arguments = result.arguments()
    if engine.startswith(_REFERENCE_ENGINE):
        return export(_patched_empty_model(result, config, "longrope", arguments), engine)
    arguments["short_factor"] = arguments["long_factor"]
    candidate = result.candidate
    said = None
    if candidate.method != "longrope":  # a form that more engines know
        named = {"factor": result.factor, **candidate.options, **result.asked}
        with contextlib.suppress(ValueError):
            said = export(_patched_empty_model(result, config, candidate.method, named), engine)
    if said is None:
        said = export(_patched_empty_model(result, config, "longrope", arguments), engine)
    said.notes.append(
        "rotates sequences up to the trained length by the found stretches, too; rope_patch and "
        "transformers leave their frequencies as they were"
    )
    return said


def _patched_empty_model(
    found: SearchResult, config: Any, method: str, arguments: dict[str, Any]
) -> Any:
    """The model without weights, patched."""
    from rope_patch.patching import patch
    from rope_patch.pretrained.loading import empty_model

    model = empty_model(found.model, copy.deepcopy(config))
    handle = patch(model, method, kernels="hf", **arguments)
    here = handle.geometries.get(found.layer_type)
    told = [(g.theta, g.rotary_dim, g.trained_length) for g in (here, found.geometry) if g]
    if told[0] != told[-1] or here is None:
        raise ValueError(
            f"what was found for {found.model} is not for this model: expected theta, rotating "
            f"dimensions and trained length {told[-1]}, got {told[0] if here else 'no such layer'}"
        )
    return model


def base_config(found: SearchResult) -> Any:
    """The model's config, as it was.

    Raises:
        ValueError: It is of a kind that transformers does not know.
    """
    from transformers import AutoConfig

    said = copy.deepcopy(found.config)
    try:
        return AutoConfig.for_model(said.pop("model_type"), **said)
    except KeyError as error:
        raise ValueError(f"the config of {found.model} names no model_type") from error
