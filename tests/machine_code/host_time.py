"""Python time of norms and rotation for one decoded token: `python -m machine_code.host_time`.

No GPU is needed. A decode step without graphs is bound by the CPU's work for each launch, which
this measures: the model's forward around norms and rotation, all of this package's code, Triton's
own Python, and the allocation of results (a CPU's, not CUDA's). Triton compiles the kernels for
sm_90, and the one function of its driver that launches them does nothing.

Not in it, because a CPU's tensors have no device index: a look at CUDA's current device in
`Launcher`, and one in Triton's driver. Nor the driver's own time, which it needs for any launch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import nn
from transformers import LlamaConfig
from triton.backends.compiler import GPUTarget

from rope_patch.benchmarks import SHAPES, VIEWS, Problem, Shape
from rope_patch.ops import dispatch, self_check
from rope_patch.ops.kernels.launcher import Launcher
from rope_patch.patching.kernels import attention_forward
from rope_patch.patching.kernels.attention_forward import PositionPassthrough
from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.models import APPLY_ROTATION, model_file

apply_rotary_pos_emb = model_file("llama").apply_rotary_pos_emb  # a patch rebinds this name
_TARGET = GPUTarget("cuda", 90, 32)
_STEPS = 5  # timed as one, because a clock's tick counts beside a single step


@dataclass(frozen=True)
class HostTime:
    """Microseconds.

    Attributes:
        best: The smallest of all repeats: what the code needs if nothing disturbs it.
        median: The median of all repeats.
    """

    best: float
    median: float

    def __sub__(self, other: HostTime) -> HostTime:
        return HostTime(self.best - other.best, self.median - other.median)

    def __truediv__(self, count: int) -> HostTime:
        return HostTime(self.best / count, self.median / count)


# -- attentions that do nothing but norms and rotation ---------------------------------------------


class RotatingAttention(nn.Module):
    """The part of Llama's attention that this package changes."""

    def forward(self, query_states: Any, key_states: Any, position_embeddings: Any) -> Any:
        """Rotate as `LlamaAttention.forward` does."""
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        return query_states, key_states


class NormingAttention(nn.Module):
    """The part of Qwen 3's attention that this package changes."""

    def __init__(self, norms: list[nn.Module]) -> None:
        super().__init__()
        self.q_norm, self.k_norm = norms

    def forward(self, query_states: Any, key_states: Any, position_embeddings: Any) -> Any:
        """Normalise and rotate as `Qwen3Attention.forward` does."""
        query_states = self.q_norm(query_states).transpose(1, 2)
        key_states = self.k_norm(key_states).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        return query_states, key_states


class _FrameOfAttention(RotatingAttention):
    """What is left of both without norms and rotation."""

    def forward(self, query_states: Any, key_states: Any, position_embeddings: Any) -> Any:
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        _cos, _sin = position_embeddings
        return query_states, key_states


class _Layers:
    """The attentions of a model, its rotary module, and the queries and keys of one token."""

    def __init__(self, shape: Shape) -> None:
        self.problem = Problem(
            shape=shape, batch=1, length=1, layout=VIEWS, dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.attentions = [self._attention() for _ in range(shape.layers)]
        config = LlamaConfig(
            num_attention_heads=shape.heads,
            hidden_size=shape.heads * shape.head_dim,
            head_dim=shape.head_dim,
        )
        self.rotary = model_file("llama").LlamaRotaryEmbedding(config)
        sample = self.problem.sample(0)
        self.q, self.k = sample.q.detach(), sample.k.detach()

    def _attention(self) -> nn.Module:
        shape = self.problem.shape
        if shape.norm is None:
            return RotatingAttention()
        modeling = model_file(shape.family)
        norms = [getattr(modeling, shape.norm)(shape.head_dim).bfloat16() for _ in range(2)]
        return NormingAttention(norms)

    def patch(self) -> None:
        """Install what `rope_patch.patch` installs in an attention and a rotary module."""
        undo_log = UndoLog()
        for attention in self.attentions:
            attention_forward.install_attention_forward(attention, "triton", False, False, undo_log)
        names: dict[str | None, str] = {None: ""}
        own = self.rotary.forward
        undo_log.set(self.rotary, "forward", PositionPassthrough(self.rotary, names, own, "triton"))

    def rotary_step(self) -> Any:
        """Return what all layers of one token rotate by."""
        return self.rotary(self.q, self.problem.positions)

    def step(self) -> None:
        """Rotate queries and keys of one token in all layers."""
        q, k = self.q, self.k
        position_embeddings = self.rotary_step()
        for attention in self.attentions:
            attention(q, k, position_embeddings=position_embeddings)


# -- a GPU's driver that launches nothing ----------------------------------------------------------


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _return_true() -> bool:
    return True


class _IdleDriver:
    """Triton's driver for NVIDIA's GPUs without its functions in C."""

    def __init__(self, launcher_class: Any, launch: Callable[..., None]) -> None:
        self.launcher_cls = launcher_class
        self.utils = SimpleNamespace(
            launch=launch,
            build_signature_metadata=_do_nothing,
            load_binary=lambda *_: (object(), object(), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 2**18},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _TARGET


@contextlib.contextmanager
def idle_driver(launch: Callable[..., None] = _do_nothing) -> Iterator[None]:
    """Let CPU tensors take the way of a GPU's, up to the launch.

    Only for a process of its own, because Triton remembers what it compiled and loaded.

    Args:
        launch: Called in the place of the driver's function in C that launches.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so Triton does not compile: unset it")
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    active = triton.runtime.driver._active
    with contextlib.ExitStack() as stack:
        # Types of the module in C that Triton compiles where there is a driver.
        for name in ("PyKernelArg", "ARG_KERNEL", "ARG_CONSTEXPR", "ARG_TUPLE"):
            stack.enter_context(mock.patch.object(nvidia, name, _do_nothing, create=True))
        # Stands for `x.is_cuda`, which costs as little.
        stack.enter_context(mock.patch.object(dispatch, "is_interpreted", _return_true))
        stack.enter_context(mock.patch.dict(os.environ, {self_check.VARIABLE: "0"}))
        triton.runtime.driver.set_active(_IdleDriver(nvidia.CudaLauncher, launch))
        try:
            yield
        finally:
            triton.runtime.driver._active = active


# -- measurement -----------------------------------------------------------------------------------


def measure(shape: Shape, repeats: int) -> dict[str, HostTime]:
    """Return the times of a layer's norms and rotation, and their parts.

    Args:
        shape: The heads and the number of layers.
        repeats: How often each is timed, all in turn.

    Returns:
        `transformers`: its own code, whose operators do their work on the CPU. `whole`: this
        package's, which is the sum of `norms` (the calls of both modules, whose norms are
        deferred), `rotate` (the function in the place of `apply_rotary_pos_emb`), `op`
        (`rope_patch.ops`, and the results' memory) and `launcher` (from the look-up of the launch
        on). `rotary`: this package's rotary module, once for all layers.
    """
    with torch.no_grad(), idle_driver():
        theirs, ours, without_rotate, frame = (_Layers(shape) for _ in range(4))
        for layers in (ours, without_rotate):
            layers.patch()
        for attention in without_rotate.attentions:
            names = vars(attention)["forward"].function.__globals__
            names[APPLY_ROTATION] = _return_both
        frame.attentions = [_FrameOfAttention() for _ in frame.attentions]
        frame.rotary = ours.rotary
        no_launch = mock.patch.object(Launcher, "__call__", _do_nothing)
        op = "qk_norm_rope" if shape.norm else "rope"
        no_op = mock.patch.object(attention_forward, op, _return_both)
        times = _time_in_turn(
            {
                "transformers": (theirs.step, contextlib.nullcontext()),
                "whole": (ours.step, contextlib.nullcontext()),
                "no launch": (ours.step, no_launch),
                "no op": (ours.step, no_op),
                "no rotate": (without_rotate.step, contextlib.nullcontext()),
                "frame": (frame.step, contextlib.nullcontext()),
                "rotary": (ours.rotary_step, contextlib.nullcontext()),
            },
            repeats,
        )
    layer = {name: time / shape.layers for name, time in times.items()}
    return {
        "transformers": layer["transformers"] - layer["frame"],
        "whole": layer["whole"] - layer["frame"],
        "norms": layer["no rotate"] - layer["frame"],
        "rotate": layer["no op"] - layer["no rotate"],
        "op": layer["no launch"] - layer["no op"],
        "launcher": layer["whole"] - layer["no launch"],
        "rotary": times["rotary"],
    }


def _return_both(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> Any:
    return q, k


def _time_in_turn(
    calls: dict[str, tuple[Callable[[], Any], AbstractContextManager[Any]]], repeats: int
) -> dict[str, HostTime]:
    """Return the time of each call, within its context."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(1 + repeats):
        for name, (call, context) in calls.items():
            with context:
                time = timeit.timeit(call, number=_STEPS) / _STEPS
            if repeat:  # the first one compiles kernels and remembers launches
                seconds[name].append(time)
    return {
        name: HostTime(1e6 * min(times), 1e6 * statistics.median(times))
        for name, times in seconds.items()
    }


def format_table(times: dict[str, dict[str, HostTime]]) -> str:
    """Return a Markdown table of what `measure` returns, by shape."""
    lines = [f"| µs a layer, best (median) | {' | '.join(times)} |", "|:--|" + "--:|" * len(times)]
    titles = {
        "transformers": "transformers, with its operators' work on the CPU",
        "whole": "**rope_patch**",
        "norms": "deferred norms",
        "rotate": "rotate",
        "op": "op",
        "launcher": "launcher",
        "rotary": "rotary module, once a token",
    }
    for name, title in titles.items():
        cells = [f"{t[name].best:.1f} ({t[name].median:.1f})" for t in times.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m machine_code.host_time", description=__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="default: 40")
    parser.add_argument("--shapes", default="qwen3-8b,llama-3-8b", help=", ".join(SHAPES))
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.exit(1, "Error: TRITON_INTERPRET is set, so Triton does not compile: unset it\n")
    torch.set_num_threads(1)
    names = options.shapes.split(",")
    print(format_table({name: measure(SHAPES[name], options.repeats) for name in names}))


if __name__ == "__main__":
    main()
