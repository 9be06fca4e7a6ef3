"""Temperature of queries: multiply each query by its position's factor, ahead of the attention.

Most attentions of transformers hand their rotated queries to a function from
`ALL_ATTENTION_FUNCTIONS`. The attention's forward stays the class's own code. A copy of it, bound
to one instance, finds a registry under that name whose functions multiply the queries first. So the
factor is the same in eager attention, SDPA, flash and flex attention, and keys are left alone.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods.temperature import Temperature
from rope_patch.patching.architecture.attention_source import undecorated_forward
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.kernels.attention_forward import (
    PatchedAttentionForward,
    ReboundForward,
    forward_attribute,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import by_layer_type
from rope_patch.utils.errors import Refused

_INTERFACES, _GETTER = "ALL_ATTENTION_FUNCTIONS", "get_interface"
_EAGER = "eager_attention_forward"
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

    def __init__(self, temperature: Temperature, trained_length: int) -> None:
        self.temperature = temperature
        self.trained_length = trained_length
        self._state = QueryPositions()

    def before_rotary(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the positions of a forward (pre-hook of the rotary module)."""
        positions = args[1] if len(args) > 1 else kwargs["position_ids"]
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
        query = self.scale(query, kwargs.get("position_ids"))
        return function(module, query, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = QueryPositions()


class ScaledInterfaces:
    """A registry of attention functions whose functions scale the queries first."""

    def __init__(self, interfaces: Any, scaling: QueryScaling) -> None:
        self.interfaces = interfaces
        self.scaling = scaling

    def get_interface(self, name: str, default: Any) -> Any:
        """Return the function of that name; see transformers' `AttentionInterface`."""
        function = self.interfaces.get_interface(name, default)
        return functools.partial(self.scaling.attend, function)

    def __getitem__(self, name: str) -> Any:
        return functools.partial(self.scaling.attend, self.interfaces[name])


class ScaledAttentionForward(ReboundForward):
    """An attention's forward whose queries are multiplied by their temperature."""

    def __init__(
        self, module: nn.Module, inner: PatchedAttentionForward | None, scaling: QueryScaling
    ) -> None:
        self.inner = inner
        self.scaling = scaling
        super().__init__(module)

    def source_function(self) -> Any:
        """Return the function to copy: with this package's rotation where that is installed."""
        attention_class: Any = self.module.__class__
        return undecorated_forward(attention_class) if self.inner is None else self.inner.function

    def names(self, function: Any) -> dict[str, Any]:
        """Return what the copy finds under which global names."""
        interfaces = ScaledInterfaces(function.__globals__[_INTERFACES], self.scaling)
        names: dict[str, Any] = {_INTERFACES: interfaces}
        if _GETTER not in function.__code__.co_names and _EAGER in function.__globals__:
            eager = function.__globals__[_EAGER]
            names[_EAGER] = functools.partial(self.scaling.attend, eager)
        return names

    def retire(self) -> None:
        """Attend as the class does from now on: undone, but a wrapper still calls this."""
        if self.inner is not None:
            self.inner.retire()
        self.function = undecorated_forward(type(self.module))

    def for_replica(self, replica: Any) -> ScaledAttentionForward:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        inner = None if self.inner is None else self.inner.for_replica(replica)
        return ScaledAttentionForward(replica, inner, self.scaling)


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
    found: list[tuple[RotaryTraits, list[nn.Module]]] = []
    for traits in rotaries:
        if not traits.frequencies.keys() & geometries.keys():
            continue
        name = type(traits.config).__name__
        if traits.is_mrope:
            raise Refused(
                f"{name} gives a token several positions (M-RoPE), so a query's temperature has "
                "none to follow: leave temperature out"
            )
        decoder = traits.decoder
        if decoder is None:
            raise Refused(
                f"{traits.name} does not belong to a decoder that is given positions, which a "
                "temperature follows: leave temperature out"
            )
        attentions = [module for module in decoder.modules() if _rotates(module)]
        unreachable = [each for each in attentions if _INTERFACES not in _global_names(each)]
        if unreachable or not attentions:
            what = type(unreachable[0] if unreachable else decoder).__name__
            raise Refused(
                f"{what} does not hand its queries to one of transformers' attention functions, so "
                f"no temperature can reach them: leave temperature out"
            )
        extended = [each for each in attentions if _is_extended(each, config, geometries)]
        if not extended:
            raise Refused(
                f"{name} does not say which of its attentions belong to the layer types "
                f"{', '.join(map(str, geometries))}: leave temperature out"
            )
        known = {id(module) for _, modules in found for module in modules}
        found.append((traits, [each for each in extended if id(each) not in known]))
    return found


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
            slot = forward_attribute(attention)
            forward = vars(attention).get(slot)
            inner = forward if isinstance(forward, PatchedAttentionForward) else None
            undo_log.set(attention, slot, ScaledAttentionForward(attention, inner, scaling))


def _require_no_own_temperature(config: Any) -> None:
    own = None
    if getattr(config, "attn_temperature_tuning", False):
        own = "attn_temperature_tuning"
    elif any(p.get(_OWN_BETA) for p in by_layer_type(config.rope_parameters).values()):
        own = _OWN_BETA
    if own:
        raise Refused(
            f"{type(config).__name__} has a temperature of its own ({own} in its config), which "
            "the patch keeps: leave temperature out"
        )


def _rotates(module: nn.Module) -> bool:
    """Return whether a module's forward rotates queries of an attention."""
    if type(module).__name__.endswith(("Indexer", "Compressor")):  # they choose tokens
        return False
    return any("apply" in name and "rot" in name for name in _global_names(module))


def _global_names(module: nn.Module) -> tuple[str, ...]:
    module_class: Any = type(module)
    code = getattr(undecorated_forward(module_class), "__code__", None)
    return () if code is None else code.co_names


def _is_extended(attention: Any, config: Any, geometries: dict[str | None, Geometry]) -> bool:
    if None in geometries:
        return True
    layer_types = getattr(config, "layer_types", None) or []
    index = getattr(attention, "layer_idx", None)
    return isinstance(index, int) and index < len(layer_types) and layer_types[index] in geometries
