"""A folder or a GGUF file in the place of an engine, rotating as its own metadata says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rope_patch.exporting.engine_fields import engine_version, what_graph_reads
from rope_patch.pretrained.gguf_rotation import GgufRotationError
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.verifying.engine import CannotVerify
from rope_patch.verifying.local_model import LocalModel


def open_local_files(path: Path, **loading: Any) -> LocalModel:
    """Return the model of a folder, or of a GGUF file, as the engine to verify.

    A folder rotates as transformers rotates it, or as its `rope_patch.json` says. A GGUF file
    rotates as llama.cpp does without flags.

    Args:
        path: The folder or file.
        **loading: Arguments of `rope_patch.load`.

    Raises:
        CannotVerify: transformers cannot read the weights, or the rotation of the file.
        ValueError: The model is damaged.
    """
    if path.is_file():
        return LocalModel(_read_gguf(path, loading), f"{path} (GGUF)")
    _require_readable(path)
    read = read_model if patch_to_restore(path) is None else load
    return LocalModel(read(path, **loading), str(path))


def _require_readable(path: Path) -> None:
    """Raise if mlx-lm quantised the weights of a folder."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return  # loading explains it
    packed = config.get("quantization") if isinstance(config, dict) else None
    if isinstance(packed, dict) and "bits" in packed:
        raise CannotVerify(
            f"{path} holds weights of {packed['bits']} bits by mlx-lm, expected weights that "
            "transformers reads: verify a copy that `mlx_lm.convert --dequantize` wrote"
        )


def _read_gguf(path: Path, loading: dict[str, Any]) -> Any:
    """Return the model of a GGUF file, with the rotation that its keys name."""
    if path.suffix != ".gguf":
        raise CannotVerify(
            f"{path} is a file, expected a .gguf file, a folder, or an engine's address such as "
            "http://localhost:8000"
        )
    try:
        model = read_model(path.parent, gguf_file=path.name, **loading)
    except GgufRotationError as error:
        raise CannotVerify(str(error)) from error
    if getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        _require_known_graph(path)
    return model


def _require_known_graph(path: Path) -> None:
    """Raise unless llama.cpp rotates every query and key by what a GGUF file says."""
    from gguf import GGUFReader

    architecture = str(GGUFReader(str(path)).fields["general.architecture"].contents())
    if what_graph_reads(architecture) is None:
        raise CannotVerify(
            f"{path} is of the architecture {architecture!r}, which llama.cpp "
            f"{engine_version('llama.cpp')} is not known to rotate by what its files say, so this "
            "model in transformers would stand for another: verify the server that runs the file, "
            "by its address"
        )
