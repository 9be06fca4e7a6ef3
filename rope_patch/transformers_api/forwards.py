"""Arguments of forwards: their names, and what a call was given, found by kind before name.

A cache is the argument whose annotation or value is a `Cache`, whatever it is called. It is
`past_key_values` up to transformers 5.23 and `cache` from 5.24 on, where callers may use the old
name until 5.40; hooks run ahead of the decorator that translates it, and see either. Continuous
batching passes its paged cache as `cache` in all releases.

Tokens (`input_ids`, `inputs_embeds`), `position_ids` and `attention_mask` have had these names in
all releases of 5. Tensors cannot be told apart by their kind, so a forward without one of these
names is refused where its argument is needed.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rope_patch.transformers_api.caches import (
    is_cache,
    is_cache_class,
    is_paged,
    self_attention_part,
)
from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

CACHE_NAMES = ("cache", "past_key_values")
TOKENS, EMBEDDINGS = "input_ids", "inputs_embeds"
POSITIONS, MASK = "position_ids", "attention_mask"
CACHE_OFFSET = "cache_offset"  # what an attention that runs in loops adds to its `layer_idx`
CACHE = "a cache"  # messages say this, since the argument's name varies

# Kept by class: inspect takes longer than a small kernel, and Dynamo warns of functools.cache.
_PARAMETERS: dict[type, dict[str, inspect.Parameter]] = {}
_CACHE_PARAMETERS: dict[type, str | None] = {}


class ForwardCall:
    """The arguments of one call of a forward.

    Attributes:
        arguments: By name.
    """

    __slots__ = ("_module_class", "arguments")

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module_class = type(module)
        self.arguments = (
            dict(zip(parameter_names(module), args, strict=False)) | kwargs if args else kwargs
        )

    @property
    def tokens(self) -> torch.Tensor | None:
        """Return ids `[B, S]` or embeddings `[B, S, D]`; None without, an error of the model's."""
        tokens = self.arguments.get(TOKENS)
        return self.arguments.get(EMBEDDINGS) if tokens is None else tokens

    @property
    def position_ids(self) -> torch.Tensor | None:
        """Return the positions as given, `[B, S]`, or `[A, B, S]` with several axes (M-RoPE)."""
        return self.arguments.get(POSITIONS)

    @property
    def attention_mask(self) -> Any:
        """Return the mask as given: `[B, S]`, a mask of another form, or None."""
        return self.arguments.get(MASK)

    @property
    def is_packed(self) -> bool:
        """Return whether flash attention's arguments say that rows hold several documents."""
        return self.arguments.get("cu_seq_lens_q") is not None

    @property
    def cache(self) -> Any:
        """Return the cache of self-attention that the forward is given, or None.

        Raises:
            ValueError: It is given under the other release's name, which this forward ignores.
        """
        cache = cache_among(self.arguments)
        if cache is not None:
            self._require_used_name()
        return cache

    def fills_cache(self, decoder: nn.Module) -> bool:
        """Return whether the forward has a cache, or makes one, as its config says by default."""
        wants = self.arguments.get("use_cache")
        wants = getattr(decoder.config, "use_cache", False) if wants is None else wants
        return bool(wants) or self.cache is not None

    def cached_tokens(self) -> Any:
        """Return how many tokens the cache holds: a number, or a tensor of one (static caches).

        transformers 5.0 counts the slots of a static cache by their content, which is wrong for
        keys of zeros, and passes `cache_position` beside it; later releases count, and pass none.
        """
        cache = self.cache
        past = 0 if cache is None else cache.get_seq_length()
        if isinstance(past, torch.Tensor):
            cache_position = self.arguments.get("cache_position")
            return past if cache_position is None else cache_position[0]
        return past

    def _require_used_name(self) -> None:
        """Raise if a cache is given under a name that ends unread in the forward's `**kwargs`."""
        taken = _cache_parameter_of(self._module_class)
        if taken is None or self.arguments.get(taken) is not None:
            return  # it passes its keywords on, or has its cache
        for name in CACHE_NAMES:
            given = self.arguments.get(name)
            if given is None or name == taken or is_paged(given):
                continue  # attentions read a paged cache from the keywords
            if not _translates(self._module_class, name):
                raise Refused(
                    f"{self._module_class.__name__} in {installed_release()} takes its cache as "
                    f"`{taken}` and ignores `{name}`: give it as `{taken}`"
                )


def rotary_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, str | None]:
    """Return what a rotary module's forward is given, by its order: x, positions, layer type.

    The third is there in modules of several layer types alone (Gemma 3).

    Args:
        module: The rotary module.
        args: The call's.
        kwargs: The call's.
    """
    names = parameter_names(module)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    layer_type = arguments.get(names[2]) if len(names) > 2 else None
    return arguments[names[0]], arguments[names[1]], layer_type


def hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first argument of a layer's or an attention's call, `[B, S, D]`."""
    return args[0] if args else kwargs[parameter_names(module)[0]]


def with_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with another first one."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, parameter_names(module)[0]: hidden}


def with_position_ids(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a decoder's arguments with `position_ids`, also where None was passed by order."""
    names = parameter_names(module)
    at = names.index(POSITIONS) if POSITIONS in names else len(args)
    if at < len(args):
        return (*args[:at], positions, *args[at + 1 :]), kwargs
    return args, {**kwargs, POSITIONS: positions}


def cache_among(arguments: dict[str, Any]) -> Any:
    """Return the cache of self-attention among a forward's or generate's arguments, or None.

    Args:
        arguments: By name; several names may hold None.
    """
    for name in CACHE_NAMES:
        if (value := arguments.get(name)) is not None:
            return self_attention_part(value)
    for value in arguments.values():
        if is_cache(value):
            return self_attention_part(value)
    return None


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the parameter names of a module's forward, without `self`."""
    return tuple(_parameters(type(module)))


def cache_parameter(module: nn.Module) -> str | None:
    """Return the parameter of a module's forward that takes a cache, or None."""
    return _cache_parameter_of(type(module))


def takes_cache(model: nn.Module) -> bool:
    """Return whether a model reads tokens with a cache, in whatever way it is given.

    Asked are the parts that are given tokens; all parts, where none is. Parts of some encoders have
    arguments for a cache that nobody gives them (Tapas).
    """
    readers = [part for part in model.modules() if {TOKENS, EMBEDDINGS} & {*parameter_names(part)}]
    return any(_has_cache(part) for part in readers or model.modules())


def missing_parameters(module: nn.Module, needed: Iterable[str]) -> list[str]:
    """Return those of the needed parameters that a module's forward does not have.

    Args:
        module: The module.
        needed: Of `TOKENS`, `POSITIONS`, `MASK` and `CACHE`.
    """
    names = parameter_names(module)
    return [
        name
        for name in needed
        if (cache_parameter(module) is None if name == CACHE else name not in names)
    ]


def cache_arguments(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that gives a model a cache; nothing for None.

    Args:
        model: A model of transformers, or something around one that passes arguments on.
        cache: The cache.

    Raises:
        ValueError: No forward within the model takes a cache.
    """
    if cache is None:
        return {}
    for module in model.modules():
        if (name := cache_parameter(module)) is not None:
            return {name: cache}
    raise Refused(
        f"no forward of {type(model).__name__} has an argument for a cache that this package knows "
        f"in {installed_release()}: expected a model that generates"
    )


def unknown_forward(model: nn.Module, why: str, needed: Iterable[str]) -> Refused:
    """Return the error for a model without a forward that takes all that a patch needs.

    Args:
        model: The model.
        why: What that is needed for.
        needed: See `missing_parameters`.
    """
    return Refused(
        f"no forward of {type(model).__name__} in {installed_release()} takes "
        f"{' and '.join(needed)} under names that this package knows, and {why}"
    )


def _parameters(module_class: Any) -> dict[str, inspect.Parameter]:
    if module_class not in _PARAMETERS:
        try:
            signature = inspect.signature(module_class.forward)
            _PARAMETERS[module_class] = dict(list(signature.parameters.items())[1:])
        except (TypeError, ValueError):  # a forward without a signature
            _PARAMETERS[module_class] = {}
    return _PARAMETERS[module_class]


def _cache_parameter_of(module_class: type) -> str | None:
    if module_class not in _CACHE_PARAMETERS:
        _CACHE_PARAMETERS[module_class] = _find_cache_parameter(module_class)
    return _CACHE_PARAMETERS[module_class]


def _translates(module_class: Any, name: str) -> bool:
    """Return whether transformers' `deprecate_kwarg` wraps a forward for an old name."""
    # Models that are new in 5.24 (Dory) have `cache` and no decorator.
    function = module_class.forward
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if inspect.getclosurevars(function).nonlocals.get("old_name") == name:
            return True
        function = inner
    return False


def _find_cache_parameter(module_class: Any) -> str | None:
    parameters = _parameters(module_class)
    annotated = [name for name, each in parameters.items() if _names_cache(each.annotation)]
    known = [name for name in CACHE_NAMES if name in parameters]
    if len(annotated) == 1:
        return annotated[0]
    return known[0] if known else None  # several: an encoder-decoder's, of which one is known


def _names_cache(annotation: Any) -> bool:
    """Return whether an annotation is a class of caches, alone or in a union, or its name."""
    if isinstance(annotation, str):
        return re.search(r"Cache\b", annotation) is not None
    parts = typing.get_args(annotation) or (annotation,)
    return any(is_cache_class(part) for part in parts if isinstance(part, type))


def _has_cache(module: nn.Module) -> bool:
    """Return whether a forward takes a cache, is asked for one, or makes one."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return (
        cache_parameter(module) is not None
        or "use_cache" in parameter_names(module)
        or any(name.endswith("Cache") for name in names)
    )
