"""Formulas of other engines, restated in plain Python floats from their code.

One small function for each formula that is an engine's own. No line is theirs. Those that can be
installed are run beside these in test_conformance_installed.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from formulas import Rotation, blend, default, ends, law, longrope, ramp

# --- mlx-lm, mlx_lm/models/rope_utils.py, read at d78bf58 and run at 0.32.2


def mlx_yarn(at: Any, factor: float, mscale: float = 1, all_dim: float = 0) -> Rotation:
    """Blends periods harmonically, always truncates; knows neither of the attention factors."""
    share = ramp(at, *ends(at, 32, 1))
    periods = [1 / f for f in default(at)[0]]
    mixed = [
        p * factor * p / (factor * p * (1 - s) + p * s) for p, s in zip(periods, share, strict=True)
    ]
    return [1 / p for p in mixed], law(factor, mscale) / law(factor, all_dim)


def mlx_llama3(at: Any, factor: float) -> Rotation:
    """Works on periods."""
    scaled = []
    for period in (1 / f for f in default(at)[0]):
        wavelength = 2 * math.pi * period
        if wavelength > at.trained_length:
            period *= factor
        elif wavelength > at.trained_length / 4:
            smooth = (at.trained_length / wavelength - 1) / 3
            period /= (1 - smooth) / factor + smooth
        scaled.append(1 / period)
    return scaled, 1.0


def mlx_longrope(at: Any, full: int, short: Sequence[float], long: Sequence[float]) -> Rotation:
    """The long stretches for every length; the factor is `full` over the trained length."""
    del short
    return longrope(at, full / at.trained_length, long)


def mlx_proportional(at: Any, share: float) -> Rotation:
    """Rounds to dimensions first, so an odd number of them makes one more pair turn."""
    plain, _ = default(at)
    turning = len(range(0, int(share * at.rotary_dim), 2))
    return [f if i < turning else 0.0 for i, f in enumerate(plain)], 1.0


# --- vLLM, vllm/model_executor/layers/rotary_embedding, read at 0.33.0


def vllm_ntk(at: Any, factor: float) -> Rotation:
    """`ntk` without `mixed_b`: theta times the factor, then every pair by factor^(2 / R)."""
    size = at.rotary_dim
    return [f / factor ** (2 / size) for f in default(at, at.theta * factor)[0]], 1.0


def vllm_dynamic(at: Any, factor: float) -> Rotation:
    """Until pull request 41277, and SGLang 0.5.23: one base for every length."""
    size = at.rotary_dim
    grown = factor * factor - (factor - 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


def vllm_dynamic_since(at: Any, factor: float, trained: int | None = None) -> Rotation:
    """Since then; `max_trained_positions` is the model's own length unless the config names it."""
    size, full = at.rotary_dim, at.trained_length
    grown = factor * full / (trained or full) - (factor - 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


def vllm_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], served: int | None = None
) -> Rotation:
    """Long for all lengths where more is served than was trained; no `factor` is read."""
    stretch = long if (served or full) > at.trained_length else short
    return longrope(at, full / at.trained_length, stretch)


# --- SGLang, python/sglang/srt/layers/rotary_embedding, read at 0.5.23


def sglang_attention(
    factor: float, mscale: float | None, all_dim: float | None, attn_factor: float = 1
) -> float:
    """Of `yarn`: a ratio where both are given, be they 0; multiplied by `attn_factor`."""
    if mscale is not None and all_dim is not None:
        return law(factor, mscale) / law(factor, all_dim) * attn_factor
    return law(factor) * attn_factor


def sglang_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], tokens: int
) -> Rotation:
    """Long from the first position above the trained length on: one token later than others."""
    stretch = long if tokens - 1 > at.trained_length else short
    return longrope(at, full / at.trained_length, stretch)


# --- llama.cpp, ggml's rope and src/llama-context.cpp, read after pull request 17945


def llama_cpp_yarn(at: Any, factor: float, all_dim: float = 0) -> Rotation:
    """Angles by repeated products; the kernel's magnitude is cancelled, then set by mscale."""
    step, angle, frequencies = at.theta ** (-2 / at.rotary_dim), 1.0, []
    low, high = ends(at, 32, 1)
    for i in range(at.rotary_dim // 2):
        kept_share = 1 - min(max((i - low) / max(0.001, high - low), 0.0), 1.0)
        frequencies.append(angle / factor * (1 - kept_share) + angle * kept_share)
        angle *= step
    in_kernel = 1 + 0.1 * math.log(factor)
    configured_factor = law(factor) / (law(factor, all_dim) if all_dim else 1) / in_kernel
    return frequencies, configured_factor * in_kernel


def llama_cpp_llama3(at: Any, factor: float) -> Rotation:
    """The converter stores each pair's divisor; the kernel divides by it."""
    divisors = []
    for frequency in default(at)[0]:
        turns = at.trained_length * frequency / (2 * math.pi)
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return [f / d for f, d in zip(default(at)[0], divisors, strict=True)], 1.0


# --- unsloth, unsloth/models/llama.py, read at 015bdef


def unsloth_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], tokens: int
) -> Rotation:
    """Short below the trained length only, not at it."""
    stretch = short if tokens < at.trained_length else long
    return longrope(at, full / at.trained_length, stretch)


# --- litgpt, litgpt/model.py, run at 0.5.13


def litgpt_yarn(at: Any, factor: float, mscale: float | None = None) -> Rotation:
    """The ramp the other way round, clamped to R / 2 - 1; no attention factor without mscale."""
    share = ramp(at, *ends(at, 32, 1, top=at.rotary_dim // 2 - 1))
    return blend(at, factor, [1 - s for s in share]), law(factor, mscale) if mscale else 1.0


# --- KerasHub, keras_hub/src/layers/modeling/rotary_embedding.py, run at 0.32.0


def keras_dynamic(at: Any, factor: float) -> Rotation:
    """`dynamic`: every pair divided, by what elsewhere multiplies theta."""
    size = at.rotary_dim
    return [f / factor ** (size / (size - 2)) for f in default(at)[0]], 1.0


# --- LMDeploy's TurboMind, as quoted in its issue 536


def lmdeploy_ntk(at: Any, tokens: int) -> Rotation:
    """Growth in powers of two, above what the length asks for."""
    size = at.rotary_dim
    grown = max(2 ** math.ceil(math.log2(tokens / at.trained_length) + 1) - 1, 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


# --- jquesnelle/yarn, scaled_rope, read at 995db5b


def yarn_repo_llama(at: Any, factor: float) -> Rotation:
    """modeling_llama_yarn.py builds its YaRN without the config's theta: always 10,000."""
    low, high = (at.rotary_dim / 2 * math.log(at.trained_length / (2 * math.pi * turns), 1e4)
                 for turns in (32, 1))  # fmt: skip
    share = ramp(at, max(math.floor(low), 0), min(math.ceil(high), at.rotary_dim - 1))
    plain = default(at, 1e4)[0]
    return [f * (1 - s + s / factor) for f, s in zip(plain, share, strict=True)], law(factor)


def yarn_repo_mistral(at: Any, factor: float) -> Rotation:
    """modeling_mistral_yarn.py: other betas, and a flatter law of attention."""
    return blend(at, factor, ramp(at, *ends(at, 128, 2))), law(factor, slope=0.07)


# --- DeepSeek-V3's own inference/model.py, read at 9b4e978


def deepseek_yarn(at: Any, factor: float, full: int) -> Rotation:
    """Scales only where more than the original length is allocated; cos and sin stay."""
    share = ramp(at, *ends(at, 32, 1)) if full > at.trained_length else [0.0] * (at.rotary_dim // 2)
    return blend(at, factor, share), 1.0


# --- microsoft/LongRoPE, evolution/search.py, read at c9e56aa


def longrope_start(at: Any, factor: float) -> Rotation:
    """The search's "YaRN" start: a blend of stretches, where YaRN blends frequencies."""
    share = ramp(at, *ends(at, 32, 1))
    return [f / (1 - s + s * factor) for f, s in zip(default(at)[0], share, strict=True)], 1.0


# --- transformers, modeling_rope_utils.py, before pull request 40320 (4.56)


def transformers_4_factor(full: int, original: int) -> float:
    """YaRN's factor, whatever the config's own said."""
    return full / original
