"""DeepSeek-V4's rotation for other engines: a theta for windows, theta and YaRN for the rest.

transformers 5 nests the two rotations as "main" (sliding-window layers) and "compress" (layers with
compressed keys). vLLM reads them nested or flat (models/deepseek_v4/common/rope.py of 0.30 to
0.33), SGLang 0.5.23 (models/deepseek_v4.py) and mlx-vlm 0.7.10 (models/deepseek_v4/language.py)
flat. All three take every scaling there for YaRN with a truncated ramp, leave cos and sin unscaled,
and read no scaling of the windows.
"""

from __future__ import annotations

from typing import Any

from rope_patch.exporting.target import LayerRotation, Target

MODEL_TYPE = "deepseek_v4"
PUBLISHED_NOTE = (
    "for the published config.json, which has compress_ratios; transformers 5 saves layer_types "
    "instead, which this engine does not read"
)
_THETAS = {"rope_theta": "main", "compress_rope_theta": "compress"}
_YARN_KEYS = ("rope_type", "factor", "original_max_position_embeddings")


def layer_fields(target: Target, engine: str, layer_type: str | None) -> dict[str, Any]:
    """Return the fields of one layer type, as transformers nests them.

    Raises:
        ValueError: The engine has no form for the rotation.
    """
    rotation = target.rotations[layer_type]
    parameters = rotation.parameters
    if rotation.scaling == "default":
        return dict(parameters)
    if layer_type == "compress" and _is_readable_yarn(rotation):
        return {"beta_fast": 32.0, "beta_slow": 1.0, **parameters, "attention_factor": 1.0}
    raise target.refuse(
        engine,
        "DeepSeek-V4 takes there a new theta, or YaRN on its compressed branches with an attention "
        "factor of 1 and a truncated ramp; use yarn with attention_factor=1, or ntk or abf on a "
        "rotation without a scaling",
    )


def changed_thetas(target: Target) -> dict[str, float]:
    """Return the thetas that engines read beside `rope_parameters`, if they change."""
    thetas = {name: target.rotations[layer_type].theta for name, layer_type in _THETAS.items()}
    return {name: theta for name, theta in thetas.items() if getattr(target.text, name) != theta}


def flat_fields(target: Target, engine: str) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return the thetas, by the names of config.json, and the YaRN; None without one.

    Raises:
        ValueError: The engine has no form for the rotation.
    """
    fields = {kind: layer_fields(target, engine, kind) for kind in target.rotations}
    thetas = {name: target.rotations[layer_type].theta for name, layer_type in _THETAS.items()}
    compress = fields["compress"]
    if target.rotations["compress"].scaling == "default":
        return thetas, None
    return thetas, {key: compress[key] for key in (*_YARN_KEYS, "beta_fast", "beta_slow")}


def _is_readable_yarn(rotation: LayerRotation) -> bool:
    return (
        rotation.scaling == "yarn"
        and rotation.attention_factor == 1
        and rotation.parameters.get("truncate", True)
    )
