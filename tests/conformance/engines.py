"""Restate formulas of other engines in plain Python floats, from their code.

There is one small function for each formula that differs from ours; no line is copied.
test_conformance_installed.py runs the engines that can be installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from formulas import Rotation, blend, default, longrope, ramp, ramp_ends, yarn_attention_factor

# --- mlx-lm, mlx_lm/models/rope_utils.py, read at d78bf58 and run at 0.32.2


def mlx_yarn(at: Any, factor: float, mscale: float = 1, all_dim: float = 0) -> Rotation:
    """Blend periods harmonically and always truncate; ignore both attention factors."""
    share = ramp(at, *ramp_ends(at, 32, 1))
    periods = [1 / f for f in default(at)[0]]
    mixed = [
        p * factor * p / (factor * p * (1 - s) + p * s) for p, s in zip(periods, share, strict=True)
    ]
    return [1 / p for p in mixed], yarn_attention_factor(factor, mscale) / yarn_attention_factor(
        factor, all_dim
    )


def mlx_llama3(at: Any, factor: float) -> Rotation:
    """Scale periods instead of frequencies."""
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
    """Use the long factors for all lengths; the factor is `full` over the trained length."""
    del short
    return longrope(at, full / at.trained_length, long)


def mlx_proportional(at: Any, share: float) -> Rotation:
    """Round to dimensions first, so that an odd number of them makes one more pair rotate."""
    plain, _ = default(at)
    rotating = len(range(0, int(share * at.rotary_dim), 2))
    return [f if i < rotating else 0.0 for i, f in enumerate(plain)], 1.0


# --- vLLM, vllm/model_executor/layers/rotary_embedding, read at 0.33.0


def vllm_ntk(at: Any, factor: float) -> Rotation:
    """Compute `ntk` without `mixed_b`: theta times the factor, all pairs over factor^(2 / R)."""
    size = at.rotary_dim
    return [f / factor ** (2 / size) for f in default(at, at.theta * factor)[0]], 1.0


def vllm_dynamic(at: Any, factor: float) -> Rotation:
    """Use one base for all lengths: vLLM before pull request 41277, and SGLang 0.5.23."""
    size = at.rotary_dim
    grown = factor * factor - (factor - 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


def vllm_dynamic_since(at: Any, factor: float, trained: int | None = None) -> Rotation:
    """Compute it as after 41277; without `max_trained_positions`, take the model's length."""
    size, full = at.rotary_dim, at.trained_length
    grown = factor * full / (trained or full) - (factor - 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


def vllm_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], served: int | None = None
) -> Rotation:
    """Use the long factors for all lengths if more than trained is served; ignore `factor`."""
    stretch = long if (served or full) > at.trained_length else short
    return longrope(at, full / at.trained_length, stretch)


# --- SGLang, python/sglang/srt/layers/rotary_embedding, read at 0.5.23


def sglang_attention(
    factor: float, mscale: float | None, all_dim: float | None, attn_factor: float = 1
) -> float:
    """Return yarn's attention factor: a ratio if both are given, even 0; times `attn_factor`."""
    if mscale is not None and all_dim is not None:
        return (
            yarn_attention_factor(factor, mscale)
            / yarn_attention_factor(factor, all_dim)
            * attn_factor
        )
    return yarn_attention_factor(factor) * attn_factor


def sglang_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], tokens: int
) -> Rotation:
    """Use the long factors from one position above the trained length: one token late."""
    stretch = long if tokens - 1 > at.trained_length else short
    return longrope(at, full / at.trained_length, stretch)


# --- llama.cpp, ggml's rope and src/llama-context.cpp, read after pull request 17945


def llama_cpp_yarn(at: Any, factor: float, all_dim: float = 0) -> Rotation:
    """Compute angles by repeated products; cancel the kernel's magnitude, then apply mscale."""
    step, angle, frequencies = at.theta ** (-2 / at.rotary_dim), 1.0, []
    low, high = ramp_ends(at, 32, 1)
    for i in range(at.rotary_dim // 2):
        kept_share = 1 - min(max((i - low) / max(0.001, high - low), 0.0), 1.0)
        frequencies.append(angle / factor * (1 - kept_share) + angle * kept_share)
        angle *= step
    in_kernel = 1 + 0.1 * math.log(factor)
    configured_factor = (
        yarn_attention_factor(factor)
        / (yarn_attention_factor(factor, all_dim) if all_dim else 1)
        / in_kernel
    )
    return frequencies, configured_factor * in_kernel


def llama_cpp_llama3(at: Any, factor: float) -> Rotation:
    """Divide each frequency by its divisor, which the converter stores."""
    divisors = []
    for frequency in default(at)[0]:
        rotations = at.trained_length * frequency / (2 * math.pi)
        smooth = min(max((rotations - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return [f / d for f, d in zip(default(at)[0], divisors, strict=True)], 1.0


# --- unsloth, unsloth/models/llama.py, read at 015bdef


def unsloth_longrope(
    at: Any, full: int, short: Sequence[float], long: Sequence[float], tokens: int
) -> Rotation:
    """Use the short factors below the trained length, but not at it."""
    stretch = short if tokens < at.trained_length else long
    return longrope(at, full / at.trained_length, stretch)


# --- litgpt, litgpt/model.py, run at 0.5.13


def litgpt_yarn(at: Any, factor: float, mscale: float | None = None) -> Rotation:
    """Reverse the ramp, clamped to R / 2 - 1; no attention factor without mscale."""
    share = ramp(at, *ramp_ends(at, 32, 1, top=at.rotary_dim // 2 - 1))
    return blend(at, factor, [1 - s for s in share]), yarn_attention_factor(
        factor, mscale
    ) if mscale else 1.0


# --- KerasHub, keras_hub/src/layers/modeling/rotary_embedding.py, run at 0.32.0


def keras_dynamic(at: Any, factor: float) -> Rotation:
    """Compute `dynamic`: divide every pair by the number that elsewhere multiplies theta."""
    size = at.rotary_dim
    return [f / factor ** (size / (size - 2)) for f in default(at)[0]], 1.0


# --- LMDeploy's TurboMind, as quoted in its issue 536


def lmdeploy_ntk(at: Any, tokens: int) -> Rotation:
    """Grow in powers of two, above the factor of the length."""
    size = at.rotary_dim
    grown = max(2 ** math.ceil(math.log2(tokens / at.trained_length) + 1) - 1, 1)
    return default(at, at.theta * grown ** (size / (size - 2)))


# --- jquesnelle/yarn, scaled_rope, read at 995db5b


def yarn_repo_llama(at: Any, factor: float) -> Rotation:
    """Use theta 10,000 for all configs, as modeling_llama_yarn.py."""
    low, high = (at.rotary_dim / 2 * math.log(at.trained_length / (2 * math.pi * rotations), 1e4)
                 for rotations in (32, 1))  # fmt: skip
    share = ramp(at, max(math.floor(low), 0), min(math.ceil(high), at.rotary_dim - 1))
    plain = default(at, 1e4)[0]
    return [
        f * (1 - s + s / factor) for f, s in zip(plain, share, strict=True)
    ], yarn_attention_factor(factor)


def yarn_repo_mistral(at: Any, factor: float) -> Rotation:
    """Use other betas and a smaller attention factor, as modeling_mistral_yarn.py."""
    return blend(at, factor, ramp(at, *ramp_ends(at, 128, 2))), yarn_attention_factor(
        factor, slope=0.07
    )


# --- DeepSeek-V3's own inference/model.py, read at 9b4e978


def deepseek_yarn(at: Any, factor: float, full: int) -> Rotation:
    """Scale only if more than the original length is allocated; cos and sin have no factor."""
    share = (
        ramp(at, *ramp_ends(at, 32, 1))
        if full > at.trained_length
        else [0.0] * (at.rotary_dim // 2)
    )
    return blend(at, factor, share), 1.0


# --- microsoft/LongRoPE, evolution/search.py, read at c9e56aa


def longrope_start(at: Any, factor: float) -> Rotation:
    """Return the search's "YaRN" start: a blend of stretches; YaRN blends frequencies."""
    share = ramp(at, *ramp_ends(at, 32, 1))
    return [f / (1 - s + s * factor) for f, s in zip(default(at)[0], share, strict=True)], 1.0


# --- transformers, modeling_rope_utils.py, before pull request 40320 (4.56)


def transformers_4_factor(full: int, original: int) -> float:
    """Return YaRN's factor, which ignores the config's factor."""
    return full / original
