"""A model's folder: checks of its files before transformers reads them."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rope_patch.utils.errors import parse_json


def require_model_folder(path: str | os.PathLike[str], gguf_file: str | None) -> None:
    """Raise if a path looks like a folder but holds no model."""
    folder = Path(path)
    if not folder.exists():
        if folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
            raise ValueError(f"no such folder: {path}")
        return
    if not folder.is_dir():
        raise ValueError(
            f"{path} is a file: expected the folder it is in"
            + (f", with gguf_file={folder.name!r}" if folder.suffix == ".gguf" else "")
        )
    required = gguf_file or "config.json"
    if not (folder / required).is_file():
        names = sorted(p.name for p in folder.iterdir())[:5]
        raise ValueError(
            f"{path} holds no {required}: expected a model's folder, found "
            f"{', '.join(names) or 'nothing'}"
        )


def require_complete_shards(folder: Path) -> None:
    """Raise if a folder's safetensors are missing or cut short, before anything is read."""
    if not folder.is_dir():
        return
    index = folder / "model.safetensors.index.json"
    shards = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
    if not shards and index.is_file():
        try:
            names = sorted(set(parse_json(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged ({error}); download it again") from error
        shards = [folder / name for name in names]
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ValueError(
                f"{folder} is incomplete: {len(missing)} of {len(shards)} shards are missing "
                f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); download them "
                "again"
            )
    for shard in shards:
        try:
            with safe_open(shard, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{shard} is cut short or damaged ({error}); download it again"
            ) from error


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has any file of a tokenizer; True if it is no folder."""
    folder = Path(path)
    return not folder.is_dir() or any(
        "token" in p.name or p.name.startswith(("vocab", "spiece")) or p.suffix == ".model"
        for p in folder.iterdir()
    )
