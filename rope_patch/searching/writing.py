"""What is written beside a search's result: a config, words for engines, a picture."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.eval import files

if TYPE_CHECKING:
    from rope_patch.searching.found import Found

CONFIG, EXPORTS, PICTURE = "config.json", "exports.json", "picture.svg"
_OWN = "transformers"  # the engine that has both sets of stretches


def write_beside(found: Found, folder: Path) -> None:
    """Writes what can be written; see `Found.save`."""
    exports = exports_of(found)
    if exports:
        said = exports.get(_OWN, {})
        if "refused" not in said:
            config = _merged(found.config, said["config"])
            files.write(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        else:
            (folder / CONFIG).unlink(missing_ok=True)  # an earlier result's would be wrong
        files.write_json(folder / EXPORTS, exports)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    found.plot(folder / PICTURE)


def exports_of(found: Found) -> dict[str, Any]:
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
            exports[engine] = _exported(found, engine)
        except ValueError as error:
            exports[engine] = {"engine": engine, "refused": str(error)}
    return exports


def _exported(found: Found, engine: str) -> dict[str, Any]:
    from rope_patch.exporting import export

    arguments = found.arguments()
    if engine.startswith(_OWN):
        return export(_patched(found, "longrope", arguments), engine).to_dict()
    arguments["short_factor"] = arguments["long_factor"]
    candidate = found.candidate
    said = None
    if candidate.method != "longrope":  # a form that more engines know
        named = {"factor": found.factor, **candidate.options, **found.asked}
        with contextlib.suppress(ValueError):
            said = export(_patched(found, candidate.method, named), engine).to_dict()
    if said is None:
        said = export(_patched(found, "longrope", arguments), engine).to_dict()
    said["notes"].append(
        "rotates sequences up to the trained length by the found stretches, too; rope_patch and "
        "transformers leave their frequencies as they were"
    )
    return said


def _patched(found: Found, method: str, arguments: dict[str, Any]) -> Any:
    """The model without weights, patched."""
    from rope_patch.loading import empty_model
    from rope_patch.patching import patch

    model = empty_model(found.model, config_of(found))
    patch(model, method, kernels="hf", **arguments)
    return model


def config_of(found: Found) -> Any:
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


def _merged(config: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A config with other fields; those of a nested config go into it."""
    merged = dict(config)
    for name, value in new.items():
        nested = isinstance(value, dict) and name.endswith("_config")
        merged[name] = _merged(merged.get(name) or {}, value) if nested else value
    return merged
