"""Published stretches: their files as arguments for `patch`."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.searching.search_result import RESULT_FILE, RESULT_FORMAT, SearchResult
from rope_patch.utils.errors import parse_json

_ACCEPTED_FILES = (
    "read_factors reads .csv (or .txt) files of numbers, config.json, and what a search saved"
)


def read_factors(
    path: str | os.PathLike[str], *, short: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    r"""Read searched stretches: `patch(model, "longrope", length=131072, **read_factors(path))`.

    The file is one of these:

    - Numbers, one for each rotated pair, separated by commas, spaces or line breaks, as in the
      files of LongRoPE's own search; one row, or the same row for each layer. Such a file has no
      length: give `length` or `factor` to `patch`.
    - A config.json with `longrope` (`su` in old ones), such as Phi-3's: the stretches and, if
      present, the factor, the trained length, the attention factor and the layer types. To patch a
      model with such a config of its own, use `start="unscaled"`.
    - The result of a search of this package, or its folder.

    Args:
        path: The file, or the folder with a config.json or a search's result.
        short: Another file with numbers, for sequences up to the trained length.

    Returns:
        Arguments for `rope_patch.patch(model, "longrope", ...)`.

    Raises:
        ValueError: There is no such file, or it has no stretches, or different ones by layer.
    """
    path = _resolve_file(Path(path))
    if path.suffix.lower() == ".json":
        if short is not None:
            raise ValueError(f"{path} has both sets of stretches: leave short out")
        return _load_json(path)
    arguments: dict[str, Any] = {"long_factor": _read_numbers(path)}
    if short is not None:
        arguments["short_factor"] = _read_numbers(_resolve_file(Path(short)))
        if len(arguments["short_factor"]) != len(arguments["long_factor"]):
            raise ValueError(
                f"{short} and {path} must both have one number for each rotated pair, got "
                f"{len(arguments['short_factor'])} and {len(arguments['long_factor'])}"
            )
    return arguments


def _resolve_file(path: Path) -> Path:
    if path.is_dir():
        for name in (RESULT_FILE, "config.json"):
            if (path / name).is_file():
                return path / name
        raise ValueError(f"{path} holds neither {RESULT_FILE} nor config.json: {_ACCEPTED_FILES}")
    if not path.is_file():
        raise ValueError(f"there is no {path}: {_ACCEPTED_FILES}")
    return path


def _read_numbers(path: Path) -> list[float]:
    """Return one number a pair from a row, a column, or the same row for each layer."""
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
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): {_ACCEPTED_FILES}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no object: {_ACCEPTED_FILES}")
    if str(data.get("format", "")).split("/")[0] == RESULT_FORMAT.split("/")[0]:
        return SearchResult.load(path).arguments()
    text_config = data.get("text_config")
    return _from_config(path, text_config if isinstance(text_config, dict) else data)


def _from_config(path: Path, text_config: dict[str, Any]) -> dict[str, Any]:
    rope_fields = text_config.get("rope_scaling") or text_config.get("rope_parameters")
    if not isinstance(rope_fields, dict):
        raise ValueError(f"{path} has no rope_scaling and no rope_parameters: {_ACCEPTED_FILES}")
    scalings = {
        layer_type: inner
        for layer_type, inner in by_layer_type(rope_fields).items()
        if config_rope_type(inner) in ("longrope", "su")
    }
    if len(scalings) != 1:
        names = ", ".join(config_rope_type(inner) for inner in by_layer_type(rope_fields).values())
        raise ValueError(
            f"{path} has longrope for {len(scalings)} kinds of layers (it names {names}): expected "
            "one"
        )
    ((layer_type, inner),) = scalings.items()
    missing = [name for name in ("long_factor", "short_factor") if not inner.get(name)]
    if missing:
        raise ValueError(f"{path} names longrope and has no {' and no '.join(missing)}")
    arguments: dict[str, Any] = {
        name: list(inner[name]) for name in ("long_factor", "short_factor")
    }
    original = inner.get("original_max_position_embeddings") or text_config.get(
        "original_max_position_embeddings"
    )
    full = text_config.get("max_position_embeddings")
    if inner.get("factor"):
        arguments["factor"] = float(inner["factor"])
    elif original and full:
        arguments["factor"] = full / original
    if original:
        arguments["trained_length"] = int(original)
    if (attention_factor := _attention_factor(path, inner)) is not None:
        arguments["attention_factor"] = attention_factor
    if layer_type is not None:
        arguments["layer_types"] = [layer_type]
    return arguments


def _attention_factor(path: Path, scaling: dict[str, Any]) -> float | None:
    """Return the multiplier of cos and sin, if any."""
    factors = {
        float(scaling[name])
        for name in ("attention_factor", "short_mscale", "long_mscale")
        if scaling.get(name) is not None
    }
    # `longrope` cannot express different ones for short and long sequences.
    if len(factors) > 1:
        raise ValueError(
            f"{path} multiplies cos and sin by {' and '.join(f'{v:g}' for v in sorted(factors))} "
            "for short and long sequences: expected one number for both"
        )
    return factors.pop() if factors else None
