"""Measure the effect of patches on a tiny random model of one architecture, in eager attention."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from architectures.cached_rotation import assert_followed
from architectures.tiny_architectures import TRAINED, mentions_rotation, tiny_model
from helpers.rotary_modules import find_rotaries
from torch import nn

import rope_patch

FACTOR = 4
SHORT, LONG = 40, 150


@dataclass(frozen=True)
class Row:
    """One architecture's row of the table.

    Attributes:
        model_type: transformers' model_type.
        rotation: The special features of its rotation.
        static: "patched" for `yarn` and `linear`, or the reason of the refusal.
        dynamic: The same for `dynamic-yarn`.
    """

    model_type: str
    rotation: str
    static: str
    dynamic: str

    def to_dict(self) -> dict[str, str]:
        """Return the row as plain data."""
        return asdict(self)


def measure(model_type: str) -> Row:
    """Build a model, patch it in several ways, and check each patch.

    Raises:
        AssertionError: An accepted patch has a wrong effect.
    """
    if not mentions_rotation(model_type):
        return Row(model_type, "", "no rotary embedding", "")
    try:
        model = tiny_model(model_type)
        _logits(model, SHORT)
    except Exception as error:
        return Row(model_type, "", f"not built: {reason(error)}", "")
    static = _static(model)
    dynamic = _dynamic(model) if static == "patched" else ""
    return Row(model_type, _rotation(model), static, dynamic)


def _static(model: Any) -> str:
    buffers, scales = inv_freq_buffers(model), _softmax_scales(model)
    try:
        before = _logits(model, LONG)
    except (IndexError, RuntimeError):  # its table of positions is shorter
        before = _logits(model, SHORT)
    try:
        handle = rope_patch.patch(model, "linear", factor=FACTOR)
    except ValueError as error:
        assert_untouched(model, before, buffers)
        return f"refused: {reason(error)}"
    # Linear scaling needs no formula: all frequencies are a quarter of the original ones.
    for rotary in find_rotaries(model):
        for kind, prefix in rotary.prefixes.items():
            name = f"{prefix}inv_freq"
            expected = buffers[_path(model, rotary.module, name)]
            if kind in handle.geometries:
                expected = _start(handle, kind, expected) / FACTOR
            torch.testing.assert_close(getattr(rotary.module, name), expected, rtol=1e-5, atol=0)
    original_parameters = by_layer_type(handle.original_config.rope_parameters).values()
    if not any(parameters.get("mscale_all_dim") for parameters in original_parameters):
        assert _softmax_scales(model) == scales  # `linear` has no attention factor
    linear = _logits(model, LONG)
    _assert_other(linear, before)
    rope_patch.patch(model, "linear", factor=FACTOR, kernels="hf")
    torch.testing.assert_close(linear, _logits(model, LONG), rtol=0, atol=2e-4)
    handle = rope_patch.patch(model, "yarn", factor=FACTOR)
    unchanged = {name for name, scale in _softmax_scales(model).items() if scale == scales[name]}
    assert (len(unchanged) < len(scales)) == (handle.softmax_mscale != 1)
    for kind, frequencies in handle.frequencies.items():
        geometry = handle.geometries[kind]
        own = by_layer_type(handle.original_config.rope_parameters)[kind]
        if geometry.base and config_rope_type(own) == "yarn":
            inv_freq, mscale = _continued_yarn(geometry, own)
        else:
            inv_freq, mscale = _yarn(
                geometry.inv_freq(), geometry.theta, geometry.trained_length, FACTOR
            )
            mscale *= geometry.attention_factor * _config_mscale(model, handle)
        torch.testing.assert_close(frequencies.inv_freq, inv_freq, rtol=1e-9, atol=0)
        total = frequencies.attention_factor * handle.softmax_mscale
        assert total == _approximately(mscale)
        for rotary in find_rotaries(model):
            if kind in rotary.prefixes:
                live = getattr(rotary.module, f"{rotary.prefixes[kind]}inv_freq")
                torch.testing.assert_close(live, inv_freq.float(), rtol=1e-6, atol=0)
    _assert_other(_logits(model, LONG), before)
    handle.undo()
    assert_untouched(model, before, buffers)
    return "patched"


def _dynamic(model: Any) -> str:
    short, long, buffers = _logits(model, SHORT), _logits(model, LONG), inv_freq_buffers(model)
    geometry = next(
        iter(rope_patch.entry_points.check(model, "yarn", factor=2).geometries.values())
    )
    trained_length = None if geometry.trained_length == TRAINED else TRAINED
    try:
        handle = rope_patch.patch(model, "dynamic-yarn", trained_length=trained_length)
    except ValueError as error:
        assert_untouched(model, long, buffers)
        return f"refused: {reason(error)}"
    patched_short = _logits(model, SHORT)
    _assert_other(_logits(model, LONG), long)
    handle.undo()
    if replaces_scaling(handle):  # short texts then have the rotation before the config's scaling
        with rope_patch.patch(model, "default", factor=1, trained_length=trained_length):
            torch.testing.assert_close(patched_short, _logits(model, SHORT), rtol=0, atol=1e-5)
    else:
        assert torch.equal(patched_short, short)
    assert_untouched(model, long, buffers)
    assert_followed(model, _start)
    assert_untouched(model, long, buffers)
    return "patched"


def replaces_scaling(handle: Any) -> bool:
    """Return whether an extension replaces the config's scaling."""
    original_parameters = by_layer_type(handle.original_config.rope_parameters)
    return any(
        config_rope_type(original_parameters[kind]) != "default" and not geometry.base
        for kind, geometry in handle.geometries.items()
    )


def by_layer_type(parameters: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    """Return `rope_parameters` by layer type; flat entries beside layer types say nothing."""
    nested = {kind: inner for kind, inner in parameters.items() if isinstance(inner, dict)}
    return nested or {None: parameters}


def config_rope_type(parameters: dict[str, Any]) -> str:
    """Return the name of a config's own scaling."""
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _continued_yarn(geometry: Any, own: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Compute the one YaRN that continues a config's, and the mscale of cos, sin and softmax."""
    pair = torch.arange(geometry.rotary_dim // 2, dtype=torch.float64)
    unscaled = geometry.theta ** (-2 * pair / geometry.rotary_dim)
    factor, original = own["factor"] * FACTOR, own["original_max_position_embeddings"]
    truncate = own.get("truncate", True)
    inv_freq, mscale = _yarn(unscaled, geometry.theta, original, factor, truncate)
    if own.get("attention_factor") is not None:
        return inv_freq, own["attention_factor"]
    return inv_freq, mscale if own.get("mscale_all_dim") is None else 1.0


def _yarn(
    inv_freq: torch.Tensor, theta: float, trained: int, factor: float, truncate: bool = True
) -> tuple[torch.Tensor, float]:
    """Compute YaRN independently, for any monotone frequencies, by the rotations of each pair."""
    pairs = len(inv_freq)
    per_pair = math.log(theta) / pairs
    logs = [math.log(f) if f else -math.inf for f in inv_freq.tolist()]

    def pair_index(rotations: float) -> float:
        target = math.log(2 * math.pi * rotations / trained)
        if target >= logs[0]:
            return (logs[0] - target) / per_pair
        for i in range(pairs - 1):
            if logs[i] >= target > logs[i + 1]:
                if logs[i + 1] == -math.inf:
                    return i + (logs[i] - target) / per_pair
                return i + (logs[i] - target) / (logs[i] - logs[i + 1])
        return pairs - 1 + (logs[-1] - target) / per_pair

    low, high = pair_index(32), pair_index(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, 0.1 * math.log(factor) + 1


def _start(handle: Any, kind: str | None, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return the frequencies that an extension starts from: the unscaled or the running ones."""
    geometry = handle.geometries[kind]
    parameters = by_layer_type(handle.original_config.rope_parameters)[kind]
    scaling = config_rope_type(parameters)
    if scaling in ("default", "llama3", "proportional") or (scaling == "yarn" and geometry.base):
        return inv_freq
    pair = torch.arange(len(inv_freq), dtype=torch.float64)
    unscaled = geometry.theta ** (-pair / len(inv_freq))
    if scaling == "longrope":
        unscaled = unscaled / torch.tensor(parameters["long_factor"], dtype=torch.float64)
    return unscaled.float()


def _config_mscale(model: Any, handle: Any) -> float:
    """Return the mscale of the config's scaling, if the extension builds on it."""
    for kind, geometry in handle.geometries.items():
        parameters = by_layer_type(handle.original_config.rope_parameters)[kind]
        if geometry.base and handle.softmax_mscale != 1 and parameters.get("mscale_all_dim"):
            return 0.1 * parameters["mscale_all_dim"] * math.log(parameters["factor"]) + 1
    return 1.0


def _rotation(model: Any) -> str:
    """Describe an architecture's rotation from its config and its patch plan."""
    try:
        plan = rope_patch.entry_points.check(model, "linear", factor=FACTOR)
    except ValueError:
        return ""
    features = []
    if None not in plan.geometries:
        features.append(
            ", ".join([*plan.geometries, *(f"{k} left" for k in plan.unchanged_layer_types)])
        )
    geometry = next(iter(plan.geometries.values()))
    if plan.mla_attentions:
        features.append("MLA")
    elif geometry.rotary_dim < geometry.head_dim:
        features.append(f"{geometry.rotary_dim / geometry.head_dim:.0%} of each head")
    parameters = by_layer_type(plan.config.rope_parameters)[geometry.layer_type]
    if (scaling := config_rope_type(parameters)) != "default":
        features.append(f"own {scaling}, {'continued' if geometry.base else 'replaced'}")
    if any(hasattr(traits.rotary.module, "mrope_section") for traits in plan.rotaries):
        features.append("M-RoPE")
    if any(site.interleaved for site in plan.rotation_sites):
        features.append("interleaved")
    return "; ".join(features)


@torch.no_grad()
def _logits(model: Any, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 100, (1, length), generator=generator)
    return model(input_ids=ids, use_cache=False).logits


def inv_freq_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's frequencies, by name."""
    return {name: value.clone() for name, value in model.named_buffers() if "inv_freq" in name}


def _softmax_scales(model: nn.Module) -> dict[str, Any]:
    """Return the attribute `scaling` of every module."""
    return {
        name: vars(module)["scaling"]
        for name, module in model.named_modules()
        if isinstance(vars(module).get("scaling"), int | float)
    }


def _path(model: nn.Module, module: nn.Module, name: str) -> str:
    return next(f"{path}.{name}" for path, m in model.named_modules() if m is module)


def assert_untouched(model: Any, logits: torch.Tensor, buffers: dict[str, Any]) -> None:
    """Assert that a model has the logits of `_logits` and the frequencies that it had before."""
    assert torch.equal(_logits(model, logits.shape[1]), logits)
    now = inv_freq_buffers(model)
    assert now.keys() == buffers.keys()
    assert all(torch.equal(now[name], buffers[name]) for name in now)


def _assert_other(logits: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.isfinite(logits).all()
    assert (logits - other).abs().max() > 1e-3 * other.std()


def _approximately(value: float) -> Any:
    import pytest

    return pytest.approx(value, rel=1e-9)


def reason(error: Exception) -> str:
    """Return an error's message on one line."""
    return re.sub(r"\s+", " ", str(error) or type(error).__name__).strip()
