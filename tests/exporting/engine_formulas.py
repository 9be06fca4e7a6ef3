"""Restate in float64 how other engines rotate by a config, from their code.

Each function returns (radians per token of every pair, multiplier of cos and sin), or raises
`Unread` if the engine would stop or ignore the config.
"""

import math

import numpy as np


class Unread(Exception):
    """The engine does not support a config."""


def need(condition, message):
    if not condition:
        raise Unread(message)


def plain(theta, size):
    return theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def mscale(factor, weight=1.0):
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_ramp(theta, size, original, fast, slow, truncate=True):
    """Return the share of interpolation of each pair: 1 if interpolated, 0 if unchanged."""

    def pair(rotations):
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)


def yarn(theta, size, factor, original, fast=32, slow=1, truncate=True):
    ramp = yarn_ramp(theta, size, original, fast, slow, truncate)
    return plain(theta, size) * (1 - ramp) + plain(theta, size) / factor * ramp


def llama3(theta, size, factor, low, high, original):
    scaled_freqs = []
    for frequency in plain(theta, size):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled_freqs.append(frequency)
        elif wavelength > original / low:
            scaled_freqs.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled_freqs.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled_freqs)


def su(length, original):
    """Return LongRoPE's attention factor from two lengths."""
    scale = length / original
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))


def head_size(config):
    size = config.get("head_dim")
    return size or config["hidden_size"] // config["num_attention_heads"]


def vllm(config, rope, max_model_len, release):
    """Restate model_executor/layers/rotary_embedding/__init__.py:get_rope and its classes.

    Args:
        config: The text config, a dict.
        rope: `rope_parameters` of the layer.
        max_model_len: --max-model-len.
        release: "old" as of 926c71f (2025-11) to 0.29, "new" as of 0.30 to 0.33.
    """
    if config["model_type"] == "gpt_oss":  # models/gpt_oss.py makes its own dict
        names = ("rope_theta", "factor", "original_max_position_embeddings")
        names += ("beta_fast", "beta_slow")
        need(set(names) <= rope.keys(), "KeyError")
        truncate = rope.get("truncate", True)
        rope = {"rope_type": "yarn", "truncate": truncate, **{name: rope[name] for name in names}}
    positions = config["max_position_embeddings"]
    need(positions >= max_model_len, "max_model_len is greater than the derived one")
    share = rope.get("partial_rotary_factor", 1.0)
    need(0 < share <= 1, "partial_rotary_factor must be between 0 and 1")
    theta, size = rope.get("rope_theta", 10000), int(head_size(config) * share)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain(theta, size), 1.0
    need("mrope_section" not in rope or kind == "yarn", "one position a token")
    if kind == "linear":
        return plain(theta, size) / rope["factor"], 1.0
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        original = rope["original_max_position_embeddings"]
        return llama3(theta, size, *(rope[name] for name in names), original), 1.0
    if kind == "yarn":
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
        need(factor * original >= max_model_len, "no cos and sin for the last positions")
        if release == "old":
            attention = mscale(factor) * rope.get("attn_factor", 1)
        elif rope.get("attention_factor") is not None:
            attention = rope["attention_factor"]
        elif rope.get("mscale") and rope.get("mscale_all_dim"):
            attention = mscale(factor, rope["mscale"]) / mscale(factor, rope["mscale_all_dim"])
        else:
            attention = mscale(factor)
        truncate = rope.get("truncate", True)
        return yarn(theta, size, factor, original, fast, slow, truncate), attention
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        length = "long" if max_model_len > original else "short"
        attention = rope.get(f"{length}_mscale")
        if attention is None:
            attention = su(positions, original)
        stretch = np.array(rope[f"{length}_factor"], dtype=np.float64)
        return plain(theta, size) / stretch, attention
    raise Unread(f"Unknown RoPE scaling type {kind}")


def vllm_deepseek_v4(config, kind, max_model_len):
    """Restate models/deepseek_v4/common/rope.py and DeepseekV4ScalingRotaryEmbedding of 0.33.0.

    Args:
        config: The config, a dict.
        kind: "main" for sliding-window layers, "compress" for those with a compressor.
        max_model_len: --max-model-len.
    """
    positions = config["max_position_embeddings"]
    need(positions >= max_model_len, "max_model_len is greater than the derived one")
    compresses = kind == "compress"
    rope = dict(config["rope_parameters"][kind])
    theta = config["compress_rope_theta" if compresses else "rope_theta"]
    if not compresses or rope["rope_type"] == "default":
        rope |= {"factor": 1.0, "original_max_position_embeddings": positions}
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    need(factor * original >= max_model_len, "no cos and sin for the last positions")
    betas = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
    attention = mscale(factor, 0) / mscale(factor, 0)
    return yarn(theta, config["qk_rope_head_dim"], factor, original, *betas), attention


def sglang(config, rope, context_length, sliding=None):
    """Restate srt/layers/rotary_embedding/factory.py:get_rope, models/gemma3_causal.py of 0.5.23.

    Args:
        config: The text config, a dict.
        rope: `rope_parameters`, whole.
        context_length: --context-length.
        sliding: For Gemma 3, whether the layer has a window.
    """
    if config["model_type"] == "gemma3_text":
        if not sliding:  # Gemma3RotaryEmbedding: transformers' functions on the inner dict
            inner = dict(rope["full_attention"])
            return transformers4({**config, "rope_scaling": inner, **inner})
        rope = {"rope_type": "default", "rope_theta": rope["sliding_attention"]["rope_theta"]}
    theta, kind = rope["rope_theta"], rope["rope_type"]
    size = int(head_size(config) * (config.get("partial_rotary_factor") or 1))
    if kind == "default":
        return plain(theta, size), 1.0
    need("mrope_section" not in rope or kind == "yarn", "one position a token")
    factor = rope.get("factor", 1.0)
    if kind == "linear":
        return plain(theta, size) / factor, 1.0
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        ends = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
        return llama3(theta, size, factor, *ends, original), 1.0
    if kind == "yarn":
        if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
            attention = mscale(factor, rope["mscale"]) / mscale(factor, rope["mscale_all_dim"])
        else:
            attention = mscale(factor)
        need(factor * original >= context_length, "later rows of cos and sin lack the attention")
        betas = rope.get("beta_fast", 32), rope.get("beta_slow", 1), rope.get("truncate", True)
        return yarn(theta, size, factor, original, *betas), attention * rope.get("attn_factor", 1)
    if kind == "longrope":
        # Positions below the original length take the short rows; the original length a wrong one.
        need(context_length <= original, "the row at the original length is another's")
        attention = rope.get("short_mscale") or su(config["max_position_embeddings"], original)
        return plain(theta, size) / np.array(rope["short_factor"], dtype=np.float64), attention
    raise Unread(f"Unknown RoPE scaling type {kind}, or one whose rotary_dim is another's")


def mlx(config, sliding=None):
    """Restate mlx_lm/models/rope_utils.py, phi3.py, gemma3_text.py, gpt_oss.py (d78bf58).

    Args:
        config: config.json, a dict.
        sliding: For Gemma 3, whether the layer has a window.
    """
    size, theta = head_size(config), config.get("rope_theta", 10000)
    scaling, length = config.get("rope_scaling"), config["max_position_embeddings"]
    kind = config["model_type"]
    if kind == "phi3":
        size = int(size * config.get("partial_rotary_factor", 1.0))
        if not scaling:
            return plain(theta, size), 1.0
        need({"long_factor", "type"} <= scaling.keys(), "rope_scaling must contain keys")
        need(scaling["type"] in ("longrope", "su", "linear"), "scaling is set to false")
        if scaling["type"] == "linear":
            return plain(theta, size) / scaling["factor"], 1.0
        stretch = np.array(scaling["long_factor"], dtype=np.float64)
        return plain(theta, size) / stretch, su(length, config["original_max_position_embeddings"])
    if kind == "gemma3_text" and sliding:
        return plain(config.get("rope_local_base_freq", 10000.0), size), 1.0
    scaling = scaling or {}
    name = scaling.get("type") or scaling.get("rope_type", "default")
    if name == "default":
        return plain(theta, size), 1.0
    if name == "linear":
        return plain(theta, size) / scaling["factor"], 1.0
    if name == "llama3":
        ends = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
        original = scaling.get("original_max_position_embeddings", 8192)
        return llama3(theta, size, scaling["factor"], *ends, original), 1.0
    if name == "yarn":
        factor, original = scaling["factor"], scaling.get("original_max_position_embeddings", 4096)
        betas = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
        attention = mscale(factor, scaling.get("mscale", 1)) / mscale(
            factor, scaling.get("mscale_all_dim", 0)
        )
        return yarn(theta, size, factor, original, *betas), attention
    if name == "longrope":
        need(kind != "gpt_oss", "it is not given max_position_embeddings")
        stretch = np.array(scaling["long_factor"], dtype=np.float64)
        original = scaling["original_max_position_embeddings"]
        return plain(theta, size) / stretch, su(length, original)
    if name == "proportional":
        rotary_size = int(size * scaling.get("partial_rotary_factor", 1.0))
        scaled_freqs = plain(theta, size) / scaling.get("factor", 1.0)
        scaled_freqs[len(range(0, rotary_size, 2)) :] = 0
        return scaled_freqs, 1.0
    raise Unread(f"Unsupported RoPE type {name}")


def transformers4(config, sliding=None):
    """Restate modeling_rope_utils.py, models/gemma3 and models/phi3 of 4.57.6.

    Args:
        config: config.json, a dict.
        sliding: For Gemma 3, whether the layer has a window.
    """
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    if sliding:
        theta, scaling = config["rope_local_base_freq"], None
    size = int(head_size(config) * config.get("partial_rotary_factor", 1.0))
    if config["model_type"] == "phi3" and scaling is not None:
        need(len(scaling) == 3, "rope_scaling must be a dictionary with three fields")
        need(scaling.get("type") == "longrope", "type must be longrope")
    scaling = scaling or {"rope_type": "default"}
    kind, length = scaling.get("rope_type", scaling.get("type")), config["max_position_embeddings"]
    if kind == "default":
        return plain(theta, size), 1.0
    if kind == "linear":
        return plain(theta, size) / scaling["factor"], 1.0
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        original = scaling["original_max_position_embeddings"]
        return llama3(theta, size, *(scaling[name] for name in names), original), 1.0
    if kind == "yarn":
        factor = scaling["factor"]
        attention = scaling.get("attention_factor")
        if attention is None:
            mscales = scaling.get("mscale"), scaling.get("mscale_all_dim")
            attention = (
                mscale(factor, mscales[0]) / mscale(factor, mscales[1])
                if all(mscales)
                else mscale(factor)
            )
        betas = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        original = scaling.get("original_max_position_embeddings") or length
        truncate = scaling.get("truncate", True)
        return yarn(theta, size, factor, original, *betas, truncate), attention
    if kind == "longrope":
        original = config.get("original_max_position_embeddings") or length
        factor = length / original if "original_max_position_embeddings" in config else 1.0
        attention = scaling.get("attention_factor")
        if attention is None:
            need(factor <= 1 or original > 1, "no logarithm")
            attention = 1.0 if factor <= 1 else su(length, original)
        need(scaling["long_factor"] == scaling["short_factor"], "follows the length")
        return plain(theta, size) / np.array(scaling["long_factor"], dtype=np.float64), attention
    raise Unread(f"no {kind}")
