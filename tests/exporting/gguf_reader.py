"""Restate in float64 how llama.cpp rotates by a config and flags, from its code.

`convert` restates conversion/base.py, llama.py and phi.py (until build 11549), which write GGUF
files; the rest restates src/llama-context.cpp, src/llama-model.cpp and ggml's rope_yarn.
"""

import math

import numpy as np
from engine_formulas import Unread, head_size, llama3, need, plain, su, yarn_ramp

_LLAMA = ("llama", "mistral", "mixtral")


def convert(config, release="new", tensors=None):
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
    size = head_size(config)
    file = {
        "context_length": config["max_position_embeddings"],
        "rope.freq_base": inner["rope_theta"],
        "size": size,
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
        need(model in _LLAMA, "done_getting_tensors: wrong number of tensors")
        need(len(numbers) == size // 2, "tensor 'rope_freqs.weight' has wrong shape")
        file["rope_freqs"] = np.array(numbers, np.float32)
    if kind == "llama3" and model in _LLAMA:
        need("rope_freqs" not in file, "Duplicated tensor name 'rope_freqs.weight'")
        outer = config if release == "old" else inner
        original = outer.get("original_max_position_embeddings", 8192)
        names = ("factor", "low_freq_factor", "high_freq_factor")
        changed = llama3(inner["rope_theta"], size, *(inner[name] for name in names), original)
        file["rope_freqs"] = plain(inner["rope_theta"], size) / changed
    if "sliding_attention" in rope:
        file["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        file["rope.scale_swa"] = 1.0  # llama_model_gemma3
    return file


def parse(words, file):
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


def rotate(file, words, sliding=False, release="new"):
    """Return a layer's rotation.

    Args:
        file: From `convert`.
        words: The command line.
        sliding: Whether the layer has a window.
        release: "new", or "old" for one before 2025-12, when flags still set YaRN's attention.
    """
    file = dict(file)
    flags = parse(words, file)
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


__all__ = ["Unread", "convert", "rotate"]
