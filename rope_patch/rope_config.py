"""What a model's config says about its rotation, read once, from the config alone.

Live buffers are never consulted: `model.bfloat16()` silently rounds them.
"""

from __future__ import annotations

import math
from numbers import Real
from types import SimpleNamespace
from typing import Any

from rope_patch.geometry import Geometry

START_CHOICES = ("auto", "unscaled", "running")

# Scalings that a new method replaces unless told otherwise: it starts again from the unscaled
# frequencies at the original length. The others were trained in, so starting from the unscaled
# frequencies would undo training.
_DISCARDED_SCALINGS = ("default", "linear", "dynamic", "yarn")

# Architectures whose configs refuse every scaling but longrope.
LONGROPE_ONLY = ("phi3",)

# A `type` that transformers leaves beside the `rope_type` it makes of it (Qwen 2 VL, Phi 3).
_ALIASES = {"mrope": "default", "su": "longrope"}

# What transformers' scalings cannot do without, and the least that their numbers can be.
_REQUIRED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}
_LOWER_BOUNDS = {
    "factor": 1,
    "attention_factor": 0,
    "beta_fast": 0,
    "beta_slow": 0,
    "low_freq_factor": 0,
    "high_freq_factor": 0,
}


def read_geometries(
    config: Any, trained_length: int | None = None, start: str = "auto"
) -> dict[str | None, Geometry]:
    """Reads the geometry of every layer type from a transformers text config.

    Frequencies are the unscaled ones; the trained length is that of the start.

    Args:
        config: A decoder's config, as transformers 5 standardises it (`rope_parameters`).
        trained_length: Overrides what the config says about the trained length.
        start: See `patch`.

    Returns:
        One geometry a layer type, or a single one under None where all layers rotate alike. Layer
        types without rotation are left out.

    Raises:
        ValueError: The config has no RoPE, or says something about it that cannot be.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(
            f"{type(config).__name__} has no rope_parameters: expected a decoder with rotary "
            "position embeddings (Llama, Qwen, Gemma, ...)"
        )
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must be a dict, got {parameters!r} in the config")
    return {
        kind: _read_geometry(config, kind, spelled, trained_length, start)
        for kind, spelled in by_layer_type(parameters).items()
    }


def by_layer_type(parameters: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Splits `rope_parameters` into one dict a layer type (None where there is just one)."""
    nested: dict[str | None, dict[str, Any]] = {
        key: value for key, value in parameters.items() if isinstance(value, dict)
    }
    # A flat entry may be left over beside the layer types (DeepSeek-V4).
    return nested or {None: parameters}


def require_valid_rope_config(said: dict[str, Any]) -> None:
    """Finds what is wrong with the rotation in a config.json that transformers cannot read.

    Args:
        said: All of the file, or the decoder's part.

    Raises:
        ValueError: Something is; names the field.
    """
    text = said.get("text_config")
    text = text if isinstance(text, dict) else said
    spelled: Any = (
        text.get("rope_scaling") or text.get("rope_parameters") or {"rope_type": "default"}
    )
    if isinstance(spelled, dict):
        found = {
            kind: _with_defaults(text, inner) for kind, inner in by_layer_type(spelled).items()
        }
        spelled = found.get(None) or found
    named = type("config.json", (SimpleNamespace,), {})
    read_geometries(named(**{**text, "rope_parameters": spelled}))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {"default", *ROPE_INIT_FUNCTIONS}
    for kind in {config_rope_type(inner) for inner in by_layer_type(spelled).values()} - known:
        raise ValueError(
            f"rope_type must be one that transformers knows ({', '.join(sorted(known))}), got "
            f"{kind!r} in the config"
        )


def _with_defaults(text: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """With what transformers puts where nothing is said."""
    filled = {"rope_theta": text.get("rope_theta", 1e4)}
    if config_rope_type(parameters) != "default":
        filled["original_max_position_embeddings"] = text.get("max_position_embeddings")
    return {**filled, **parameters}


def config_rope_type(parameters: dict[str, Any]) -> str:
    """The scaling that a config itself asks for; "default" is none."""
    spelled = [parameters[name] for name in ("rope_type", "type") if parameters.get(name)]
    if len(spelled) == 2 and _ALIASES.get(str(spelled[1])) == spelled[0]:
        return str(spelled[0])
    if len({str(name) for name in spelled}) > 1:
        raise ValueError(
            f"the config names two scalings, rope_type={spelled[0]!r} and type={spelled[1]!r}: "
            "leave one of them out"
        )
    kind = spelled[0] if spelled else "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope_type must be a name such as 'yarn', got {kind!r} in the config")
    return kind


def extends_scaled_frequencies(parameters: dict[str, Any], start: str) -> bool:
    """Whether an extension starts from the frequencies that a model's own scaling made.

    Args:
        parameters: `rope_parameters` of one layer type.
        start: See `patch`.

    Raises:
        ValueError: `start` is none of `START_CHOICES`, or the scaling has no one set of
            frequencies.
    """
    if start not in START_CHOICES:
        raise ValueError(f"start must be one of {', '.join(START_CHOICES)}, got {start!r}")
    kind = config_rope_type(parameters)
    if kind == "default":
        return False
    if start == "running" and kind == "dynamic":
        raise ValueError(
            "start='running' needs frequencies that stay, and the config's own scaling, "
            "'dynamic', changes them with the length; use start='unscaled'"
        )
    return kind not in _DISCARDED_SCALINGS if start == "auto" else start == "running"


def _read_geometry(
    config: Any,
    kind: str | None,
    parameters: dict[str, Any],
    trained_length: int | None,
    start: str,
) -> Geometry:
    head_dim = _head_dim(config, kind)
    _require_rope_keys(parameters)
    share = parameters.get("partial_rotary_factor")
    share = 1.0 if share is None else _read_number(parameters, "partial_rotary_factor", least=0)
    if config_rope_type(parameters) == "proportional":
        share = 1.0  # there it says how many of the pairs turn, maybe none, not how many there are
    if int(head_dim * share) < 2:
        raise ValueError(
            f"partial_rotary_factor must leave at least one pair of the {head_dim} dimensions of a "
            f"head, got {share:g} in the config's rope_parameters"
        )
    if trained_length is None:
        trained_length = _trained_length(config, parameters, start)
    return Geometry(
        head_dim=head_dim,
        theta=_read_number(parameters, "rope_theta", least=1),
        trained_length=trained_length,
        rotary_dim=int(head_dim * share),
        layer_type=kind,
    )


def _head_dim(config: Any, kind: str | None) -> int:
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError:  # transformers will not say one size for all layers (Gemma 4)
        head_dim = config.per_layer_config[kind].head_dim
    if head_dim is None:
        for name in ("hidden_size", "num_attention_heads"):
            if not _is_count(getattr(config, name, None)):
                raise ValueError(
                    f"{type(config).__name__} says neither head_dim nor {name}, so the size of a "
                    f"head is unknown: {name} is {getattr(config, name, None)!r}"
                )
        head_dim = config.hidden_size // config.num_attention_heads
    if not _is_count(head_dim) or head_dim < 2:
        raise ValueError(
            f"head_dim must be a whole number, at least 2, got {head_dim!r} in "
            f"{type(config).__name__}"
        )
    return head_dim


def _trained_length(config: Any, parameters: dict[str, Any], start: str) -> int:
    kind = config_rope_type(parameters)
    full = getattr(config, "max_position_embeddings", None)
    original = parameters.get("original_max_position_embeddings")
    if original is None and kind != "default":
        original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and not _is_count(original):
        raise ValueError(
            "original_max_position_embeddings must be a whole number of tokens, at least 1, got "
            f"{original!r} in the config"
        )
    if extends_scaled_frequencies(parameters, start):
        lengths = [full] if isinstance(full, int) else []
        if kind in ("linear", "yarn") and original:  # some configs keep the original as `full`
            lengths.append(round(_read_number(parameters, "factor", least=1) * original))
        found = max(lengths, default=None)
    elif kind == "default":
        found = original or full
    elif original is None:
        raise ValueError(
            f"the checkpoint's own config already scales its rotation with {kind!r} and does not "
            "say for how many tokens it was trained before; pass trained_length=..., or "
            "start='running' to extend what the model runs with"
        )
    else:
        found = original
    if not _is_count(found):
        raise ValueError(
            f"{type(config).__name__} does not say on how many tokens the model was trained "
            f"(max_position_embeddings is {full!r:.40}); pass trained_length=..."
        )
    assert isinstance(found, int)
    return found


def _require_rope_keys(parameters: dict[str, Any]) -> None:
    """Refuses a scaling of transformers' own that is not spelled with what its formula needs."""
    kind = config_rope_type(parameters)
    needed = _REQUIRED_KEYS.get(kind, ())
    for name, least in _LOWER_BOUNDS.items():
        if kind in _REQUIRED_KEYS and (name in needed or parameters.get(name) is not None):
            _read_number(parameters, name, least=least)
    for name in ("long_factor", "short_factor"):
        value = parameters.get(name)
        if name in needed and not (
            isinstance(value, list | tuple)
            and value
            and all(_is_number(v) and v > 0 for v in value)
        ):
            raise ValueError(
                f"{name} must be a list of numbers above 0 in the config's rope_parameters, got "
                f"{'nothing' if value is None else repr(value)}"
            )
    if kind == "longrope" and len(parameters["long_factor"]) != len(parameters["short_factor"]):
        raise ValueError(
            "long_factor and short_factor must both have one number for each rotated pair, got "
            f"{len(parameters['long_factor'])} and {len(parameters['short_factor'])} in the config"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _read_number(parameters: dict[str, Any], name: str, *, least: float) -> float:
    value = parameters.get(name)
    if not _is_number(value) or float(value) < least:  # type: ignore[arg-type]
        got = "nothing" if value is None else repr(value)
        raise ValueError(
            f"{name} must be a number of at least {least:g} in the config's rope_parameters, got "
            f"{got}"
        )
    return float(value)  # type: ignore[arg-type]
