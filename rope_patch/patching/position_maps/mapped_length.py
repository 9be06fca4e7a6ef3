"""The length that a position map is planned for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.yarn import YaRN
from rope_patch.rope_config import config_rope_type
from rope_patch.utils.errors import Refused


def mapped_length(
    position_map: PositionMap,
    requested: int | None,
    geometries: Mapping[str | None, Geometry],
    own_parameters: Mapping[str | None, dict[str, Any]],
) -> int | None:
    """Return the length that a position map is planned for; None if it serves any.

    Args:
        position_map: The map.
        requested: The request's length in tokens, if it names one.
        geometries: The rotations that it starts from, all of one length.
        own_parameters: The config's `rope_parameters` of each layer type.

    Raises:
        ValueError: The map's positions do not stay within those that the frequencies reach, or it
            would put a YaRN on the config's own.
    """
    for layer_type, geometry in geometries.items():
        is_scaled = geometry.base and config_rope_type(own_parameters[layer_type]) == "yarn"
        if is_scaled and isinstance(position_map.inner, YaRN):
            raise Refused(
                f"the config has a yarn of its own, and on={position_map.on!r} would put another "
                "one on it: leave `on` out, which maps positions on the config's yarn, or replace "
                "that with start='unscaled'"
            )
    reach = position_map.reach(next(iter(geometries.values())).trained_length)
    longest = position_map.longest_text(reach)
    if requested is not None and requested > longest:
        raise Refused(
            f"{position_map} stays within the {reach:,} positions that its frequencies reach for "
            f"texts of up to {math.floor(longest):,} tokens, and the request is for "
            f"{requested:,}: expected a shorter length, larger groups, or frequencies that reach "
            "further (on='yarn:4')"
        )
    if requested is None and not math.isinf(longest):
        return math.floor(longest)
    return requested
