"""Our method names in transformers' own registry, for configs that name them.

transformers builds a rotary module from the function that stands under the config's `rope_type` in
`ROPE_INIT_FUNCTIONS`, and has a validator for each. `register()` adds both for the methods that it
lacks. Its own words (`yarn`, `llama3`, ...) go on meaning what it says they mean.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from rope_patch.geometry import Geometry
from rope_patch.methods import Method, build, registered_methods
from rope_patch.methods.base import require_tokens
from rope_patch.methods.dynamic import Dynamic
from rope_patch.methods.mixed import Mixed
from rope_patch.rope_config import by_layer_type, config_rope_type, read_geometries

logger = logging.getLogger("rope_patch")

# What transformers itself understands by these names holds in every version, also in one that is
# too old to know them.
_NATIVE_ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}

# Keys that every method may have beside its options.
_LENGTH_KEY = "original_max_position_embeddings"
_COMMON_KEYS = {"rope_theta", _LENGTH_KEY}

_lock = threading.RLock()
_entries: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = []


def register() -> None:
    """Makes transformers understand configs that name our methods.

    From here on, in this process, a config with `rope_parameters={"rope_type": "ntk", "factor": 4,
    "rope_theta": 10000.0, "original_max_position_embeddings": 8192}` loads through transformers'
    Auto classes and rotates as `patch(model, "ntk", factor=4)` does. A method's options stand
    beside `rope_type`. Names that transformers has itself stay its own. Methods that follow the
    length of a sequence (`dynamic-*`, `mixed-*`, `nope` with a temperature) need more than a rotary
    module, so building a model whose config names one is a ValueError that says what to do instead.

    Calling it again does nothing. `unregister` takes the names away again.

    Raises:
        ValueError: Somebody else has registered one of the names; nothing is registered then.
    """
    with _lock:
        if _entries:
            _require_own_entries()
            return
        names = _names_to_register()
        taken = {name: ROPE_INIT_FUNCTIONS[name] for name in names if name in ROPE_INIT_FUNCTIONS}
        if taken:
            raise _name_conflict(taken)
        for name in names:
            compute, validate = _make_compute(name), _make_validate(name)
            ROPE_INIT_FUNCTIONS[name] = compute
            setattr(RotaryEmbeddingConfigMixin, _validator(name), validate)
            _entries.append((name, compute, validate))


def unregister() -> None:
    """Takes our names out of transformers' registry; does nothing if they are not there.

    What somebody else has put under one of the names meanwhile stays theirs. Models that were
    built stay as they are.
    """
    with _lock:
        for name, compute, validate in _entries:
            if ROPE_INIT_FUNCTIONS.get(name) is compute:
                del ROPE_INIT_FUNCTIONS[name]
            else:
                logger.warning(
                    "rope_type %r was registered by somebody else after rope_patch.register(), "
                    "and stays as it is",
                    name,
                )
            if vars(RotaryEmbeddingConfigMixin).get(_validator(name)) is validate:
                delattr(RotaryEmbeddingConfigMixin, _validator(name))
        _entries.clear()


def to_native_rope_parameters(config: Any) -> dict[str, Any]:
    """A config's `rope_parameters` without names of ours, wherever transformers has a form for it.

    Args:
        config: A text config.
    """
    parameters = config.rope_parameters
    spelled: dict[Any, dict[str, Any]] = {}
    for kind, own in by_layer_type(parameters).items():
        name = config_rope_type(own)
        if name in _NATIVE_ROPE_TYPES or name not in registered_methods():
            continue
        method = _build_method(name, own)
        native = method.rope_parameters(_geometry(config, kind, own))
        if native["rope_type"] != "default" and native["rope_type"] not in ROPE_INIT_FUNCTIONS:
            continue
        ours = {"type", *_COMMON_KEYS, *(option.name for option in fields(method))}
        spelled[kind] = {k: v for k, v in own.items() if k not in ours} | native
    return spelled.get(None) or {**parameters, **spelled}


def needs_registration(name: Any) -> bool:
    """Whether transformers would know a config's scaling after `register()`, and does not yet."""
    return (
        isinstance(name, str) and name in _names_to_register() and name not in ROPE_INIT_FUNCTIONS
    )


def _names_to_register() -> list[str]:
    own = "transformers."
    return [
        name
        for name in registered_methods()
        if name not in _NATIVE_ROPE_TYPES
        # A later transformers may have a name, too.
        and not str(getattr(ROPE_INIT_FUNCTIONS.get(name), "__module__", "")).startswith(own)
    ]


def _validator(name: str) -> str:
    return f"_validate_{name}_rope_parameters"


def _require_own_entries() -> None:
    stolen = {
        name: ROPE_INIT_FUNCTIONS[name]
        for name, compute, _ in _entries
        if ROPE_INIT_FUNCTIONS.get(name, compute) is not compute
    }
    if stolen:
        raise _name_conflict(stolen)
    for name, compute, validate in _entries:  # somebody may have removed one
        ROPE_INIT_FUNCTIONS.setdefault(name, compute)
        if not hasattr(RotaryEmbeddingConfigMixin, _validator(name)):
            setattr(RotaryEmbeddingConfigMixin, _validator(name), validate)


def _name_conflict(functions: dict[str, Any]) -> ValueError:
    whose = ", ".join(
        f"{name!r} is {getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', f)}"
        for name, f in functions.items()
    )
    return ValueError(
        "expected rope types that nobody has registered with transformers, got ones that stand "
        f"for something else already ({whose}): remove them from ROPE_INIT_FUNCTIONS first, or "
        "use rope_patch.patch, which needs no registration"
    )


def _make_compute(name: str) -> Callable[..., tuple[torch.Tensor, float]]:
    """The function that transformers calls when it builds a rotary module."""

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
            raise ValueError(
                f"rope_parameters of {type(config).__name__} has nothing for the layer type "
                f"{layer_type!r}: expected a dict for each of its layer_types"
            )
        try:
            method = _build_method(name, parameters)
            found = method.frequencies(_geometry(config, layer_type, parameters))
        except (ValueError, TypeError) as error:
            raise ValueError(f"rope_type {name!r} in rope_parameters: {error}") from error
        device = torch.get_default_device() if device is None else device
        return found.inv_freq.float().to(device), float(found.attention_factor)

    return compute


def _make_validate(name: str) -> Callable[..., None]:
    """The method that transformers' configs call on what they are given.

    It warns, as transformers' own do: a config can be read in order to be mended. Building a model
    from it is what fails.
    """

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
            logger.warning("rope_type %r in rope_parameters: %s", name, error)

    return validate


def _build_method(name: str, parameters: dict[str, Any]) -> Method:
    """The method that one layer type's `rope_parameters` ask for, with its options."""
    kind = registered_methods()[name]
    # null is how a config leaves something to the default.
    given = {key: value for key, value in parameters.items() if value is not None}
    options = {option.name: given[option.name] for option in fields(kind) if option.name in given}
    if issubclass(kind, Dynamic | Mixed):
        raise _length_dependence_error(name, options)
    if "factor" in _required_options(name, given) - given.keys():
        raise ValueError(
            "expected a factor (target length / trained length), got nothing: write it beside "
            "rope_type"
        )
    method = build(name, **options)
    if method.is_length_dependent(1):
        raise _length_dependence_error(name, options)
    return method


def _length_dependence_error(name: str, options: dict[str, Any]) -> ValueError:
    said = "".join(f", {key}={value!r}" for key, value in options.items())
    return ValueError(
        "expected a rotation that is the same for every length, got one that follows the length of "
        "each sequence, which a config cannot ask for: build the model with rope_type 'default' "
        f"and call rope_patch.patch(model, {name!r}{said})"
    )


def _required_options(name: str, parameters: dict[str, Any]) -> set[str]:
    """The keys without which a method's formula cannot be filled in."""
    if name == "nope" or parameters.get("new_theta") is not None:
        return set()
    return {"factor"} if name == "ntk" else {"factor", _LENGTH_KEY}


def _trained_length(config: Any, parameters: dict[str, Any]) -> int:
    found = parameters.get(_LENGTH_KEY)
    if found is None:  # some configs have it one level up (Phi-3)
        found = getattr(config, _LENGTH_KEY, None)
    if found is not None:
        require_tokens(_LENGTH_KEY, found)
        return int(found)
    if _LENGTH_KEY in _required_options(config_rope_type(parameters), parameters):
        raise ValueError(
            f"expected {_LENGTH_KEY}, the tokens of pretraining, got nothing: write it beside rope_type"
        )
    return 1  # the formula does without


def _geometry(config: Any, kind: str | None, parameters: dict[str, Any]) -> Geometry:
    return read_geometries(config, _trained_length(config, parameters))[kind]
