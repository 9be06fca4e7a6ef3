"""A folder or a GGUF file in the place of an engine, rotating as its own metadata says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rope_patch.methods.ntk_by_parts import yarn_mscale
from rope_patch.patching import patch
from rope_patch.pretrained.loading import load, read_model
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.verifying.engine import CannotVerify
from rope_patch.verifying.local_model import LocalModel

_STRETCH_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


def open_local_files(path: Path, **loading: Any) -> LocalModel:
    """Return the model of a folder, or of a GGUF file, as the engine to verify.

    A folder rotates as transformers rotates it, or as its `rope_patch.json` says. A GGUF file
    rotates as llama.cpp does without flags: transformers reads its weights alone.

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
    model = read_model(path.parent, gguf_file=path.name, **loading)
    from gguf import GGUFReader  # reading the model says how to install it

    reader = GGUFReader(str(path))
    keys = {name: field.contents() for name, field in reader.fields.items() if ".rope." in name}
    rope = {name.partition(".rope.")[2]: value for name, value in keys.items()}
    tensors = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    if stretches := sorted(tensors & set(_STRETCH_TENSORS)):
        raise CannotVerify(
            f"{path} stretches pair by pair with the tensor {stretches[0]}, expected keys alone: "
            "start llama-server with it, and verify the server's address"
        )
    kind = rope.get("scaling.type", "none")
    if kind == "none":
        return model
    if kind not in ("linear", "yarn") or "scaling.factor" not in rope:
        raise CannotVerify(
            f"{path} has rope.scaling.type {kind!r}, expected none, linear or yarn with a factor: "
            "start llama-server with it, and verify the server's address"
        )
    factor, options = float(rope["scaling.factor"]), {}
    if kind == "yarn":
        options["attention_factor"] = yarn_mscale(factor) * rope.get("scaling.attn_factor", 1.0)
    trained = rope.get("scaling.original_context_length")
    patch(model, kind, factor=factor, trained_length=trained, kernels="hf", **options)
    return model
