"""Kernels launched by norms and rotation while a token is decoded, on all of a model's layers.

Layers are narrow, because their width changes no count. On a GPU the profiler counts kernels. On a
CPU, in Triton's interpreter, launches of our kernels and the operators that would launch one are
counted as they are dispatched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from rope_patch.benchmarks.kernels import model_steps
from rope_patch.benchmarks.kernels.implementations import Unavailable, describe_error
from rope_patch.benchmarks.kernels.operator_count import OperatorCount
from rope_patch.benchmarks.kernels.shapes import Shape
from rope_patch.ops.dispatch import is_interpreted, triton_unavailable_reason
from rope_patch.transformers_api.forwards import cache_arguments

_PROMPT = 2  # tokens


@dataclass
class LaunchCounts:
    """Launches of one decode step.

    Attributes:
        ours: Those of our Triton kernels.
        others: All others.
    """

    ours: int = 0
    others: int = 0


def measure(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
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
        return [_measure(shape, device)]
    except Exception as error:  # keep the other measurements whatever it is
        return [{"model": shape.name, "not_measured": describe_error(error)}]


def _measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    if triton_unavailable_reason() or (device.type == "cpu" and not is_interpreted()):
        raise Unavailable("counting launches needs Triton on a GPU, or TRITON_INTERPRET=1")
    model = model_steps.build_model(shape.name, False, device, torch.bfloat16, shape.layers)
    counts = {
        kernels: count_launches(model_steps.make_patched(model, kernels).model, device)
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
    ids = torch.arange(3, 3 + _PROMPT + 2, device=device)[None]
    cache = DynamicCache(config=model.config)
    model(ids[:, :_PROMPT], **cache_arguments(model, cache))
    model(ids[:, _PROMPT:-1], **cache_arguments(model, cache))
    counts = LaunchCounts()
    with _profiled(counts) if device.type == "cuda" else _dispatched(counts):
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
def _dispatched(counts: LaunchCounts) -> Iterator[None]:
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
