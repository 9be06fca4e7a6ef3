"""Effect of the kernels on whole models: decode steps and training steps.

Random models with the shapes of real ones, few layers and a small vocabulary, because time outside
of the layers would only dilute the effect. Both implementations share the weights and are timed
alternately, step by step, as in `speed`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers

from rope_patch.benchmarks.kernels import timing
from rope_patch.benchmarks.kernels.implementations import describe_error
from rope_patch.evaluation.measures.timed_method import (
    TimedMethod,
    compare_times,
    time_call,
    time_decoding,
)
from rope_patch.patching import patch_rotation

KERNELS = ("hf", "auto")  # values for `patch`; the first is the baseline
FACTOR = 4

_LAYERS = 2
_PROMPT, _DECODED = 64, 20  # tokens; the first decoded ones are warm-up


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A model's config class; `sizes` are the real layers' sizes."""

    config: str
    sizes: dict[str, int]
    extra: dict[str, Any] = field(default_factory=dict)


_LLAMA_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_GEMMA_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
_FAMILIES = {
    "llama-3-8b": _Family(
        config="LlamaConfig",
        sizes={"hidden_size": 4096, "intermediate_size": 14336, **_LLAMA_HEADS},
    ),
    "qwen3-8b": _Family(
        config="Qwen3Config",
        sizes={"hidden_size": 4096, "intermediate_size": 12288, **_LLAMA_HEADS},
    ),
    "gemma-3-12b": _Family(
        config="Gemma3TextConfig",
        sizes={"hidden_size": 3840, "intermediate_size": 15360, **_GEMMA_HEADS},
        extra={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024},
    ),
}
_NARROW_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_SHARED_SETTINGS: dict[str, Any] = {
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def measure(
    name: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    """Measure steps of a small random model, with our kernels and with transformers' code.

    Args:
        name: A shape, see `shapes.SHAPES`.
        device: The device. On a CPU the model is narrow and trains on short texts.
        dtype: Type of the weights.
        repeats: Repeats of each timing.

    Returns:
        A row for each of `KERNELS`: times of a decoded token and of a training step with their
        ratios to transformers' code, and the training step's peak bytes. Or one row with the reason
        why the model was not measured.
    """
    try:
        return _measure_model(name, device, dtype, repeats)
    except Exception as error:  # keep the other measurements whatever it is
        return [{"model": name, "not_measured": describe_error(error)}]


def _measure_model(
    name: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    wide = device.type == "cuda"
    length = 8192 if wide else 128
    model = build_model(name, wide, device, dtype)
    contenders = [make_patched(model, kernels) for kernels in KERNELS]
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (1, max(length, _PROMPT + _DECODED)), device=device)
    _time_decoding(contenders, ids[:, : _PROMPT + _DECODED], repeats)
    steps = [partial(_training_step, c.model, ids[:, :length]) for c in contenders]
    peaks = [timing.peak_memory(step) for step in steps]
    step_seconds: list[list[list[float]]] = [[] for _ in steps]
    for repeat in range(repeats):
        for times, step in list(zip(step_seconds, steps, strict=True))[:: -1 if repeat % 2 else 1]:
            times.append([time_call(step)])
    return [
        {
            "model": name,
            "kernels": c.name,
            "wide": wide,
            "layers": model.config.num_hidden_layers,
            "train_length": length,
            "token": compare_times(c.token_times, contenders[0].token_times),
            "train": compare_times(times, step_seconds[0]),
            "peak": peak,
        }
        for c, times, peak in zip(contenders, step_seconds, peaks, strict=True)
    ]


def build_model(
    name: str, wide: bool, device: torch.device, dtype: torch.dtype, layers: int = _LAYERS
) -> Any:
    """Return a random model in evaluation mode.

    Args:
        name: A shape, see `shapes.SHAPES`.
        wide: Whether layers have the real sizes.
        device: The device.
        dtype: Type of the weights.
        layers: Number of layers; even.
    """
    family = _FAMILIES[name]
    settings = _SHARED_SETTINGS | (family.sizes if wide else _NARROW_SIZES) | family.extra
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * (layers // 2)
    config = getattr(transformers, family.config)(**settings, num_hidden_layers=layers)
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_patched(model: Any, kernels: str) -> TimedMethod:
    """Return a patched copy of a model that shares its weights."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    copied = copy.deepcopy(model, weights)  # with this memo deepcopy shares the weights
    handle = patch_rotation(copied, "yarn", factor=FACTOR, kernels=kernels)
    return TimedMethod(name=kernels, model=copied, handle=handle)


@torch.no_grad()
def _time_decoding(contenders: list[TimedMethod], ids: torch.Tensor, repeats: int) -> None:
    """Record the decoding times in the contenders."""
    for contender in contenders:
        contender.cache = contender.read(ids[:, :_PROMPT], ids.shape[1])
    for _ in range(repeats):
        time_decoding(contenders, ids)


def _training_step(model: Any, ids: torch.Tensor) -> None:
    """Run forward and backward; the optimizer's time is the same for all."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
