"""Compare queries and keys at mapped positions, in the place of a model's attention function.

`parts` has the ways to compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching.architecture.attention_source import rotated_layer_types
from rope_patch.patching.architecture.mla_scale import find_mla_attentions
from rope_patch.patching.architecture.rotary_traits import KeyLayout, RotaryTraits
from rope_patch.patching.attention_interception import (
    QueryScaling,
    find_attentions,
    intercept,
    layer_index,
    present_function,
)
from rope_patch.patching.position_maps.forward_view import Visibility
from rope_patch.patching.position_maps.parts import attend
from rope_patch.patching.position_maps.position_hooks import PositionHooks
from rope_patch.patching.position_maps.shift_tables import ShiftRotation
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.attention_functions import (
    StandIn,
    read_call,
    require_known_attention,
)
from rope_patch.transformers_api.forwards import POSITIONS
from rope_patch.utils.errors import Refused

_OTHER_METHODS = "use a method that changes frequencies, such as yarn"
_STAND_IN = StandIn("a position map", _OTHER_METHODS)


class MappedAttention:
    """What stands in for the attention function of one layer type of a decoder.

    Attributes:
        hooks: The decoder's hooks, which know the positions.
        rotation: The layer type's rotation.
    """

    def __init__(self, hooks: PositionHooks, rotation: ShiftRotation) -> None:
        # Imported for maps alone, because the module registers operators.
        from rope_patch.patching.position_maps.graph_operator import write_settings

        self.hooks = hooks
        self.rotation = rotation
        self._settings = write_settings(hooks.position_map, hooks.reach, rotation)

    @property
    def breaks_graphs(self) -> bool:
        """Return whether the forward has a cache, whose record of positions is Python's."""
        return self.hooks.graph_positions is None

    def attend(
        self,
        function: Any,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return what the attention function returns, at mapped positions.

        Where no query meets a key at another distance than its own, the function itself is called.
        So it is where the layer has a window, beyond which it sees no keys. Elsewhere all that the
        function does with its arguments is done here, or refused (`read_call`).
        """
        positions = self.hooks.graph_positions
        if torch.compiler.is_compiling() and positions is not None:
            return self._attend_in_graph(
                function, module, positions, query, key, value, attention_mask, *args, **kwargs
            )
        view = self.hooks.view_of(query, kwargs.get(POSITIONS))
        if not view.is_mapped or kwargs.get("sliding_window") is not None:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        _require_known(module, args, key, view.keys)
        call = read_call(
            function,
            module,
            query,
            key,
            attention_mask,
            kwargs,
            filled=view.filled,
            stand_in=_STAND_IN,
        )
        visibility = Visibility(call, query, key)
        output, weights = attend(view, self.rotation, query, key, value, visibility)
        return output.transpose(1, 2).contiguous(), weights

    def _attend_in_graph(
        self,
        function: Any,
        module: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do `attend` as one operator of a compiled graph."""
        from rope_patch.patching.position_maps.graph_operator import attend_in_graph

        if kwargs.get("sliding_window") is not None:
            return function(module, query, key, value, mask, *args, **kwargs)
        _require_known(module, args, key, positions)
        filled = positions.shape[1]
        call = read_call(
            function, module, query, key, mask, kwargs, filled=filled, stand_in=_STAND_IN
        )
        return attend_in_graph(self._settings, call, positions, query, key, value)


def _require_known(
    module: nn.Module, args: tuple[Any, ...], key: torch.Tensor, positions: torch.Tensor
) -> None:
    """Raise if an attention passes what a map cannot read, or keys whose positions are unknown."""
    name = type(module).__name__
    if args:
        raise Refused(
            f"{name} passes arguments by position to its attention function, expected names: "
            f"{_OTHER_METHODS}"
        )
    if key.shape[2] != positions.shape[1]:
        raise Refused(
            f"{name} compares with {key.shape[2]} keys, and {positions.shape[1]} positions are "
            "known: a position map needs the position of every key"
        )


Site = tuple[RotaryTraits, list[tuple[nn.Module, str | None]]]


def find_mapped_attentions(
    rotaries: list[RotaryTraits], config: Any, geometries: dict[str | None, Geometry]
) -> list[Site]:
    """Return the attentions that a position map changes, with their layer types.

    Layers without rotation (NoPE) are left out, as there is nothing to map.

    Args:
        rotaries: Facts about the rotary modules.
        config: The text config of the unpatched model.
        geometries: The layer types that change.

    Raises:
        ValueError: The architecture hands no whole rotated queries and keys to its attention
            function, or its keys are rotated in an unknown way.
    """
    sites: list[Site] = []
    found = find_attentions(
        rotaries, config, geometries, what="position map", instead=_OTHER_METHODS
    )
    for traits, attentions in found:
        if find_mla_attentions(traits.owner) or getattr(config, "kv_lora_rank", None):
            raise Refused(
                f"{type(config).__name__} has latent attention, whose heads rotate in a part that "
                f"a position map does not reach yet: {_OTHER_METHODS}"
            )
        KeyLayout.of(traits)  # raises where the layout is unknown
        types = rotated_layer_types(traits.require_decoder(is_owner=False), traits.config)
        members = []
        for attention in attentions:
            index = layer_index(attention, len(types))
            layer_type = None if index is None else types[index]
            if layer_type in geometries and not _has_window(config, index):
                present = present_function(attention, (MappedAttention, QueryScaling))
                require_known_attention(present, _STAND_IN)
                members.append((attention, layer_type))
        sites.append((traits, members))
    if not any(members for _, members in sites):
        raise Refused(
            f"every layer of {type(config).__name__} that rotates has a window, beyond which it "
            "sees no keys, so there is nothing far that a position map could move"
        )
    return sites


def _has_window(config: Any, layer: int | None) -> bool:
    """Return whether a layer sees the last keys alone."""
    types = getattr(config, "layer_types", None)
    if types and layer is not None and layer < len(types):
        return any(name in str(types[layer]) for name in ("sliding", "chunked"))
    return getattr(config, "sliding_window", None) is not None


def install_position_map(
    sites: list[Site],
    position_map: PositionMap,
    reach: int,
    frequencies: dict[str | None, Frequencies],
    rotation_digest: str,
    kernels: str,
    undo_log: UndoLog,
) -> list[PositionHooks]:
    """Have attentions compare at mapped positions.

    Args:
        sites: From `find_mapped_attentions`.
        position_map: The map.
        reach: Positions that the frequencies below the map reach.
        frequencies: The rotation in effect, by layer type.
        rotation_digest: Of that rotation; caches of another one are refused.
        kernels: Which code turns queries and keys; see `rope_patch.patch`.
        undo_log: Log of the changes.

    Returns:
        The hooks that follow positions, one for each decoder.
    """
    by_decoder: dict[int, PositionHooks] = {}
    for traits, attentions in sites:
        decoder = traits.require_decoder(is_owner=False)
        if id(decoder) not in by_decoder:
            hooks = PositionHooks(position_map, reach, rotation_digest)
            hooks.attach(decoder, undo_log)
            by_decoder[id(decoder)] = hooks
        layout = KeyLayout.of(traits)
        rotations = {}
        for layer_type, each in frequencies.items():
            inv_freq, chosen = each.inv_freq.double(), kernels
            if _rotates_in_float64(traits, layer_type):
                chosen = "hf"  # our kernels have frequencies in float32
            else:
                inv_freq = inv_freq.float().double()  # rounded to float32 as the model's are
            inv_freq = -inv_freq if layout.is_backward else inv_freq
            rotations[layer_type] = ShiftRotation(inv_freq, layout.interleaved, chosen)
        for attention, layer_type in attentions:
            mapped = MappedAttention(by_decoder[id(decoder)], rotations[layer_type])
            intercept(attention, mapped, undo_log)
    return list(by_decoder.values())


def _rotates_in_float64(traits: RotaryTraits, layer_type: str | None) -> bool:
    module: Any = traits.rotary.module
    name = f"{traits.rotary.prefixes.get(layer_type, '')}inv_freq"
    return getattr(module, name).dtype == torch.float64
