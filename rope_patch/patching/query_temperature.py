"""Temperature of queries: multiply each query by its position's factor, ahead of the attention.

The factor is the same in eager attention, SDPA, flash and flex attention (see
`attention_interception`), and keys are left alone.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods.temperature import Temperature
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.attention_interception import find_attentions, intercept
from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.forwards import POSITIONS, rotary_arguments
from rope_patch.utils.errors import Refused

_OWN_BETA = "llama_4_scaling_beta"


class QueryPositions(threading.local):
    """Positions of the queries in the present forward of a decoder, per thread.

    Attributes:
        positions: `[B, S]` or `[1, S]`; None outside of a forward.
        factors: Their factors, by device and dtype, once for all layers.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
        self.factors: dict[Any, torch.Tensor] = {}


class QueryScaling:
    """The temperature of one decoder's queries.

    Attributes:
        temperature: The factor by position.
        trained_length: L, in tokens.
    """

    breaks_graphs = False

    def __init__(self, temperature: Temperature, trained_length: int) -> None:
        self.temperature = temperature
        self.trained_length = trained_length
        self._state = QueryPositions()

    def before_rotary(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the positions of a forward (pre-hook of the rotary module)."""
        _, positions, _ = rotary_arguments(module, args, kwargs)
        if positions is not self._state.positions:
            self._state.positions, self._state.factors = positions, {}

    def forget(self, *_: Any) -> None:
        """Forget the positions (hook before and after the decoder)."""
        self._state.positions, self._state.factors = None, {}

    def scale(self, query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return rotated queries, `[B, H, S, D]`, times their factors.

        Args:
            query: The queries.
            positions: `[B, S]` or `[1, S]`, if the attention was given them.

        Raises:
            ValueError: The positions are unknown.
        """
        if positions is None or positions.ndim != 2 or positions.shape[1] != query.shape[2]:
            positions = self._state.positions
        if positions is None:
            raise Refused(
                "an attention ran outside its decoder's forward, perhaps by gradient "
                "checkpointing, and was not given the positions that its temperature depends on: "
                "switch gradient checkpointing off, or patch without temperature"
            )
        wide = torch.promote_types(query.dtype, torch.float32)
        factors = self._factors(positions, query.device, wide)
        # Wide, because a factor rounded to 16 bits would shift all logits the same way.
        return (query.to(wide) * factors[:, None, :, None]).to(query.dtype)

    def _factors(
        self, positions: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        key, state = (device, dtype), self._state
        in_forward = positions is state.positions and not torch.compiler.is_compiling()
        if in_forward and key in state.factors:
            return state.factors[key]
        factors = self.temperature.factors(positions.to(device), self.trained_length, dtype)
        if in_forward:
            state.factors[key] = factors
        return factors

    def attend(
        self, function: Any, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call an attention function with scaled queries."""
        query = self.scale(query, kwargs.get(POSITIONS))
        return function(module, query, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = QueryPositions()


def find_scalable_attentions(
    rotaries: list[RotaryTraits], config: Any, geometries: dict[str | None, Geometry]
) -> list[tuple[RotaryTraits, list[nn.Module]]]:
    """Return the attentions of the layers that a patch changes, beside their rotary modules.

    Args:
        rotaries: Facts about the rotary modules.
        config: The text config of the unpatched model.
        geometries: The layer types that change.

    Raises:
        ValueError: The model has a temperature of its own, or its queries cannot be reached.
    """
    _require_no_own_temperature(config)
    return find_attentions(
        rotaries, config, geometries, what="temperature", instead="leave temperature out"
    )


def install_temperature(
    sites: list[tuple[RotaryTraits, list[nn.Module]]],
    temperature: Temperature,
    trained_length: int,
    undo_log: UndoLog,
) -> None:
    """Scale the queries of attentions, inside this package's rotation where that is installed.

    Args:
        sites: From `find_scalable_attentions`.
        temperature: The factor by position.
        trained_length: In tokens.
        undo_log: Log of the changes.
    """
    for traits, attentions in sites:
        scaling = QueryScaling(temperature, trained_length)
        undo_log.hook(traits.rotary.module, before=scaling.before_rotary)
        decoder = traits.require_decoder(is_owner=False)
        undo_log.hook(decoder, before=scaling.forget, after=scaling.forget)
        for attention in attentions:
            intercept(attention, scaling, undo_log)


def own_temperature(config: Any) -> str | None:
    """Return the config's field that gives queries a temperature already, or None."""
    if getattr(config, "attn_temperature_tuning", False):
        return "attn_temperature_tuning"
    parameters = by_layer_type(config.rope_parameters).values()
    return _OWN_BETA if any(each.get(_OWN_BETA) for each in parameters) else None


def _require_no_own_temperature(config: Any) -> None:
    if own := own_temperature(config):
        raise Refused(
            f"{type(config).__name__} has a temperature of its own ({own} in its config), which "
            "the patch keeps: leave temperature out"
        )
