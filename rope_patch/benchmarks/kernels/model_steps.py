"""Effect of the kernels on whole models: decode steps, training steps, and launches of kernels.

Random models with the shapes of real ones, few layers and a small vocabulary, because time outside
of the layers would only dilute the effect. Both implementations share the weights and are timed
alternately, step by step, as in `speed`.

Launches of norms and rotation for one decoded token are counted on all of a model's layers, which
are narrow, because their width changes no count. On a GPU the profiler counts kernels. On a CPU, in
Triton's interpreter, launches of our kernels and the operators that would launch one are counted as
they are dispatched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rope_patch.benchmarks.kernels.implementations import Unavailable, describe_error
from rope_patch.benchmarks.kernels.problems import Shape
from rope_patch.benchmarks.kernels.timing import peak_memory
from rope_patch.entry_points import patch_rotation
from rope_patch.evaluation.measures.speed import (
    TimedMethod,
    compare_times,
    time_call,
    time_decoding,
)
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.transformers_api.forwards import cache_arguments

KERNELS = ("hf", "auto")  # values for `patch`; the first is the baseline
FACTOR = 4

_LAYERS = 2
_PROMPT, _DECODED = 64, 20  # tokens; the first decoded ones are warm-up
_COUNTED_PROMPT = 2  # tokens before the decoded one whose launches are counted

# Operators that launch no kernel though they return no view.
_NO_KERNEL = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
)


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


def measure_steps(
    name: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    """Measure steps of a small random model, with our kernels and with transformers' code.

    Args:
        name: A shape, see `problems.SHAPES`.
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
    peaks = [peak_memory(step) for step in steps]
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
        name: A shape, see `problems.SHAPES`.
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


@dataclass
class LaunchCounts:
    """Launches of one decode step.

    Attributes:
        ours: Those of our Triton kernels.
        others: All others.
    """

    ours: int = 0
    others: int = 0


def measure_launches(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """Return a row with the launches of norms and rotation, or the reason why there is none.

    Args:
        shape: The model's heads; all its layers are built.
        device: The device.

    Returns:
        `hf` and `ours`, the launches of norms and rotation with transformers' code and ours, for
        one token through all layers; `whole`, the launches of the whole step by kernels; and
        whether the `profiler` counted.
    """
    try:
        return [_measure_launches(shape, device)]
    except Exception as error:  # keep the other measurements whatever it is
        return [{"model": shape.name, "not_measured": describe_error(error)}]


def _measure_launches(shape: Shape, device: torch.device) -> dict[str, Any]:
    if triton_unavailable_reason() or (device.type == "cpu" and not is_interpreted()):
        raise Unavailable("counting launches needs Triton on a GPU, or TRITON_INTERPRET=1")
    model = build_model(shape.name, False, device, torch.bfloat16, shape.layers)
    counts = {
        kernels: count_launches(make_patched(model, kernels).model, device)
        for kernels in ("hf", "triton")
    }
    theirs, ours = counts["hf"], counts["triton"]
    return {
        "model": shape.name,
        "layers": shape.layers,
        # All else is the same in both, so the rest of ours is what both have.
        "hf": theirs.others - ours.others,
        "ours": ours.ours,
        "whole": {"hf": theirs.others, "ours": ours.others + ours.ours},
        "profiler": device.type == "cuda",
    }


@torch.no_grad()
def count_launches(model: Any, device: torch.device) -> LaunchCounts:
    """Return the launches of a model's decode step, after one that warms it up."""
    ids = torch.arange(3, 3 + _COUNTED_PROMPT + 2, device=device)[None]
    cache = transformers.DynamicCache(config=model.config)
    model(ids[:, :_COUNTED_PROMPT], **cache_arguments(model, cache))
    model(ids[:, _COUNTED_PROMPT:-1], **cache_arguments(model, cache))
    counts = LaunchCounts()
    with _profiled(counts) if device.type == "cuda" else dispatched_launches(counts):
        model(ids[:, -1:], **cache_arguments(model, cache))
    return counts


@contextlib.contextmanager
def _profiled(counts: LaunchCounts) -> Iterator[None]:
    """Count the kernels that a GPU runs."""
    names = _our_kernel_names()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        yield
        torch.cuda.synchronize()
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA:
            continue
        if not event.name().startswith(("Memcpy", "Memset")):
            _add(counts, event.name() in names)


def _our_kernel_names() -> set[str]:
    from rope_patch.ops.kernels.launcher import Launcher

    launchers = [x for module in _modules() for x in vars(module).values()]
    return {x.kernel.__name__ for x in launchers if isinstance(x, Launcher)}


def _modules() -> list[Any]:
    from rope_patch.ops.kernels import qk_norm_rope, rerotate, rope

    return [qk_norm_rope, rerotate, rope]


@contextlib.contextmanager
def dispatched_launches(counts: LaunchCounts) -> Iterator[None]:
    """Count what would launch a kernel on a GPU."""
    from rope_patch.ops.kernels.launcher import Launcher

    call, operators = Launcher.__call__, OperatorCount()

    def counted(self: Launcher, *arguments: Any) -> None:
        counts.ours += 1
        with operators.paused():  # the interpreter's own operators
            call(self, *arguments)

    with mock.patch.object(Launcher, "__call__", counted), operators:
        yield
    counts.others += operators.count


def _add(counts: LaunchCounts, is_ours: bool) -> None:
    if is_ours:
        counts.ours += 1
    else:
        counts.others += 1


class OperatorCount(TorchDispatchMode):
    """Counts operators while it is entered.

    Attributes:
        count: The operators so far that would launch a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this context."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_paused and _launches_a_kernel(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _launches_a_kernel(func: Any) -> bool:
    is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
    return not is_view and func.overloadpacket.__name__ not in _NO_KERNEL
