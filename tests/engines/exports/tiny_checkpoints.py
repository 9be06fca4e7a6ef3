"""Make tiny random checkpoints with the rotations of published kinds, and export them.

Weights are large enough for sharp attention, so that every pair's frequency and the attention
factor show in the log-probabilities.
"""

import json
import math
import shlex
from dataclasses import dataclass

import torch
import transformers
from helpers.commands import run_in_this_process
from transformers import AutoModelForCausalLM

import rope_patch

_HEAD = 32
_PAIRS = _HEAD // 2
_SHARPNESS = 3.0  # standard deviation of attention's logits
_SPREAD = 2.0  # of the logits
LEAST_MARGIN = 1000.0  # nats over the next hypothesis; the command asks for 10
_STRETCHES = [1 + 3 * (pair / (_PAIRS - 1)) ** 2 for pair in range(_PAIRS)]


def make_config(kind, length, rope, **fields):
    return getattr(transformers, f"{kind}Config")(
        **{
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "max_position_embeddings": length,
            "rope_parameters": rope,
            **fields,
        }
    )


def _plain(theta):
    return {"rope_type": "default", "rope_theta": theta}


def _gemma3(length, full):
    return make_config(
        "Gemma3Text",
        length,
        {"sliding_attention": _plain(1e4), "full_attention": full},
        head_dim=_HEAD,
        num_hidden_layers=6,  # engines take every sixth for a full one
        query_pre_attn_scalar=_HEAD,
        sliding_window=64,
        tie_word_embeddings=True,
    )


def _gpt_oss(length, rope):
    return make_config(
        "GptOss",
        length,
        rope,
        head_dim=_HEAD,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
    )


def _phi3(length, original, rope):
    return make_config("Phi3", length, rope, original_max_position_embeddings=original)


def configs():
    """Return the configs: published ones in all that concerns the rotation, but for lengths."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    longrope = {
        "rope_type": "longrope",
        "short_factor": _STRETCHES,
        "long_factor": _STRETCHES,
    }
    gpt_oss_yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    return {
        "Qwen3": make_config("Qwen3", 256, _plain(1e6), head_dim=_HEAD),
        "Qwen3-YaRN": make_config("Qwen3", 1024, {**yarn, "rope_theta": 1e6}, head_dim=_HEAD),
        "Qwen2.5": make_config("Qwen2", 256, _plain(1e6)),
        "Llama-3": make_config("Llama", 256, _plain(5e5)),
        "Llama-3.1": make_config("Llama", 512, {**llama3, "rope_theta": 5e5}),
        "Phi-3-4k": _phi3(256, 256, _plain(1e4)),
        "Phi-3-128k": _phi3(512, 128, {**longrope, "rope_theta": 1e4}),
        "Gemma-3-1B": _gemma3(256, _plain(1e6)),
        "Gemma-3-4B": _gemma3(1024, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
        "gpt-oss": _gpt_oss(2048, {**gpt_oss_yarn, "rope_theta": 150000.0}),
    }


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what is asked of it.

    Attributes:
        checkpoint: One of `configs()`.
        method: The method; None for the checkpoint's own rotation.
        request: Arguments of `rope_patch.patch`, options of the method among them.
    """

    checkpoint: str
    method: str | None = None
    request: tuple[tuple[str, object], ...] = ()
    tokens: int | None = None  # of the longest prompt

    @classmethod
    def of(cls, checkpoint, method=None, tokens=None, **request):
        return cls(checkpoint, method, tuple(request.items()), tokens)

    @property
    def words(self):
        """Return the words of the command `rope-patch export` for what is asked."""
        words = [] if self.method is None else ["--method", self.method]
        for name, value in self.request:
            if name in ("factor", "start", "length"):
                words += [f"--{name}", str(value)]
            else:
                words += ["--option", f"{name}={json.dumps(value)}"]
        return words

    def verify(self, engine, folder):
        """Verify an engine against a checkpoint's folder, and print what comes out."""
        found = rope_patch.verify(
            engine,
            against=folder,
            method=self.method,
            progress=False,
            tokens=self.tokens,
            **dict(self.request),
        )
        print(found)
        return found


CASES = {
    "Qwen, YaRN in its config": Case.of("Qwen3-YaRN"),
    "Qwen, yarn": Case.of("Qwen3", "yarn", factor=4),
    "Llama 3.1": Case.of("Llama-3.1"),
    "Llama 3.1, ntk": Case.of("Llama-3.1", "ntk", factor=2),
    "Llama 3, llama3": Case.of("Llama-3", "llama3", factor=4),
    "Phi-3 of one set": Case.of("Phi-3-128k"),
    "Phi-3, yarn": Case.of("Phi-3-4k", "yarn", factor=4),
    "Gemma 3, linear in its config": Case.of("Gemma-3-4B"),
    "Gemma 3, yarn": Case.of("Gemma-3-1B", "yarn", factor=4),
    "gpt-oss": Case.of("gpt-oss"),
    "gpt-oss, yarn": Case.of("gpt-oss", "yarn", factor=2, tokens=320),
    "gpt-oss, truncated yarn": Case.of("gpt-oss", "yarn", factor=32, start="unscaled"),
    "gpt-oss, abf": Case.of("gpt-oss", "abf", factor=32, start="unscaled"),
    "Qwen2.5, abf": Case.of("Qwen2.5", "abf", factor=4),
    "Qwen3, p-RoPE": Case.of("Qwen3", "proportional", factor=4, partial_rotary_factor=0.5),
    "Llama 3, per-pair factors": Case.of(
        "Llama-3", "longrope", factor=4, long_factor=_STRETCHES, short_factor=_STRETCHES
    ),
}


def write_checkpoint(config, folder):
    """Write a config and random weights to a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_draw(parameter_name, parameter.shape, config))
    model.save_pretrained(folder)


def _draw(name, shape, config):
    """Return random numbers for a parameter, of a size that attention depends on positions."""
    noise = torch.randn(shape)
    shift = 0.0 if config.model_type == "gemma3_text" else 1.0  # Gemma adds 1 to norms' weights
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return math.sqrt(_SHARPNESS) + shift - 1 + 0.1 * noise
    if name.endswith("norm.weight"):
        return shift + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return noise * (_SPREAD / math.sqrt(shape[1]) if config.tie_word_embeddings else 1.0)
    if len(shape) == 1 or name.endswith("_bias"):
        return 0.3 * noise
    inputs = shape[1]  # experts' matrices are transposed
    size = _SPREAD if name.endswith("lm_head.weight") else 1.0
    if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
        size = math.sqrt(_SHARPNESS)
    return noise * size / math.sqrt(inputs)


@dataclass(frozen=True)
class Printed:
    """What `rope-patch export` prints.

    Attributes:
        words: The piece of the engine's command line.
        config: The fields of config.json.
    """

    words: list[str]
    config: dict[str, object]


def print_export(case, folder, engine, *options):
    """Run `rope-patch export` on a checkpoint's folder, and read what it prints."""
    words = ["export", folder, "--engine", engine, *case.words, *options]
    result = run_in_this_process(*words)
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]

    def below(title):
        return lines[lines.index(title) + 1] if title in lines else ""

    return Printed(shlex.split(below("command line:")), json.loads(below("config.json:") or "{}"))


def export_error(case, folder, engine):
    """Return the error of `rope-patch export` for a rotation that an engine has no form for."""
    result = run_in_this_process("export", folder, "--engine", engine, *case.words)
    assert result.returncode == 1
    return result.stderr
