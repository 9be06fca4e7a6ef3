"""Stretches that others found: their files as arguments for `patch`."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.searching.result.search_result import RESULT_FILE, RESULT_FORMAT, SearchResult
from rope_patch.utils.errors import parse_json

_ACCEPTED_FILES = (
    "read_factors reads .csv (or .txt) files of numbers, config.json, and what a search saved"
)


def read_factors(
    path: str | os.PathLike[str], *, short: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    r"""Reads searched stretches: `patch(model, "longrope", length=131072, **read_factors(path))`.

    - Numbers, one for each rotated pair, with commas, spaces or lines between them, as LongRoPE's
      own search writes and its published files have them; one row, or the same row for every
      layer. Such a file says no length: give `length` or `factor` to `patch`.
    - A config.json that names `longrope` (`su` in old ones), such as Phi-3's: the stretches and, if
      it says so, the factor, the trained length, the attention factor and the layer types. On a
      model that has such a config itself, patch with `start="unscaled"`.
    - The result of a search of this package, or its folder.

    Args:
        path: The file, or the folder that a config.json or a search's result is in.
        short: Another file with numbers, for sequences up to the trained length.

    Returns:
        Arguments for `rope_patch.patch(model, "longrope", ...)`.

    Raises:
        ValueError: There is no such file, or it says no stretches, or another for each layer.
    """
    path = _resolve_file(Path(path))
    if path.suffix.lower() == ".json":
        if short is not None:
            raise ValueError(f"{path} has both sets of stretches: leave short out")
        return _load_json(path)
    found: dict[str, Any] = {"long_factor": _restore_infinities(path)}
    if short is not None:
        found["short_factor"] = _restore_infinities(_resolve_file(Path(short)))
        if len(found["short_factor"]) != len(found["long_factor"]):
            raise ValueError(
                f"{short} and {path} must both have one number for each rotated pair, got "
                f"{len(found['short_factor'])} and {len(found['long_factor'])}"
            )
    return found


def _resolve_file(path: Path) -> Path:
    if path.is_dir():
        for name in (RESULT_FILE, "config.json"):
            if (path / name).is_file():
                return path / name
        raise ValueError(f"{path} holds neither {RESULT_FILE} nor config.json: {_ACCEPTED_FILES}")
    if not path.is_file():
        raise ValueError(f"there is no {path}: {_ACCEPTED_FILES}")
    return path


def _restore_infinities(path: Path) -> list[float]:
    """One number a pair: a row of them, a column, or the same row for every layer."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [
            [float(word) for word in re.split(r"[,;\s]+", line.strip(" \t,;"))]
            for line in lines
            if line.strip()
        ]
    except ValueError as error:
        raise ValueError(f"{path} is no file of numbers ({error}): {_ACCEPTED_FILES}") from error
    if not rows:
        raise ValueError(f"{path} is empty: expected one number for each rotated pair")
    if all(len(row) == 1 for row in rows):
        rows = [[row[0] for row in rows]]
    for layer, row in enumerate(rows):
        if row != rows[0]:
            raise ValueError(
                f"{path} has other stretches for layer {layer} than for layer 0 "
                f"({len(row)} and {len(rows[0])} numbers): expected one row, or the same for every "
                "layer, as a config can say no more; keep the row to use in a file of its own"
            )
    for pair, value in enumerate(rows[0]):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{path} must hold finite numbers above 0, by which wavelengths grow, got "
                f"{value:g} for pair {pair}"
            )
    return rows[0]


def _load_json(path: Path) -> dict[str, Any]:
    try:
        said = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {_ACCEPTED_FILES}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{path} holds no object: {_ACCEPTED_FILES}")
    if str(said.get("format", "")).split("/")[0] == RESULT_FORMAT.split("/")[0]:
        return SearchResult.load(path).arguments()
    text = said.get("text_config")
    return _from_config(path, text if isinstance(text, dict) else said)


def _from_config(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    spelled = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(spelled, dict):
        raise ValueError(f"{path} has no rope_scaling and no rope_parameters: {_ACCEPTED_FILES}")
    kinds = {
        kind: inner
        for kind, inner in by_layer_type(spelled).items()
        if config_rope_type(inner) in ("longrope", "su")
    }
    if len(kinds) != 1:
        scalings = ", ".join(config_rope_type(inner) for inner in by_layer_type(spelled).values())
        raise ValueError(
            f"{path} has longrope for {len(kinds)} kinds of layers (it names {scalings}): expected "
            "one"
        )
    ((kind, inner),) = kinds.items()
    missing = [name for name in ("long_factor", "short_factor") if not inner.get(name)]
    if missing:
        raise ValueError(f"{path} names longrope and has no {' and no '.join(missing)}")
    found: dict[str, Any] = {name: list(inner[name]) for name in ("long_factor", "short_factor")}
    original = inner.get("original_max_position_embeddings") or text.get(
        "original_max_position_embeddings"
    )
    full = text.get("max_position_embeddings")
    if inner.get("factor"):
        found["factor"] = float(inner["factor"])
    elif original and full:
        found["factor"] = full / original
    if original:
        found["trained_length"] = int(original)
    if (attention := _attention_factor(path, inner)) is not None:
        found["attention_factor"] = attention
    if kind is not None:
        found["layer_types"] = [kind]
    return found


def _attention_factor(path: Path, inner: dict[str, Any]) -> float | None:
    """The multiplier of cos and sin; two that differ are more than `longrope` has."""
    said = {
        float(inner[name])
        for name in ("attention_factor", "short_mscale", "long_mscale")
        if inner.get(name) is not None
    }
    if len(said) > 1:
        raise ValueError(
            f"{path} multiplies cos and sin by {' and '.join(f'{v:g}' for v in sorted(said))} for "
            "short and long sequences: expected one number for both"
        )
    return said.pop() if said else None
