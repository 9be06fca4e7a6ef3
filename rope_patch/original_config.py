"""The config of a checkpoint before the patch that `save` wrote into its config.json.

A saved config.json has the extended rotation. The field `rope_patch` beside it holds what the
config said before, so that a model that plain transformers loaded from the folder is extended from
the length that it was trained on. transformers keeps the field and ignores it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rope_patch.utils.errors import Refused

FIELD = "rope_patch"
_NAMES = ("max_position_embeddings", "rope_parameters")


def original_field(original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `FIELD` for a saved config.

    Args:
        original: `max_position_embeddings` and `rope_parameters` before the patch.
    """
    return {"original": dict(original)}


def original_config(config: Any) -> Any:
    """Return a text config as it was before the patch that it was saved with.

    Args:
        config: A decoder's config.

    Returns:
        A corrected copy; the config itself if it was not saved with a patch.

    Raises:
        ValueError: The field is damaged.
    """
    field = getattr(config, FIELD, None)
    if field is None:
        return config
    original = field.get("original") if isinstance(field, dict) else None
    if not isinstance(original, dict) or not set(_NAMES) <= original.keys():
        raise Refused(
            f"the config's {FIELD} must hold the original {' and '.join(_NAMES)}, got "
            f"{field!r:.60}: save the model again, or take the field out"
        )
    corrected = copy.deepcopy(config)
    for name in _NAMES:
        setattr(corrected, name, copy.deepcopy(original[name]))
    delattr(corrected, FIELD)
    return corrected


def is_saved_patch(config: Any) -> bool:
    """Return whether a text config was saved with a patch."""
    return getattr(config, FIELD, None) is not None
