"""The results of a run while they grow: `bench.json`, from which a killed run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rope_patch.utils.atomic_files import add_write_advice, atomic_write
from rope_patch.utils.checksums import json_safe
from rope_patch.utils.errors import one_line

FILE = "bench.json"
_LISTS = ("cases", "kept", "steps", "launches")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as `json_safe` writes them
_MAX_VALUE = 100  # characters of a value in an error


def part_key(kind: str, row: dict[str, Any]) -> str:
    """Return the name of a part of the run from its result, or from what determines it.

    Args:
        kind: "cases", "kept", "steps" or "launches".
        row: A case; or a dict with the shape's name as "shape" or "model".
    """
    if kind == "cases":
        tokens = "1 token" if row["length"] == 1 else f"{row['length']:,} tokens"
        return f"{row['shape']}, {tokens} × {row['batch']}, {row['layout']}"
    return f"{row.get('shape', row.get('model'))}, {kind}"


class RunState:
    """The results so far, on the disk after each part.

    Args:
        folder: Folder of `bench.json`; None keeps results in memory.
        header: What the results say beside their parts. `identity` of a run that continues must be
            the same: a dict of plain data.
        keys: Names of all parts, in order, with their kinds.

    Raises:
        ValueError: The folder has results of other options or of another machine.
    """

    def __init__(self, folder: Path | None, header: dict[str, Any], keys: dict[str, str]) -> None:
        self._folder, self._header, self._keys = folder, header, keys
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._seconds: dict[str, float] = {}
        stored = None if folder is None else read_results(folder)
        if stored is not None:
            assert folder is not None
            _require_same(folder / FILE, stored.get("identity"), header["identity"])
            self._header = header | {"date": stored["date"]}
            self._load(stored)

    def is_done(self, key: str) -> bool:
        """Return whether a part is measured; one that failed as a whole is tried again."""
        rows = self._rows.get(key, [])
        return bool(rows) and not any("not_measured" in row for row in rows)

    def add(self, key: str, rows: list[dict[str, Any]], seconds: float) -> None:
        """Add a part, and write all results so far.

        Args:
            key: Its name, see `part_key`.
            rows: Its results.
            seconds: How long it took.
        """
        self._rows[key], self._seconds[key] = rows, seconds
        if self._folder is not None:
            with add_write_advice("REMEDY, and the same command continues from here"):
                atomic_write(self._folder / FILE, as_json(self.results()))

    def results(self) -> dict[str, Any]:
        """Return the results so far; `missing` names the parts that are not measured yet."""
        lists: dict[str, Any] = {kind: [] for kind in _LISTS}
        for key, kind in self._keys.items():
            lists[kind] += self._rows.get(key, [])
        missing = [key for key in self._keys if key not in self._rows]
        return {**self._header, **lists, "seconds": self._seconds, "missing": missing}

    def _load(self, stored: dict[str, Any]) -> None:
        for kind in _LISTS:
            for row in stored[kind]:
                self._rows.setdefault(part_key(kind, row), []).append(row)
        self._seconds = stored["seconds"]


def as_json(results: dict[str, Any]) -> str:
    """Return the results as strict JSON."""
    return json.dumps(json_safe(results), indent=1, ensure_ascii=False) + "\n"


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return the results in a folder; None if there are none.

    Raises:
        ValueError: The file is not JSON.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"it is a {type(stored).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: expected the results of a run, got {one_line(str(error))}; remove "
            "it to start again, or give another --out"
        ) from error
    return _revive(stored)


def require_results(folder: Path) -> dict[str, Any]:
    """Return the results in a folder.

    Raises:
        ValueError: There are none of this version.
    """
    results = read_results(folder)
    if results is None:
        raise ValueError(f"expected results in {folder / FILE}, got none: run the bench with --out")
    if "identity" not in results:
        raise ValueError(
            f"{folder / FILE} was written by another version: expected results of this one; run "
            "the bench again"
        )
    return results


def _require_same(path: Path, stored: Any, wanted: dict[str, Any]) -> None:
    """Raise ValueError unless a stored run may go on with these options on this machine."""
    remedy = "continue with the same, give another --out, or remove the file to start again"
    if not isinstance(stored, dict):
        raise ValueError(
            f"{path} was written by another version, which recorded no options: expected results "
            "that this command began; give another --out, or remove the file to start again"
        )
    wanted = json.loads(json.dumps(wanted))
    differences = [
        f"{name} {_show(stored.get(name))}, got {_show(wanted.get(name))}"
        for name in stored | wanted
        if stored.get(name) != wanted.get(name)
    ]
    if differences:
        raise ValueError(f"{path} is of another run: expected {'; '.join(differences)}: {remedy}")


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return one_line(str(value))[:_MAX_VALUE]


def _revive(value: Any) -> Any:
    """Return data of strict JSON with the floats that JSON lacks."""
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return float(value) if value in _NOT_FINITE and isinstance(value, str) else value
