"""Checksums of files that are read again, to detect damage and edits by hand.

A digest beside the data shows whether the data is as it was written. It detects damage and edits.
It is no signature: whoever forges results can compute a new digest.
`add_checksum` and `verify_checksum` are for `report.json`, `seal` and `unseal` for the files and
lines that a run goes on from.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rope_patch.utils.errors import parse_json

FORMAT = "rope_patch.eval/2"
_FORMAT_NAME = FORMAT.split("/")[0]


def add_checksum(results: Mapping[str, object]) -> dict[str, Any]:
    """Return the results with their format and digest.

    Args:
        results: One run's results, or those of several as `{"runs": [...]}`.

    Returns:
        A copy that is strict JSON, with `format` and `digest`, the SHA-256 of the rest in its
        canonical form: sorted keys, no spaces, infinities as strings.
    """
    body = json_safe({**results, "format": FORMAT})
    body.pop("digest", None)
    return {**body, "digest": json_digest(body)}


def verify_checksum(loaded: Any, location: str) -> dict[str, Any]:
    """Return the results of a report's JSON, if it is intact.

    Args:
        loaded: The file's text or bytes, or what `json.loads` made of it.
        location: The file's name, for errors.

    Returns:
        The results as `add_checksum` got them, infinities still as strings that `float()` reads.

    Raises:
        ValueError: Not JSON; not one of these reports; of another version of the format; or changed
            after it was written.
    """
    if isinstance(loaded, str | bytes):
        try:
            loaded = parse_json(loaded)
        except ValueError as error:
            raise ValueError(f"{location} is not JSON ({error}); expected a report.json") from error
    if not isinstance(loaded, dict) or not _is_own_report(loaded):
        actual = loaded.get("format") if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(
            f"{location} is not a report of rope-patch eval: expected format {FORMAT!r}, got "
            f"{actual!r}; give the report.json that an evaluation wrote"
        )
    if loaded.get("format") != FORMAT:
        raise ValueError(
            f"{location} has the format {loaded.get('format', 'of before formats were named')!r}, "
            f"expected {FORMAT!r}: run the evaluation again with this version of rope-patch, or "
            f"read the file with the version that wrote it"
        )
    body = require_digest(loaded, location, "restore the file or run the evaluation again")
    return {key: value for key, value in body.items() if key != "format"}


def require_digest(data: Mapping[str, Any], location: object, advice: str) -> dict[str, Any]:
    """Return data without its digest.

    Args:
        data: What a file holds.
        location: The file's name, for the error.
        advice: What to do about a changed file.

    Raises:
        ValueError: The data has another digest.
    """
    body = {key: value for key, value in data.items() if key != "digest"}
    expected = json_digest(body)
    if data.get("digest") != expected:
        raise ValueError(
            f"{location} was changed after it was written: its contents have the digest "
            f"{expected}, it says {data.get('digest')!r}; {advice}"
        )
    return body


def seal(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON gives it back, with the digest of the rest as `digest`.

    Args:
        body: The data to store, with what identifies it, such as its key.
    """
    plain = json.loads(json.dumps(body, default=str))
    return {**plain, "digest": json_digest(plain)}


def unseal(text: str | bytes, **identity: Any) -> dict[str, Any]:
    """Return sealed data without its digest, if it is intact.

    Args:
        text: The JSON of what `seal` returned: a file, or a line of one.
        **identity: Entries that must be as given.

    Raises:
        ValueError: The data is damaged, or identifies itself as other data; says which.
    """
    try:
        sealed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is damaged: it is not JSON") from error
    if not isinstance(sealed, dict) or "digest" not in sealed:
        raise ValueError("it has no digest: earlier versions wrote none")
    body = {key: value for key, value in sealed.items() if key != "digest"}
    if sealed["digest"] != json_digest(body):
        raise ValueError("it is damaged: its digest differs")
    for name, expected in identity.items():
        if body.get(name) != expected:
            raise ValueError(f"it is of another measurement: its {name} is {body.get(name)!r}")
    return body


def json_safe(value: Any) -> Any:
    """Return data with infinities, which JSON lacks, as texts that `float()`, `Number()` read."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _is_own_report(loaded: dict[str, Any]) -> bool:
    if "format" in loaded:
        return str(loaded["format"]).split("/")[0] == _FORMAT_NAME
    return {"run", "methods"} <= loaded.keys()  # reports once had no format


def json_digest(body: dict[str, Any]) -> str:
    """Return the SHA-256 of plain data in its canonical form: sorted keys, no spaces."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return digest(text)


def digest(data: str | bytes, length: int = 64) -> str:
    """Return the first `length` hexadecimal digits of the SHA-256 of data; text is UTF-8."""
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.sha256(raw).hexdigest()[:length]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()
