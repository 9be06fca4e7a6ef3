"""Parsing of a config's RoPE fields into `Geometry`.

Only the config is read. Live buffers are not, because `model.bfloat16()` silently rounds them.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from numbers import Real
from types import SimpleNamespace
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.original_config import require_known_start, trained_config_length
from rope_patch.trained_yarn import trained_yarn_evidence
from rope_patch.transformers_api.models import rope_functions
from rope_patch.utils.errors import Refused

START_CHOICES = ("auto", "unscaled", "running")

# rope_types whose meaning is transformers' own, also in versions that are too old to know them.
NATIVE_ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}

# Scalings that a new method replaces with start="auto": it extends the unscaled frequencies at the
# original length. Models were trained with the other scalings, so doing that would undo training.
# Of YaRN, `trained_yarn_evidence` decides; of a rotation that we trained, its record in the config.
_DISCARDED_SCALINGS = ("default", "linear", "dynamic", "yarn")

# Architectures whose configs accept no scaling but longrope.
LONGROPE_ONLY = ("phi3",)

# Values of `type` that transformers converts to a `rope_type`, keeping both (Qwen 2 VL, Phi 3).
_ALIASES = {"mrope": "default", "su": "longrope"}

ORIGINAL_LENGTH = "original_max_position_embeddings"  # the key of the tokens of pretraining

# The key of a temperature of queries (Ministral 3), which begins at the original length.
TEMPERATURE_KEY = "llama_4_scaling_beta"

# Required keys of transformers' scalings, and lower bounds of their numbers.
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
# Keys of `rope_parameters` that something reads: transformers, its architectures, or an engine.
KNOWN_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "alpha"),
        *("original_max_position_embeddings", "attention_factor", "attn_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "extrapolation_factor", "finetuned"),
        *("long_factor", "short_factor", "long_mscale", "short_mscale"),
        *("mrope_section", "mrope_interleaved", TEMPERATURE_KEY),
        "max_position_embeddings",  # nothing reads it, but Ministral 3's configs have it
    )
)
_NEAR = 0.75  # similarity, from 0 to 1, from which on a misspelt key is taken for a known one
# Two numbers of a scaling, the lower one first, with transformers' defaults.
_ASCENDING: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama3": (("low_freq_factor", None), ("high_freq_factor", None)),
    "yarn": (("beta_slow", 1.0), ("beta_fast", 32.0)),
}


def read_geometries(
    config: Any, trained_length: int | None = None, start: str = "auto"
) -> dict[str | None, Geometry]:
    """Read the geometry of every layer type from a transformers text config.

    Frequencies are unscaled; the trained length is that of the frequencies `start` selects.

    Args:
        config: A decoder's config, as transformers 5 standardises it (`rope_parameters`), without
            a patch that it was saved with (`original_config`).
        trained_length: Overrides the config's trained length.
        start: See `patch`.

    Returns:
        One geometry for each layer type with rotation, or a single one under None if all layers
        rotate alike.

    Raises:
        ValueError: The config has no RoPE, or invalid fields for it.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise Refused(
            f"{type(config).__name__} has no rope_parameters: expected a decoder with rotary "
            "position embeddings (Llama, Qwen, Gemma, ...)"
        )
    if not isinstance(parameters, dict):
        raise Refused(f"rope_parameters must be a dict, got {parameters!r} in the config")
    require_known_start(config, start)
    return {
        layer_type: _read_geometry(config, layer_type, layer_parameters, trained_length, start)
        for layer_type, layer_parameters in by_layer_type(parameters).items()
    }


def by_layer_type(parameters: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Split `rope_parameters` into one dict for each layer type (None if there is just one)."""
    nested: dict[str | None, dict[str, Any]] = {
        key: value for key, value in parameters.items() if isinstance(value, dict)
    }
    # Flat entries beside the layer types are leftovers (DeepSeek-V4).
    return nested or {None: parameters}


def misspelt_keys(parameters: Any) -> dict[str, str]:
    """Return the keys that nothing reads and that are nearly a known one, each with that one.

    Other unknown keys may be those of a model's own code, or of a method from outside.

    Args:
        parameters: `rope_parameters`, of one layer type or of all.
    """
    if not isinstance(parameters, dict):
        return {}
    near = {
        key: get_close_matches(key, KNOWN_KEYS, n=1, cutoff=_NEAR)
        for key, value in parameters.items()
        if isinstance(key, str) and key not in KNOWN_KEYS and not isinstance(value, dict)
    }
    return {key: matches[0] for key, matches in near.items() if matches}


def spelling_hint(parameters: Any, name: str | None = None) -> str:
    """Return " (did you mean 'factor' by 'facto'?)" for misspelt keys; "" without any.

    Args:
        parameters: `rope_parameters`, of one layer type or of all.
        name: The key that is missing; any if it is None.
    """
    found = [
        f"{right!r} by {wrong!r}"
        for wrong, right in misspelt_keys(parameters).items()
        if name in (None, right)
    ]
    return f" (did you mean {' and '.join(found)}?)" if found else ""


def require_valid_rope_config(config_dict: dict[str, Any]) -> None:
    """Raise if the RoPE fields of a config.json that transformers cannot read are invalid.

    Args:
        config_dict: The whole file, or the decoder's part; a file may hold anything.

    Raises:
        ValueError: A field is invalid; names it.
    """
    if not isinstance(config_dict, dict):
        raise Refused(f"config.json must hold an object ({{...}}), got {config_dict!r:.40}")
    text = config_dict.get("text_config")
    text = text if isinstance(text, dict) else config_dict
    heads = text.get("num_attention_heads", 1)
    if not _is_count(heads):
        raise Refused(
            f"num_attention_heads must be a whole number, at least 1, got {heads!r} in the config"
        )
    parameters: Any = (
        text.get("rope_scaling") or text.get("rope_parameters") or {"rope_type": "default"}
    )
    if isinstance(parameters, dict):
        completed = {
            layer_type: _with_defaults(text, layer_parameters)
            for layer_type, layer_parameters in by_layer_type(parameters).items()
        }
        parameters = completed.get(None) or completed
    # Named for error messages, which name the config's class.
    config_class = type("config.json", (SimpleNamespace,), {})
    read_geometries(config_class(**{**text, "rope_parameters": parameters}))
    known = {"default", *rope_functions()}
    rope_types = {config_rope_type(inner) for inner in by_layer_type(parameters).values()}
    for rope_type in rope_types - known:
        raise Refused(
            f"rope_type must be one that transformers knows ({', '.join(sorted(known))}), got "
            f"{rope_type!r} in the config"
        )


def _with_defaults(text: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return `parameters` with transformers' defaults for missing keys."""
    defaults = {"rope_theta": text.get("rope_theta", 1e4)}
    if config_rope_type(parameters) != "default":
        defaults["original_max_position_embeddings"] = text.get("max_position_embeddings")
    return {**defaults, **parameters}


def config_rope_type(parameters: dict[str, Any]) -> str:
    """Return the rope_type of a config's own scaling; "default" is none."""
    names = [parameters[key] for key in ("rope_type", "type") if parameters.get(key)]
    if len(names) == 2 and _ALIASES.get(str(names[1])) == names[0]:
        return str(names[0])
    if len({str(name) for name in names}) > 1:
        raise Refused(
            f"the config names two scalings, rope_type={names[0]!r} and type={names[1]!r}: "
            "leave one of them out"
        )
    rope_type = names[0] if names else "default"
    if not isinstance(rope_type, str):
        raise Refused(f"rope_type must be a name such as 'yarn', got {rope_type!r} in the config")
    return rope_type


def extends_scaled_frequencies(config: Any, parameters: dict[str, Any], start: str) -> bool:
    """Return whether an extension starts from the frequencies of the config's own scaling.

    Args:
        config: The text config.
        parameters: `rope_parameters` of one layer type.
        start: See `patch`.

    Raises:
        ValueError: `start` is not in `START_CHOICES`, or the scaling's frequencies change with the
            length.
    """
    if start not in START_CHOICES:
        raise Refused(f"start must be one of {', '.join(START_CHOICES)}, got {start!r}")
    rope_type = config_rope_type(parameters)
    if rope_type == "default":
        return False
    if start == "running" and rope_type == "dynamic":
        raise Refused(
            "start='running' needs frequencies that stay, and the config's own scaling, "
            "'dynamic', changes them with the length; use start='unscaled'"
        )
    if start != "auto":
        return start == "running"
    if trained_config_length(config) is not None:
        return True
    if rope_type == "yarn":
        return trained_yarn_evidence(config, parameters) is not None
    return rope_type not in _DISCARDED_SCALINGS


def _read_geometry(
    config: Any,
    layer_type: str | None,
    parameters: dict[str, Any],
    trained_length: int | None,
    start: str,
) -> Geometry:
    head_dim = _head_dim(config, layer_type)
    _require_rope_keys(parameters)
    share = parameters.get("partial_rotary_factor")
    share = 1.0 if share is None else _read_number(parameters, "partial_rotary_factor", least=0)
    if config_rope_type(parameters) == "proportional":
        share = (
            1.0  # there it is the share of pairs that rotate, maybe none; all dimensions are pairs
        )
    if int(head_dim * share) < 2:
        raise Refused(
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
        layer_type=layer_type,
    )


def _head_dim(config: Any, layer_type: str | None) -> int:
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError:  # layers have different sizes (Gemma 4)
        head_dim = config.per_layer_config[layer_type].head_dim
    if head_dim is None:
        for name in ("hidden_size", "num_attention_heads"):
            if not _is_count(getattr(config, name, None)):
                raise Refused(
                    f"{type(config).__name__} says neither head_dim nor {name}, so the size of a "
                    f"head is unknown: {name} is {getattr(config, name, None)!r}"
                )
        head_dim = config.hidden_size // config.num_attention_heads
    if not _is_count(head_dim) or head_dim < 2:
        raise Refused(
            f"head_dim must be a whole number, at least 2, got {head_dim!r} in "
            f"{type(config).__name__}"
        )
    return head_dim


def _trained_length(config: Any, parameters: dict[str, Any], start: str) -> int:
    rope_type = config_rope_type(parameters)
    max_positions = getattr(config, "max_position_embeddings", None)
    original = parameters.get("original_max_position_embeddings")
    if original is None and rope_type != "default":
        original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and not _is_count(original):
        raise Refused(
            "original_max_position_embeddings must be a whole number of tokens, at least 1, got "
            f"{original!r} in the config"
        )
    trained_length: Any = None if start == "unscaled" else trained_config_length(config)
    if trained_length is not None:
        pass  # rope_patch recorded it
    elif extends_scaled_frequencies(config, parameters, start):
        lengths = [max_positions] if isinstance(max_positions, int) else []
        if rope_type in ("linear", "yarn") and original:  # max_positions may be the original
            lengths.append(round(_read_number(parameters, "factor", least=1) * original))
        trained_length = max(lengths, default=None)
    elif rope_type == "default":
        trained_length = original or max_positions
    elif original is None:
        raise Refused(
            f"the checkpoint's own config already scales its rotation with {rope_type!r} and does "
            "not say for how many tokens it was trained before; pass trained_length=..., or "
            "start='running' to extend what the model runs with"
        )
    else:
        trained_length = original
    if not _is_count(trained_length):
        raise Refused(
            f"{type(config).__name__} does not say on how many tokens the model was trained "
            f"(max_position_embeddings is {max_positions!r:.40}); pass trained_length=..."
        )
    assert isinstance(trained_length, int)
    return trained_length


def _require_rope_keys(parameters: dict[str, Any]) -> None:
    """Raise if a scaling of transformers lacks a key of its formula or has an invalid value."""
    rope_type = config_rope_type(parameters)
    required = _REQUIRED_KEYS.get(rope_type, ())
    for name, least in _LOWER_BOUNDS.items():
        if rope_type in _REQUIRED_KEYS and (name in required or parameters.get(name) is not None):
            _read_number(parameters, name, least=least)
    if rope_type in _ASCENDING:
        (lowest, low), (highest, high) = (
            (name, float(default if (value := parameters.get(name)) is None else value))
            for name, default in _ASCENDING[rope_type]
        )
        if not low < high:
            raise Refused(
                f"{lowest} must be below {highest} in the config's rope_parameters, got "
                f"{lowest}={low:g} and {highest}={high:g}"
            )
    for name in ("long_factor", "short_factor"):
        value = parameters.get(name)
        if name in required and not (
            isinstance(value, list | tuple)
            and value
            and all(_is_number(v) and v > 0 for v in value)
        ):
            raise Refused(
                f"{name} must be a list of numbers above 0 in the config's rope_parameters, got "
                f"{f'nothing{spelling_hint(parameters, name)}' if value is None else repr(value)}"
            )
    if rope_type == "longrope" and len(parameters["long_factor"]) != len(
        parameters["short_factor"]
    ):
        raise Refused(
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
    except OverflowError:  # an integer beyond the range of floats
        return False


def _read_number(parameters: dict[str, Any], name: str, *, least: float) -> float:
    value = parameters.get(name)
    if not _is_number(value) or float(value) < least:  # type: ignore[arg-type]
        got = f"nothing{spelling_hint(parameters, name)}" if value is None else repr(value)
        raise Refused(
            f"{name} must be a number of at least {least:g} in the config's rope_parameters, got "
            f"{got}"
        )
    return float(value)  # type: ignore[arg-type]
