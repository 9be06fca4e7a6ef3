"""Reading of `rope_parameters` whose `rope_type` names a method of rope_patch.

A name that vLLM has itself keeps vLLM's meaning. `rope_patch:NAME` names the method of rope_patch
in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Method, require_number, require_tokens
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.registry import build, find_method
from rope_patch.utils.errors import Refused, one_line

PREFIX = "rope_patch:"
BASE_KEY = "base_inv_freq"
TRAINED_KEY = "original_max_position_embeddings"

# Keys that belong to the model, whatever the method.
_MODEL_KEYS = (
    *("rope_theta", "partial_rotary_factor", "rope_dim", "type"),
    *("mrope_section", "mrope_interleaved"),
)
_WITHOUT_FACTOR = ("default", "nope")

# What `get_rope` and the model files of vLLM compare `rope_type` with.
_VLLM_ROPE_TYPES = frozenset(
    (
        *("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "su"),
        *("proportional", "mrope", "bailing_mrope", "openpangu", "mllama4", "telechat3-yarn"),
        *("deepseek_yarn", "deepseek_llama_scaling"),
    )
)


@dataclass(frozen=True)
class RopeRequest:
    """The rotation that one layer type's `rope_parameters` ask for.

    Attributes:
        method: The method with its options.
        theta: Rope base.
        trained_length: Tokens of pretraining.
        base: Radians per token of each pair that the method starts from; empty for theta's.
        sections: Pairs that rotate by each of a token's several positions (M-RoPE); empty if a
            token has one.
        interleaved: Whether those pairs take turns, instead of standing in blocks.
    """

    method: Method
    theta: float
    trained_length: int
    base: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def geometry(self, head_dim: int, rotary_dim: int) -> Geometry:
        """Return the rotation before the extension, for heads of a given size."""
        return Geometry(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            theta=self.theta,
            trained_length=self.trained_length,
            base=self.base,
        )


def method_name(rope_type: Any) -> str | None:
    """Return the method of rope_patch that a `rope_type` names; None if it is vLLM's to read."""
    if not isinstance(rope_type, str):
        return None
    if rope_type.startswith(PREFIX):
        return rope_type.removeprefix(PREFIX)
    is_ours = rope_type not in _VLLM_ROPE_TYPES and find_method(rope_type) is not None
    return rope_type if is_ours else None


def rope_type_for(name: str) -> str:
    """Return the `rope_type` that names a method of rope_patch in vLLM."""
    return PREFIX + name if name in _VLLM_ROPE_TYPES else name


def read_request(parameters: Mapping[str, Any]) -> RopeRequest:
    """Read one layer type's `rope_parameters` whose `rope_type` is a method's name.

    Raises:
        ValueError: A key is missing, unknown or out of range, or no table of cos and sin can hold
            the method.
        TypeError: A value has the wrong type.
    """
    name = method_name(parameters["rope_type"])
    assert name is not None
    given = {key: value for key, value in parameters.items() if value is not None}
    try:
        return _read_request(name, given)
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"rope_parameters with rope_type {parameters['rope_type']!r}: {error}"
        ) from error


def _read_request(name: str, given: dict[str, Any]) -> RopeRequest:
    for key in ("rope_theta", TRAINED_KEY):
        if key not in given:
            raise Refused(
                f"expected {key}, got nothing: write it beside rope_type, as `rope-patch export "
                "MODEL --engine vllm` prints it"
            )
    require_number("rope_theta", given["rope_theta"])
    require_tokens(TRAINED_KEY, given[TRAINED_KEY])
    method_class = find_method(name)
    if method_class is not None and issubclass(method_class, PositionMap):
        raise Refused(
            f"{name} compares tokens at mapped positions inside attention, which no table of cos "
            "and sin can say; serve it with transformers and rope_patch.load"
        )
    method = _build_method(name, method_class, given)
    if method.query_temperature is not None:
        raise Refused(
            f"temperature={method.temperature!r} acts on queries, and the plugin replaces tables "
            "of cos and sin; leave it out, or serve the model with transformers and rope_patch.load"
        )
    return RopeRequest(
        method=method,
        theta=float(given["rope_theta"]),
        trained_length=int(given[TRAINED_KEY]),
        base=tuple(float(number) for number in given.get(BASE_KEY, ())),
        sections=tuple(given.get("mrope_section", ())),
        interleaved=bool(given.get("mrope_interleaved", False)),
    )


def _build_method(name: str, method_class: type[Method] | None, given: Mapping[str, Any]) -> Method:
    own_keys = {"rope_type", TRAINED_KEY, BASE_KEY, *_MODEL_KEYS}
    options = {key: value for key, value in given.items() if key not in own_keys}
    if method_class is None:
        return build(name)  # raises, and names the closest one
    if method_class.is_dynamic:
        if not method_class.factor_is_option:
            # The largest length / trained length, from which vLLM derives its max_model_len.
            _require_factor(options.pop("factor", 1.0))
    elif not {"factor", "new_theta"} & options.keys() and name not in _WITHOUT_FACTOR:
        raise Refused("expected a factor (target length / trained length), got nothing")
    return build(name, **options)


def _require_factor(factor: Any) -> None:
    require_number("factor", factor)
    if factor < 1:
        raise Refused(f"factor must be at least 1, got {factor!r}")


def our_parameters(rope_parameters: Any) -> list[dict[str, Any]]:
    """Return the `rope_parameters` of the layer types that name a method of rope_patch.

    Args:
        rope_parameters: A text config's field: one dict, one for each layer type, or None.
    """
    if not isinstance(rope_parameters, Mapping):
        return []
    nested = [value for value in rope_parameters.values() if isinstance(value, Mapping)]
    return [
        dict(parameters)
        for parameters in nested or [rope_parameters]
        if method_name(parameters.get("rope_type")) is not None
    ]


def describe(request: RopeRequest) -> str:
    """Return a request in one line, for logs: the method, and options other than its defaults."""
    method = request.method
    options = {
        each.name: getattr(method, each.name)
        for each in fields(method)
        if each.name != "factor" and getattr(method, each.name) != each.default
    }
    return one_line(f"{method}{f' {options}' if options else ''}", 160)
