"""LLaMA-Factory: keys of its YAML file, for a checkpoint whose config has the rotation.

Read from LLaMA-Factory 0.9.6.dev0 (ff6d4d1, model/model_utils/rope.py, model/loader.py,
hparams/): its own `rope_scaling` sets `config.rope_scaling` without `rope_theta` and a length that
is a float, on which transformers 5 fails, and a factor that it chooses itself. Without that key the
config is read as it is. No hook lets another package patch the model.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from rope_patch.exporting import transformers
from rope_patch.exporting.target import Export, Target
from rope_patch.extension import Extension

NAME = "llama-factory"
_FOLDER = "FOLDER"
_INSTEAD = (
    "train it with transformers' Trainer or TRL and rope_patch.RopePatchCallback, or with "
    "rope_patch's plugin for axolotl; or use a method whose frequencies stay, such as yarn"
)


def export(target: Target) -> Export:
    """Return the keys of LLaMA-Factory's YAML file.

    Raises:
        ValueError: No config says the rotation, or it follows the length.
    """
    target.require_config_form(NAME, _INSTEAD)
    if target.is_length_dependent:
        raise target.refuse(
            NAME,
            "its rotation follows the length of each sequence, which a config cannot say of "
            "training; " + _INSTEAD,
        )
    source = str(getattr(target.config, "_name_or_path", "") or "MODEL")
    notes = [
        "leave rope_scaling out of the YAML file: it would replace the rotation by one with "
        "another factor and without rope_theta, which fails on transformers 5",
        "needs transformers 5 there (LLaMA-Factory 0.9.6.dev0 takes 4.55 to 5.8): transformers 4 "
        "ignores rope_parameters",
    ]
    folder = source
    if target.extension is not None:
        folder = _FOLDER
        command = _patch_command(source, target.extension)
        notes.insert(0, f"write {_FOLDER} first, which links the weights: {command}")
    return Export(
        engine=NAME,
        config=transformers.export(target).config,
        yaml={"model_name_or_path": folder, "cutoff_len": target.length},
        notes=notes,
    )


def _patch_command(source: str, extension: Extension) -> str:
    """Return the command line that writes a checkpoint with a patch in its config."""
    arguments: dict[str, Any] = extension.arguments()
    arguments.pop("kernels", None)
    words = ["rope-patch", "patch", source, "--method", extension.method]
    for name in ("factor", "length", "trained_length", "start"):
        if (value := arguments.pop(name, None)) is not None:
            text = f"{value!r}" if isinstance(value, float) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    if arguments.pop("anyway", False):
        words.append("--anyway")
    if layer_types := arguments.pop("layer_types", None):
        words += ["--layer-types", ",".join(layer_types)]
    for name, value in arguments.items():
        if value is not None:
            words += ["--option", f"{name}={json.dumps(value)}"]
    return shlex.join([*words, "--to", _FOLDER])
