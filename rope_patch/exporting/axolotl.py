"""axolotl: keys of its YAML file, and its plugin for what no config says.

Read from axolotl 0.18.0 (loaders/utils.py, loaders/model.py, integrations/base.py), which runs on
transformers 5.14: it sets each key of `overrides_of_model_config` on the config before the model is
built, so the whole `rope_parameters` with `rope_theta` must be there. A nested config would lose
all its other fields that way. Plugins may patch the model once it is built, before LoRA.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rope_patch.exporting import transformers
from rope_patch.exporting.target import Export, Target
from rope_patch.utils.errors import Refused

NAME = "axolotl"
PLUGIN = "rope_patch.integrations.axolotl_plugin.RopePatchPlugin"
# sequence_len over the trained length, for a dynamic method without a target length.
_DEFAULT_FACTOR = 4


def export(target: Target) -> Export:
    """Return the keys of axolotl's YAML file.

    Raises:
        ValueError: The rotation is a config's own that a nested config holds.
    """
    source = str(getattr(target.config, "_name_or_path", "") or "MODEL")
    if target.extension is None:  # the checkpoint's config says it
        return Export(
            engine=NAME,
            yaml={"base_model": source, "sequence_len": target.length},
            notes=["the checkpoint's own config.json has the rotation: override nothing"],
        )
    try:
        target.require_static(NAME)
        target.require_no_position_map(NAME)
        config = transformers.export(target).config
    except Refused as refusal:
        return _plugin(target, source, f"{refusal}; the plugin can")
    if target.text is not target.config:
        return _plugin(
            target, source, "its config is nested, and an override would drop its other fields"
        )
    return Export(
        engine=NAME,
        config=config,
        yaml={
            "base_model": source,
            "overrides_of_model_config": json.loads(json.dumps(config)),
            "sequence_len": target.length,
        },
        notes=[
            "written from axolotl 0.18.0, on transformers 5: the saved model's config.json has "
            "the rotation",
            f"for an adapter add `plugins: [{PLUGIN}]` and a rope_patch key instead of the "
            "override (docs/trainers.md): PEFT's own files say nothing of the rotation",
        ],
    )


def _plugin(target: Target, source: str, reason: str) -> Export:
    """Return the keys with which the plugin patches the model."""
    assert target.extension is not None
    # The kernels are for the machine that trains.
    extension = replace(target.extension, kernels="auto")
    request: dict[str, Any] = {"method": extension.method, **extension.arguments()}
    length, notes = target.length, [reason]
    trained = next(iter(target.geometries.values())).trained_length
    if length <= trained:
        length = _DEFAULT_FACTOR * trained
        notes.append(f"no length was named: sequence_len is {_DEFAULT_FACTOR} times the trained")
    return Export(
        engine=NAME,
        yaml={
            "base_model": source,
            "plugins": [PLUGIN],
            "rope_patch": json.loads(json.dumps(request)),
            "sequence_len": length,
        },
        notes=[
            *notes,
            "needs rope_patch in axolotl's environment; load the result with rope_patch.load",
        ],
        needs_plugin=True,
    )
