"""Intercept what an attention hands to its attention function, and scale queries by position.

Most attentions of transformers hand their rotated queries to a function from
`ALL_ATTENTION_FUNCTIONS`. The attention's forward stays the class's own code. A copy of it, bound
to one instance, finds a registry under that name whose functions are intercepted. So the name of
the implementation, masks and caches stay as they are.

`QueryScaling` is the interceptor of a temperature: it multiplies each query by the factor of its
position, the same in eager attention, SDPA, flash and flex attention. Keys are left alone.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch import nn

from rope_patch.geometry import Geometry
from rope_patch.methods.temperature import Temperature
from rope_patch.patching.architecture.attention_source import undecorated_forward
from rope_patch.patching.architecture.rotary_modules import why_no_decoder
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.kernels.attention_forward import (
    PatchedAttentionForward,
    ReboundForward,
    forward_attribute,
)
from rope_patch.patching.undo_log import UndoLog
from rope_patch.rope_config import TEMPERATURE_KEY, by_layer_type
from rope_patch.transformers_api.forwards import POSITIONS, rotary_arguments
from rope_patch.transformers_api.models import (
    ATTENTION_FUNCTIONS,
    ATTENTION_GETTER,
    EAGER_ATTENTION,
    attention_implementation,
)
from rope_patch.utils.errors import Refused


class Interceptor(Protocol):
    """What is called in place of an attention function."""

    @property
    def breaks_graphs(self) -> bool:
        """Return whether it cannot run within a compiled graph."""

    def attend(self, function: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what `function(module, *args, **kwargs)` would; see transformers' interface."""


class InterceptedInterfaces:
    """A registry of attention functions, each of which an interceptor is given."""

    def __init__(self, interfaces: Any, interceptor: Interceptor) -> None:
        self.interfaces = interfaces
        self.interceptor = interceptor

    def get_interface(self, name: str, default: Any) -> Any:
        """Return the function of that name; see transformers' `AttentionInterface`."""
        function = self.interfaces.get_interface(name, default)
        return functools.partial(self.interceptor.attend, function)

    def __getitem__(self, name: str) -> Any:
        return functools.partial(self.interceptor.attend, self.interfaces[name])


class InterceptedForward(ReboundForward):
    """An attention's forward whose attention function an interceptor is given."""

    def __init__(
        self, module: nn.Module, inner: ReboundForward | None, interceptor: Interceptor
    ) -> None:
        self.inner = inner
        self.interceptor = interceptor
        super().__init__(module)

    @property
    def breaks_graphs(self) -> bool:
        """Return whether some interceptor of this attention cannot run in a compiled graph."""
        inner = isinstance(self.inner, InterceptedForward) and self.inner.breaks_graphs
        return self.interceptor.breaks_graphs or inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.breaks_graphs and torch.compiler.is_compiling():
            # Imported here, because the module imports the compiler. The whole forward runs outside
            # the graph: Dynamo cannot resume in the middle of a copied function.
            from rope_patch.patching.dynamic.graph_break import call_outside_graph

            return call_outside_graph(super().__call__, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def source_function(self) -> Any:
        """Return the function to copy: with this package's other changes where they are."""
        attention_class: Any = self.module.__class__
        return undecorated_forward(attention_class) if self.inner is None else self.inner.function

    def names(self, function: Any) -> dict[str, Any]:
        """Return what the copy finds under which global names."""
        interfaces = InterceptedInterfaces(
            function.__globals__[ATTENTION_FUNCTIONS], self.interceptor
        )
        names: dict[str, Any] = {ATTENTION_FUNCTIONS: interfaces}
        if (
            ATTENTION_GETTER not in function.__code__.co_names
            and EAGER_ATTENTION in function.__globals__
        ):
            eager = function.__globals__[EAGER_ATTENTION]
            names[EAGER_ATTENTION] = functools.partial(self.interceptor.attend, eager)
        return names

    def retire(self) -> None:
        """Attend as the class does from now on: undone, but a wrapper still calls this."""
        if isinstance(self.inner, PatchedAttentionForward | InterceptedForward):
            self.inner.retire()
        self.function = undecorated_forward(type(self.module))

    def for_replica(self, replica: Any) -> InterceptedForward:
        """Return the forward for a replica of the module (`nn.DataParallel`)."""
        inner = self.inner
        if isinstance(inner, PatchedAttentionForward | InterceptedForward):
            inner = inner.for_replica(replica)
        return InterceptedForward(replica, inner, self.interceptor)


def find_attentions(
    rotaries: list[RotaryTraits],
    config: Any,
    geometries: dict[str | None, Geometry],
    *,
    what: str,
    instead: str,
) -> list[tuple[RotaryTraits, list[nn.Module]]]:
    """Return the attentions of the layers that a patch changes, beside their rotary modules.

    Args:
        rotaries: Facts about the rotary modules.
        config: The text config of the unpatched model.
        geometries: The layer types that change.
        what: What needs them, for messages; such as "temperature".
        instead: What to do where they are out of reach.

    Raises:
        ValueError: Their queries have no single position, or cannot be reached.
    """
    found: list[tuple[RotaryTraits, list[nn.Module]]] = []
    for traits in rotaries:
        if not traits.frequencies.keys() & geometries.keys():
            continue
        name = type(traits.config).__name__
        if traits.is_mrope:
            raise Refused(
                f"{name} gives a token several positions (M-RoPE), so a {what} has none to follow: "
                f"{instead}"
            )
        decoder = traits.decoder
        if decoder is None:
            raise Refused(
                f"{traits.name} {why_no_decoder(traits.reader)}, and a {what} follows positions: "
                f"{instead}"
            )
        attentions = [module for module in decoder.modules() if _rotates(module)]
        unreachable = [each for each in attentions if not _reads_registry(each)]
        if unreachable or not attentions:
            where = type(unreachable[0] if unreachable else decoder).__name__
            raise Refused(
                f"{where} does not hand its queries to one of transformers' attention functions, "
                f"so no {what} can reach them: {instead}"
            )
        extended = [each for each in attentions if _is_extended(each, config, geometries)]
        if not extended:
            raise Refused(
                f"{name} does not say which of its attentions belong to the layer types "
                f"{', '.join(map(str, geometries))}: {instead}"
            )
        known = {id(module) for _, modules in found for module in modules}
        found.append((traits, [each for each in extended if id(each) not in known]))
    return found


def present_function(attention: nn.Module, without: tuple[type, ...]) -> Any:
    """Return what an attention calls now as its attention function.

    Args:
        attention: The attention.
        without: Classes of interceptors that are passed over.
    """
    forward = vars(attention).get(forward_attribute(attention))
    attention_class: Any = type(attention)
    source: Any = (
        forward.function
        if isinstance(forward, ReboundForward)
        else undecorated_forward(attention_class)
    )
    names, config = source.__globals__, getattr(attention, "config", None)
    interfaces, eager = names[ATTENTION_FUNCTIONS], names.get(EAGER_ATTENTION)
    name = attention_implementation(config)
    if ATTENTION_GETTER in source.__code__.co_names:
        function = interfaces.get_interface(name, eager)
    else:
        function = eager if name == "eager" else interfaces[name]
    while isinstance(function, functools.partial) and isinstance(
        getattr(function.func, "__self__", None), without
    ):
        (function,) = function.args
    return function


def layer_index(attention: Any, layers: int) -> int | None:
    """Return which of some layers an attention belongs to; None where it does not say.

    An attention that serves several layers has the index -1 (Zamba 2).
    """
    index = getattr(attention, "layer_idx", None)
    return index if isinstance(index, int) and 0 <= index < layers else None


def intercept(attention: nn.Module, interceptor: Interceptor, undo_log: UndoLog) -> None:
    """Have an attention call an interceptor, inside whatever this package installed before."""
    slot = forward_attribute(attention)
    forward = vars(attention).get(slot)
    inner = forward if isinstance(forward, ReboundForward) else None
    undo_log.set(attention, slot, InterceptedForward(attention, inner, interceptor))


def _rotates(module: nn.Module) -> bool:
    """Return whether a module's forward rotates queries of an attention."""
    if type(module).__name__.endswith(("Indexer", "Compressor")):  # they choose tokens
        return False
    return any("apply" in name and "rot" in name for name in _global_names(module))


def _global_names(module: nn.Module) -> tuple[str, ...]:
    module_class: Any = type(module)
    code = getattr(undecorated_forward(module_class), "__code__", None)
    return () if code is None else code.co_names


def _reads_registry(module: nn.Module) -> bool:
    """Return whether an attention's forward has the registry of functions as a global."""
    # A name in the code may also be an attribute of a module that the forward reads it from.
    module_class: Any = type(module)
    names = getattr(undecorated_forward(module_class), "__globals__", {})
    return ATTENTION_FUNCTIONS in _global_names(module) and ATTENTION_FUNCTIONS in names


def _is_extended(attention: Any, config: Any, geometries: dict[str | None, Geometry]) -> bool:
    if None in geometries:
        return True
    layer_types = getattr(config, "layer_types", None) or []
    index = layer_index(attention, len(layer_types))
    return index is not None and layer_types[index] in geometries


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
    return TEMPERATURE_KEY if any(each.get(TEMPERATURE_KEY) for each in parameters) else None


def _require_no_own_temperature(config: Any) -> None:
    if own := own_temperature(config):
        raise Refused(
            f"{type(config).__name__} has a temperature of its own ({own} in its config), which "
            "the patch keeps: leave temperature out"
        )
