"""Registration of our method names with transformers, for configs that name them.

transformers builds a rotary module with the function in `ROPE_INIT_FUNCTIONS` for the config's
`rope_type`, and has a validator for each. `register_rope_types()` adds both for the methods it
lacks. transformers' own rope types (`yarn`, `llama3`, ...) keep their meaning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods import Method, build, registered_methods
from rope_patch.methods.base import require_tokens
from rope_patch.methods.dynamic import Dynamic
from rope_patch.methods.mixed import Mixed
from rope_patch.methods.position_map import PositionMap
from rope_patch.rope_config import (
    NATIVE_ROPE_TYPES,
    by_layer_type,
    config_rope_type,
    read_geometries,
)
from rope_patch.transformers_api.models import rope_config_class, rope_functions
from rope_patch.utils.errors import Refused

logger = logging.getLogger("rope_patch")

_FUNCTIONS, _CONFIG_CLASS = rope_functions(), rope_config_class()

# Keys that every method accepts besides its options.
_LENGTH_KEY = "original_max_position_embeddings"
_COMMON_KEYS = {"rope_theta", _LENGTH_KEY}

_lock = threading.RLock()
_entries: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = []


def register_rope_types() -> None:
    """Register our methods with transformers, so that configs can name them.

    From then on, in this process, a config with `rope_parameters={"rope_type": "ntk", "factor": 4,
    "rope_theta": 10000.0, "original_max_position_embeddings": 8192}` loads through transformers'
    Auto classes and rotates as `patch(model, "ntk", factor=4)` does. A method's options go beside
    `rope_type`. Names that transformers has itself keep its meaning. Length-dependent methods
    (`dynamic-*`, `mixed-*`) and temperatures need more than a rotary module: building a model whose
    config names one raises a ValueError that says what to do instead.

    Calling it again does nothing. `unregister_rope_types` removes the names.

    Raises:
        ValueError: Another library has registered one of the names; nothing is registered then.
    """
    with _lock:
        if _entries:
            _require_own_entries()
            return
        names = _names_to_register()
        conflicts = {name: _FUNCTIONS[name] for name in names if name in _FUNCTIONS}
        if conflicts:
            raise _name_conflict(conflicts)
        for name in names:
            compute, validate = _make_compute(name), _make_validate(name)
            _FUNCTIONS[name] = compute
            setattr(_CONFIG_CLASS, _validator(name), validate)
            _entries.append((name, compute, validate))


def unregister_rope_types() -> None:
    """Remove our names from transformers' registry; does nothing if they are not there.

    Functions that another library has registered under one of the names since then stay. Existing
    models are unchanged.
    """
    with _lock:
        for name, compute, validate in _entries:
            if _FUNCTIONS.get(name) is compute:
                del _FUNCTIONS[name]
            else:
                logger.warning(
                    "rope_type %r was registered by somebody else after "
                    "rope_patch.register_rope_types(), and stays as it is",
                    name,
                )
            if vars(_CONFIG_CLASS).get(_validator(name)) is validate:
                delattr(_CONFIG_CLASS, _validator(name))
        _entries.clear()


def to_native_rope_parameters(config: Any) -> dict[str, Any]:
    """Return a config's `rope_parameters`, with our rope types replaced where transformers can.

    Args:
        config: A text config.
    """
    all_parameters = config.rope_parameters
    replaced: dict[Any, dict[str, Any]] = {}
    for layer_type, parameters in by_layer_type(all_parameters).items():
        name = config_rope_type(parameters)
        if name in NATIVE_ROPE_TYPES or name not in registered_methods():
            continue
        method = _build_method(name, parameters)
        native = method.rope_parameters(_geometry(config, layer_type, parameters))
        if native["rope_type"] != "default" and native["rope_type"] not in _FUNCTIONS:
            continue
        our_keys = {"type", *_COMMON_KEYS, *(option.name for option in fields(method))}
        others = {key: value for key, value in parameters.items() if key not in our_keys}
        replaced[layer_type] = others | native
    return replaced.get(None) or {**all_parameters, **replaced}


def needs_registration(name: Any) -> bool:
    """Return whether transformers lacks a rope_type that `register_rope_types()` adds."""
    return isinstance(name, str) and name in _names_to_register() and name not in _FUNCTIONS


def _names_to_register() -> list[str]:
    return [
        name
        for name, method_class in registered_methods().items()
        if name not in NATIVE_ROPE_TYPES
        # A map of positions lies in attention, which no rotary module can change.
        and not issubclass(method_class, PositionMap)
        # A later transformers may have one of our names, too.
        and not str(getattr(_FUNCTIONS.get(name), "__module__", "")).startswith("transformers.")
    ]


def _validator(name: str) -> str:
    return f"_validate_{name}_rope_parameters"


def _require_own_entries() -> None:
    conflicts = {
        name: _FUNCTIONS[name]
        for name, compute, _ in _entries
        if _FUNCTIONS.get(name, compute) is not compute
    }
    if conflicts:
        raise _name_conflict(conflicts)
    for name, compute, validate in _entries:  # another library may have removed one
        _FUNCTIONS.setdefault(name, compute)
        if not hasattr(_CONFIG_CLASS, _validator(name)):
            setattr(_CONFIG_CLASS, _validator(name), validate)


def _name_conflict(functions: dict[str, Any]) -> ValueError:
    owners = ", ".join(
        f"{name!r} is {getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', f)}"
        for name, f in functions.items()
    )
    return ValueError(
        "expected rope types that nobody has registered with transformers, got ones that stand "
        f"for something else already ({owners}): remove them from ROPE_INIT_FUNCTIONS first, or "
        "use rope_patch.patch, which needs no registration"
    )


def _make_compute(name: str) -> Callable[..., tuple[torch.Tensor, float]]:
    """Return the function with which transformers computes a rotary module's frequencies."""

    def compute(
        config: Any,
        device: Any = None,
        seq_len: int | None = None,
        layer_type: str | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, float]:
        config.standardize_rope_params()
        parameters = by_layer_type(config.rope_parameters).get(layer_type)
        if parameters is None:
            raise Refused(
                f"rope_parameters of {type(config).__name__} has nothing for the layer type "
                f"{layer_type!r}: expected a dict for each of its layer_types"
            )
        try:
            method = _build_method(name, parameters)
            frequencies = method.frequencies(_geometry(config, layer_type, parameters))
        except (ValueError, TypeError) as error:
            raise Refused(f"rope_type {name!r} in rope_parameters: {error}") from error
        device = torch.get_default_device() if device is None else device
        return frequencies.inv_freq.float().to(device), float(frequencies.attention_factor)

    return compute


def _make_validate(name: str) -> Callable[..., None]:
    """Return the method with which transformers' configs validate `rope_parameters`."""

    def validate(self: Any, rope_parameters: Any, ignore_keys: Any = None) -> None:
        self._check_received_keys(
            name,
            set(rope_parameters),
            {"rope_type"},
            optional_keys=_COMMON_KEYS
            | {option.name for option in fields(registered_methods()[name])},
            ignore_keys=None if ignore_keys is None else set(ignore_keys),
        )
        try:
            _build_method(name, rope_parameters)
            _trained_length(self, rope_parameters)
        except (ValueError, TypeError) as error:
            # As transformers' own do, so that an invalid config can be read and mended. Building a
            # model from it raises.
            logger.warning("rope_type %r in rope_parameters: %s", name, error)

    return validate


def _build_method(name: str, parameters: dict[str, Any]) -> Method:
    """Build the method of one layer type's `rope_parameters`, with its options."""
    method_class = registered_methods()[name]
    # In a config, null leaves a value to its default.
    values = {key: value for key, value in parameters.items() if value is not None}
    names = [option.name for option in fields(method_class)]
    options = {key: values[key] for key in names if key in values}
    if issubclass(method_class, Dynamic | Mixed):
        raise _length_dependence_error(name, options)
    if "factor" in _required_options(name, values) - values.keys():
        raise Refused(
            "expected a factor (target length / trained length), got nothing: write it beside "
            "rope_type"
        )
    method = build(name, **options)
    if method.query_temperature is not None:
        raise Refused(
            f"expected a rotation, got temperature={method.temperature!r} beside it, which acts on "
            f"queries: leave it out of the config, and call rope_patch.patch(model, {name!r}, ...)"
        )
    if method.is_length_dependent(1):
        raise _length_dependence_error(name, options)
    return method


def _length_dependence_error(name: str, options: dict[str, Any]) -> ValueError:
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return ValueError(
        "expected a rotation that is the same for every length, got one that follows the length of "
        "each sequence, which a config cannot ask for: build the model with rope_type 'default' "
        f"and call rope_patch.patch(model, {name!r}{arguments})"
    )


def _required_options(name: str, parameters: dict[str, Any]) -> set[str]:
    """Return the keys that a method's formula requires."""
    if name == "nope" or parameters.get("new_theta") is not None:
        return set()
    return {"factor"} if name == "ntk" else {"factor", _LENGTH_KEY}


def _trained_length(config: Any, parameters: dict[str, Any]) -> int:
    trained_length = parameters.get(_LENGTH_KEY)
    if trained_length is None:  # some configs have it one level up (Phi-3)
        trained_length = getattr(config, _LENGTH_KEY, None)
    if trained_length is not None:
        require_tokens(_LENGTH_KEY, trained_length)
        return int(trained_length)
    if _LENGTH_KEY in _required_options(config_rope_type(parameters), parameters):
        raise Refused(
            f"expected {_LENGTH_KEY}, the tokens of pretraining, got nothing: write it beside "
            "rope_type"
        )
    return 1  # the formula does not use it


def _geometry(config: Any, layer_type: str | None, parameters: dict[str, Any]) -> Geometry:
    return read_geometries(config, _trained_length(config, parameters))[layer_type]
