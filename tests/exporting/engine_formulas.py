"""Restate in float64 how other engines rotate by a config, from their code.

Each engine's function returns (radians per token of every pair, multiplier of cos and sin), or
raises `Unread` if the engine would stop or ignore the config. For llama.cpp there are two:
`convert_gguf` restates conversion/base.py, llama.py and phi.py (until build 11549), which write
GGUF files, and `rotate_gguf` src/llama-context.cpp, src/llama-model.cpp and ggml's rope_yarn.
"""

import math
from types import SimpleNamespace

import numpy as np
from conformance import formulas


class Unread(Exception):
    """The engine does not support a config."""


def need(condition, message):
    if not condition:
        raise Unread(message)


def _at(theta, size, original=None):
    return SimpleNamespace(theta=theta, rotary_dim=size, trained_length=original)


def plain(theta, size):
    return np.array(formulas.default(_at(theta, size))[0])


mscale = formulas.yarn_attention_factor


def yarn_ramp(theta, size, original, fast, slow, truncate=True):
    """Return the share of interpolation of each pair: 1 if interpolated, 0 if unchanged."""
    at = _at(theta, size, original)
    return np.array(formulas.ramp(at, *formulas.ramp_ends(at, fast, slow, truncate)))


def yarn(theta, size, factor, original, fast=32, slow=1, truncate=True):
    ramp = yarn_ramp(theta, size, original, fast, slow, truncate)
    return plain(theta, size) * (1 - ramp + ramp / factor)


def llama3(theta, size, factor, low, high, original):
    return np.array(formulas.llama3(_at(theta, size, original), factor, low, high)[0])


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


def sglang_deepseek_v4(config, kind):
    """Restate models/deepseek_v4.py and precompute_freqs_cis of 0.5.23.

    Args:
        config: The config, a dict.
        kind: "main" for sliding-window layers, "compress" for those with a compressor.
    """
    rope, compresses = config["rope_parameters"], kind == "compress"
    theta = config["compress_rope_theta"] if compresses else rope["rope_theta"]
    size, original = config["qk_rope_head_dim"], rope["original_max_position_embeddings"]
    betas = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
    if not compresses:
        return plain(theta, size), 1.0
    return yarn(theta, size, rope.get("factor", 1.0), original, *betas), 1.0


def llama_cpp_deepseek_v4(config, kind, words):
    """Restate src/models/deepseek4.cpp of 0.5.0 for a file of the published config, with flags.

    Args:
        config: The unpatched config, a dict.
        kind: "main" or "compress".
        words: The command line.
    """
    file = {"context_length": config["max_position_embeddings"]}
    file["attention.compress_rope_freq_base"] = config["compress_rope_theta"]
    flags = parse_flags(words, file)
    need(
        int(flags["-c"]) <= file["context_length"], "the slot context exceeds the training context"
    )
    if kind == "main":
        theta = float(flags.get("--rope-freq-base", config["rope_theta"]))
        return plain(theta, config["qk_rope_head_dim"]), 1.0
    theta, size = file["attention.compress_rope_freq_base"], config["qk_rope_head_dim"]
    own = config["rope_parameters"]["compress"]
    ext = float(flags.get("--yarn-ext-factor", own["rope_type"] == "yarn"))
    if flags["--rope-scaling"] == "none":
        need(ext == 0, "the file's YaRN stays")
        return plain(theta, size), 1.0
    names = ("rope-scale", "yarn-orig-ctx", "yarn-beta-fast", "yarn-beta-slow")
    return yarn(theta, size, *(float(flags[f"--{name}"]) for name in names)), 1.0


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
    # The configs of Qwen3.5 are SGLang's own classes, with a default of their own.
    default = 0.25 if config["model_type"].startswith(("qwen3_5", "qwen4_exp")) else 1
    size = int(head_size(config) * (config.get("partial_rotary_factor") or default))
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


def mlx(config, kind=None, vlm=False):
    """Restate rope_utils.py, phi3.py, gemma3_text.py, gpt_oss.py of mlx-lm 0.32.2, mlx-vlm 0.7.10.

    Args:
        config: config.json, a dict.
        kind: The layer type, for Gemma 3 and 4 and DeepSeek-V4.
        vlm: Whether it is mlx-vlm, which has its own files.
    """
    layer_type, kind = kind, config["model_type"]
    sliding = layer_type == "sliding_attention"
    size, theta = head_size(config), config.get("rope_theta", 10000)
    scaling, length = config.get("rope_scaling"), config["max_position_embeddings"]
    if kind == "gemma3_text" and vlm:
        theta = config["rope_global_base_freq"]
    if kind in _MLX_ROPE_PARAMETERS:
        scaling = config["rope_parameters"]
        if kind == "gemma4_text":
            scaling = scaling[layer_type]
            size = size if sliding else config["global_head_dim"]
        theta = scaling["rope_theta"]
        size = int(size * scaling.get("partial_rotary_factor", 1.0)) if "qwen" in kind else size
    if kind == "deepseek_v4":
        need(vlm, "no such file")
        theta, size = config["compress_rope_theta"], config["qk_rope_head_dim"]
        if layer_type == "main":
            theta, scaling = config["rope_theta"], None
        scaling = scaling and {**scaling, "mscale": 0}  # cos and sin stay unscaled
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
        if vlm:
            need(scaling["long_factor"] == scaling["short_factor"], "follows the length")
            mscales = scaling.get("short_mscale"), scaling.get("long_mscale")
            need(mscales[0] == mscales[1] and mscales[0] is not None, "follows the length")
            return plain(theta, size) / stretch, mscales[0]
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


# Of the tests: their files in mlx-lm and mlx-vlm read this field.
_MLX_ROPE_PARAMETERS = ("ministral3", "gemma4_text", "glm_moe_dsa", "qwen3_5_text")
_MLX_ROPE_PARAMETERS += ("qwen3_5_moe_text", "qwen4_exp_text")
_GGUF_LLAMA = ("llama", "mistral", "mixtral")


def convert_gguf(config, release="new", tensors=None):
    """Return a GGUF file's keys and tensors, named without the architecture.

    Args:
        config: config.json, a dict.
        release: "old" for a converter that took Llama 3's original length from elsewhere.
        tensors: Tensors beside the weights, by name.
    """
    rope = dict(config["rope_parameters"])
    if (original := config.get("original_max_position_embeddings")) is not None:
        rope.setdefault("original_max_position_embeddings", original)
    inner = rope.get("full_attention", rope)
    size = int(head_size(config) * inner.get("partial_rotary_factor", 1))
    file = {
        "context_length": config["max_position_embeddings"],
        "rope.freq_base": inner["rope_theta"],
        "size": size,
        "is_latent": "deepseek" in config["model_type"],
    }
    kind, model = inner.get("rope_type"), config["model_type"]
    if model == "phi3":
        original = rope["original_max_position_embeddings"]
        file["rope.scaling.original_context_length"] = original
        if rope.get("long_factor"):
            need(kind in ("su", "longrope"), "the rope scaling type is not supported yet")
            file["rope.scaling.attn_factor"] = su(config["max_position_embeddings"], original)
            for length in ("long", "short"):
                need(len(rope[f"{length}_factor"]) == size // 2, "the length of rope factors")
                file[f"rope_factors_{length}"] = np.array(rope[f"{length}_factor"])
        return file
    factor = inner.get("factor")
    if kind in ("linear", "yarn") and factor is not None:
        file |= {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        original = inner["original_max_position_embeddings"]
        file["rope.scaling.original_context_length"] = original
        names = {"attention_factor": "yarn_attn_factor"}
        names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        for name, entry in names.items():
            if inner.get(name) is not None:
                file[f"rope.scaling.{entry}"] = inner[name]
    for name, numbers in (tensors or {}).items():
        need(name == "rope.freqs.weight", "Can not map tensor")
        need(model in _GGUF_LLAMA, "done_getting_tensors: wrong number of tensors")
        need(len(numbers) == size // 2, "tensor 'rope_freqs.weight' has wrong shape")
        file["rope_freqs"] = np.array(numbers, np.float32)
    if kind == "llama3" and model in _GGUF_LLAMA:
        need("rope_freqs" not in file, "Duplicated tensor name 'rope_freqs.weight'")
        outer = config if release == "old" else inner
        original = outer.get("original_max_position_embeddings", 8192)
        names = ("factor", "low_freq_factor", "high_freq_factor")
        changed = llama3(inner["rope_theta"], size, *(inner[name] for name in names), original)
        file["rope_freqs"] = plain(inner["rope_theta"], size) / changed
    if "mscale_all_dim" in inner:  # DeepSeek's converter writes a tenth of it
        file["rope.scaling.yarn_log_multiplier"] = inner["mscale_all_dim"] * (
            0.1 if "deepseek" in model else 1
        )
    if "sliding_attention" in rope:
        file["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        file["rope.scale_swa"] = 1.0  # llama_model_gemma3
    return file


def parse_flags(words, file):
    """Return the values of flags, and apply --override-kv to the file's keys."""
    flags, words = {}, list(words)
    while words:
        name, value = words.pop(0), words.pop(0)
        if name == "--override-kv":
            key, _, typed = value.partition("=")
            kind, _, value = typed.partition(":")
            need(kind in ("int", "float"), "invalid type")
            file[key.partition(".")[2]] = {"int": int, "float": float}[kind](value)
        else:
            need(name not in flags, "said twice")
            flags[name] = value
    allowed_flags = {"-c", "--rope-scaling", "--rope-scale", "--rope-freq-base"} | {
        f"--yarn-{name}"
        for name in ("orig-ctx", "ext-factor", "attn-factor", "beta-fast", "beta-slow")
    }
    need(flags.keys() <= allowed_flags, "error: invalid argument")
    return flags


def rotate_gguf(file, words, sliding=False, release="new"):
    """Return a layer's rotation.

    Args:
        file: From `convert_gguf`.
        words: The command line.
        sliding: Whether the layer has a window.
        release: "new", or "old" for one before 2025-12, when flags still set YaRN's attention.
    """
    file = dict(file)
    flags = parse_flags(words, file)
    number = {name: float(value) for name, value in flags.items() if name != "--rope-scaling"}
    n_ctx = int(number["-c"])
    need(n_ctx <= file["context_length"], "the slot context exceeds the training context: capping")
    trained = file.get("rope.scaling.type", "linear")
    kind = flags.get("--rope-scaling", trained)
    scale = 1 / number.get("--rope-scale", file.get("rope.scaling.factor", 1.0))
    if kind == "none":
        scale = 1.0
    base = number.get("--rope-freq-base", file["rope.freq_base"])
    ext = number.get("--yarn-ext-factor", 1.0 if kind == "yarn" else 0.0)
    factor, default_attention = 1 / scale, file.get("rope.scaling.yarn_attn_factor", 1.0)
    attention = number.get("--yarn-attn-factor", default_attention)
    if ext and release == "new":
        default_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1
        if multiplier := file.get("rope.scaling.yarn_log_multiplier"):
            default_factor /= mscale(factor, multiplier * (10 if file["is_latent"] else 1))
        attention = default_factor / (1 + 0.1 * math.log(factor))
    attention *= file.get("rope.scaling.attn_factor", 1.0)
    if sliding:
        # The file's values, which flags do not change.
        base = file.get("rope.freq_base_swa", file["rope.freq_base"])
        scale = file.get("rope.scale_swa", 1 / file.get("rope.scaling.factor", 1.0))
    size = file["size"]
    tensor = file.get("rope_freqs")
    if tensor is None:
        long = n_ctx > file.get("rope.scaling.original_context_length", file["context_length"])
        tensor = file.get("rope_factors_long" if long else "rope_factors_short", 1.0)
    free = plain(base, size) / tensor
    if not ext:
        return free * scale, attention
    orig = number.get(
        "--yarn-orig-ctx",
        file.get("rope.scaling.original_context_length", file["context_length"]),
    )
    betas = [
        number.get(f"--yarn-beta-{name}", file.get(f"rope.scaling.yarn_beta_{name}", default))
        for name, default in (("fast", 32.0), ("slow", 1.0))
    ]
    ramp = yarn_ramp(base, size, orig, *betas)
    mixed = free * scale * ramp * ext + free * (1 - ramp * ext)
    return mixed, attention * (1 + 0.1 * math.log(1 / scale))
