"""Make small models with the rotations of real checkpoints, and patch them."""

import copy

import transformers
from roundtrip import empty_model

import rope_patch

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i**2 / 36 for i in range(48)],
}


def _config(kind, theta, length, **fields):
    heads = fields.setdefault("num_attention_heads", 32)
    rope = fields.pop("rope", {"rope_type": "default", "rope_theta": theta})
    return getattr(transformers, f"{kind}Config")(
        **{
            "num_hidden_layers": 2,
            "num_key_value_heads": heads,
            "intermediate_size": 64,
            "vocab_size": 64,
            "pad_token_id": 0,
            "max_position_embeddings": length,
            "rope_parameters": copy.deepcopy(rope),
            **fields,
        }
    )


def _gemma3(rope, length):
    return _config(
        "Gemma3Text",
        None,
        length,
        hidden_size=1152,
        num_attention_heads=4,
        head_dim=256,
        rope=rope,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=512,
    )


_PLAIN_GEMMA3 = {**GEMMA3, "full_attention": {"rope_type": "default", "rope_theta": 1000000.0}}
CHECKPOINTS = {
    "Llama-2": _config("Llama", 1e4, 4096, hidden_size=4096),
    "Llama-3": _config("Llama", 5e5, 8192, hidden_size=4096),
    "Llama-3.1": _config("Llama", None, 131072, hidden_size=4096, rope=LLAMA3),
    "SmolLM2": _config("Llama", 1e5, 8192, hidden_size=576, num_attention_heads=9),
    "Mistral": _config("Mistral", 1e6, 32768, hidden_size=4096, head_dim=128),
    "Qwen2.5": _config("Qwen2", 1e6, 32768, hidden_size=3584, num_attention_heads=28),
    "Qwen3": _config("Qwen3", 1e6, 40960, hidden_size=4096, head_dim=128),
    "Gemma-3-1B": _gemma3(_PLAIN_GEMMA3, 32768),
    "Phi-3-4k": _config("Phi3", 1e4, 4096, hidden_size=3072),
    "gpt-oss": _config(
        "GptOss",
        None,
        131072,
        hidden_size=2880,
        num_attention_heads=64,
        head_dim=64,
        rope=GPT_OSS,
        num_local_experts=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
STRETCHES = "of every pair"  # stands for one number per pair of the checkpoint

# Name for tests: method, options.
METHODS = {
    "linear": ("linear", {}),
    "ntk": ("ntk", {}),
    "abf": ("abf", {}),
    "yarn": ("yarn", {}),
    "yarn-betas": ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn-untruncated": ("yarn", {"truncate": False}),
    "yarn-warmer": ("yarn", {"attention_factor": 1.3}),
    "yarn-cooler": ("yarn", {"attention_factor": 0.9}),
    "ntk-by-parts": ("ntk-by-parts", {}),
    "clipped": ("clipped", {}),
    "clipped-yarn": ("clipped-yarn", {}),
    "ntk-by-parts-2023-06": ("ntk-by-parts-2023-06", {}),
    "llama3": ("llama3", {}),
    "longrope": ("longrope", {"long_factor": STRETCHES, "short_factor": STRETCHES}),
    "proportional": ("proportional", {"partial_rotary_factor": 0.71}),
    "nope": ("nope", {}),
}
FACTOR = 4.0


def make_checkpoint_model(name):
    """Return a checkpoint's model without weights."""
    return empty_model(CHECKPOINTS[name])


def make_patched(name, method, **request):
    """Return a checkpoint's model patched with a method of `METHODS`, and the handle.

    A YaRN that was trained in (gpt-oss) is replaced, unless `start` says otherwise.
    """
    checkpoint_model = make_checkpoint_model(name)
    kind, options = METHODS[method]
    start = "unscaled" if name == "gpt-oss" else "auto"
    pairs = _pairs(CHECKPOINTS[name])
    options = {
        key: [1 + 3 * i / pairs for i in range(pairs)] if value is STRETCHES else value
        for key, value in options.items()
    }
    handle = rope_patch.patch(
        checkpoint_model,
        kind,
        **{"factor": FACTOR, "start": start, **options, **request},
        kernels="hf",
    )
    return checkpoint_model, handle


def _pairs(config):
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size // 2
