"""The config that an extension of a saved model starts from, by the record in its config.json.

A saved config.json has the extended rotation. The field `rope_patch` beside it records two facts:
what the config said before the patch (`original`), and whether the weights were trained under the
patch since (`trained`). transformers keeps the field and ignores it. So a model that plain
transformers loaded from the folder is extended from the rotation that its weights know:

- `trained` is false: from the original one.
- `trained` is a rotation: from that one, at its length.
- `trained` has no rotation, because no config expresses the method's: a request must say more.
- no `trained`, in folders of earlier releases: unknown, so a request must say which it is.

`original` has a field `rope_patch` of its own where the rotation before the patch was trained so.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rope_patch.utils.errors import Refused

FIELD = "rope_patch"
ORIGINAL, TRAINED = "original", "trained"
_LENGTH, _PARAMETERS = "max_position_embeddings", "rope_parameters"
_NAMES = (_LENGTH, _PARAMETERS)
# In memory alone: the lengths before and under a patch of which no record says whether it was
# trained. `require_known_start` raises for them.
_UNKNOWN = "unknown"


def saved_field(original: Mapping[str, Any], trained: dict[str, Any] | bool) -> dict[str, Any]:
    """Return the value of `FIELD` for a patched model's config.

    Args:
        original: `max_position_embeddings` and `rope_parameters` before the patch, with `FIELD` if
            the rotation before the patch was trained so.
        trained: The trained rotation (`trained_rotation`); False if nothing was trained.
    """
    return {ORIGINAL: dict(original), TRAINED: trained}


def trained_rotation(
    length: int | None, parameters: Mapping[str, Any] | None, **request: Any
) -> dict[str, Any]:
    """Return the record of a rotation that weights were trained under.

    Args:
        length: The length that it was trained for, in tokens; None if the method follows any.
        parameters: `rope_parameters` that express it; None if none do.
        **request: Its `method`, `factor` and `options`, where none do.
    """
    return {_LENGTH: length, _PARAMETERS: parameters, **request}


def original_config(config: Any, start: str = "auto", trained_length: int | None = None) -> Any:
    """Return the text config that an extension starts from.

    Args:
        config: A decoder's config, as it was saved.
        start: See `rope_patch.patch`. "unscaled" takes the config before all recorded patches.
        trained_length: See `rope_patch.patch`. It selects the recorded rotation of that length.

    Returns:
        A corrected copy; the config itself if nothing is to be corrected. The copy keeps `FIELD`
        if its rotation was trained under a patch.

    Raises:
        ValueError: The field is damaged.
    """
    field = getattr(config, FIELD, None)
    if field is None or (isinstance(field, Mapping) and _UNKNOWN in field):
        return config
    present = {name: getattr(config, name) for name in _NAMES}
    values = original_fields(present, field, start, trained_length)
    new_field = values.pop(FIELD, None)
    if new_field == field and all(_states(present[name], values[name]) for name in _NAMES):
        return config
    corrected = copy.deepcopy(config)
    for name in _NAMES:
        setattr(corrected, name, copy.deepcopy(values[name]))
    if new_field is None:
        delattr(corrected, FIELD)
    else:
        setattr(corrected, FIELD, copy.deepcopy(new_field))
    return corrected


def original_fields(
    present: Mapping[str, Any],
    field: Mapping[str, Any],
    start: str = "auto",
    trained_length: int | None = None,
) -> dict[str, Any]:
    """Return the fields of a config that an extension starts from; see `original_config`.

    Args:
        present: `max_position_embeddings` and `rope_parameters` of the saved config.
        field: Its `FIELD`.
        start: As in `original_config`.
        trained_length: As in `original_config`.

    Returns:
        Both, and `FIELD` if the rotation was trained under a patch.

    Raises:
        ValueError: The field is damaged.
    """
    before = _original(field)
    trained = field.get(TRAINED)
    if isinstance(trained, Mapping) and not set(_NAMES) <= trained.keys():
        raise _damaged(field, TRAINED)
    under = trained if isinstance(trained, Mapping) else present
    has_form = under[_PARAMETERS] is not None
    as_trained = {name: under[name] for name in _NAMES} | {FIELD: dict(field)}
    if not isinstance(trained, Mapping):  # whoever asks for it says that it was trained
        as_trained[FIELD] = saved_field(
            before, trained_rotation(under[_LENGTH], under[_PARAMETERS])
        )
    as_before = {name: before[name] for name in _NAMES}
    if FIELD in before:
        as_before = original_fields(as_before, before[FIELD], start, trained_length)
    if start == "unscaled":
        return as_before
    if trained_length is not None:
        matches = [as_trained] if has_form else []
        # Requests that a sidecar records count from the original.
        matches = [*matches, as_before] if isinstance(trained, Mapping) else [as_before, *matches]
        for values in matches:
            if values[_LENGTH] == trained_length:
                return values
    if isinstance(trained, Mapping):
        if has_form:
            return as_trained
        return as_before if start == "running" else {**as_before, FIELD: dict(field)}
    if TRAINED in field:
        return as_before
    if start == "running":
        return as_trained
    return {**as_before, FIELD: {_UNKNOWN: [as_before[_LENGTH], present[_LENGTH]]}}


def trained_record(config: Any) -> dict[str, Any] | None:
    """Return the record of the rotation that a config's weights were trained under, if it has one.

    Args:
        config: A text config that `original_config` returned.
    """
    field = getattr(config, FIELD, None)
    trained = field.get(TRAINED) if isinstance(field, Mapping) else None
    return trained if isinstance(trained, dict) else None


def trained_config_length(config: Any) -> int | None:
    """Return the length of the rotation that a config states, if weights were trained under it.

    Args:
        config: A text config that `original_config` returned.
    """
    record = trained_record(config)
    return None if record is None or record[_PARAMETERS] is None else record[_LENGTH]


def require_known_start(config: Any, start: str) -> None:
    """Raise if nothing says whether a saved model was trained under its patch.

    Args:
        config: A text config that `original_config` returned.
        start: See `rope_patch.patch`.

    Raises:
        ValueError: Nothing does. The message names both lengths.
    """
    field = getattr(config, FIELD, None)
    if start == "unscaled" or not isinstance(field, Mapping) or _UNKNOWN not in field:
        return
    before, under = field[_UNKNOWN]
    raise Refused(
        f"the model was saved with a patch, {before:,} → {under:,} tokens, by an earlier "
        "rope_patch, and nothing says whether it was trained under that patch: pass "
        f"trained_length={under} if it was, or trained_length={before} if it was not"
    )


def is_saved_patch(config: Any) -> bool:
    """Return whether a text config was saved with a patch."""
    return getattr(config, FIELD, None) is not None


def _original(field: Any) -> dict[str, Any]:
    original = field.get(ORIGINAL) if isinstance(field, Mapping) else None
    if not isinstance(original, dict) or not set(_NAMES) <= original.keys():
        raise _damaged(field, ORIGINAL)
    return original


def _damaged(field: Any, part: str) -> Refused:
    return Refused(
        f"the config's {FIELD} must hold the {part} {' and '.join(_NAMES)}, got "
        f"{field!r:.60}: save the model again, or take the field out"
    )


def _states(present: Any, recorded: Any) -> bool:
    """Return whether a value of a config is a recorded one, to which transformers may add keys."""
    if isinstance(present, Mapping) and isinstance(recorded, Mapping):
        return all(
            key in present and _states(present[key], value) for key, value in recorded.items()
        )
    return bool(present == recorded)
