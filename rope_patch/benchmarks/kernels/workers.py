"""Contenders at work: what of them is timed, checked and weighed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rope_patch.benchmarks.kernels import timing
from rope_patch.benchmarks.kernels.ground_truth import relative_errors
from rope_patch.benchmarks.kernels.implementations import Implementation
from rope_patch.benchmarks.kernels.shapes import Problem, Sample
from rope_patch.benchmarks.kernels.timing import Thunk

FORWARD, BACKWARD, BOTH, WALL, GRAPH = "forward", "backward", "both", "wall", "graph"
TRAINING = (FORWARD, BACKWARD, BOTH)


class TimedCalls(ABC):
    """Someone whose calls are timed, each on another one of several samples."""

    def __init__(self, count: int) -> None:
        self._count = count

    @abstractmethod
    def prepare(self, phase: str, index: int) -> Thunk:
        """What is timed of a phase on a sample; everything before it is done when this returns."""

    def clock(self, phase: str) -> Callable[[], list[float]]:
        """What runs a phase on every sample and returns the seconds of each call.

        A single token is timed in a loop, because one call is shorter than what starts a clock.
        """
        if phase in TRAINING:
            return lambda: timing.time_calls(self._prepare_all(phase))
        loop = torch.no_grad()(timing.unrolled(self._prepare_all(phase)))
        if phase == WALL:
            return partial(timing.wall_time, loop)
        return partial(timing.graph_time, timing.capture_graph(loop))

    def _prepare_all(self, phase: str) -> list[Thunk]:
        return [self.prepare(phase, index) for index in range(self._count)]


class CopyBaseline(TimedCalls):
    """The roof: as many bytes as the queries and keys have, read and written once."""

    def __init__(self, problem: Problem, count: int) -> None:
        super().__init__(count)
        size = (2, problem.bytes // problem.dtype.itemsize)  # forward's and backward's
        self._sources = [
            torch.randn(size, dtype=problem.dtype, device=problem.device) for _ in range(count)
        ]
        self._targets = [torch.empty_like(source) for source in self._sources]

    def prepare(self, phase: str, index: int) -> Thunk:
        """See `TimedCalls.prepare`."""
        part = slice(None) if phase == BOTH else int(phase == BACKWARD)
        return partial(self._targets[index][part].copy_, self._sources[index][part])


class ImplementationRun(TimedCalls):
    """One contender at work on one problem's samples."""

    def __init__(self, contender: Implementation, problem: Problem, samples: list[Sample]) -> None:
        super().__init__(len(samples))
        self._contender, self._problem, self._samples = contender, problem, samples
        self._call = contender.build(problem)
        self._weights = () if contender.frozen else problem.weights

    def prepare(self, phase: str, index: int) -> Thunk:
        """See `TimedCalls.prepare`."""
        sample = self._sample(index)
        if phase == BACKWARD:
            return partial(self._backward, self._call(sample.q, sample.k), sample)
        if phase == BOTH:
            return lambda: self._backward(self._call(sample.q, sample.k), sample)
        return partial(self._call, sample.q, sample.k)

    def relative_errors(self) -> dict[str, float]:
        """Errors against float64, see `checking.errors`."""
        sample = self._sample(0)
        rotated = self._call(sample.q, sample.k)
        kept = [x.detach().clone() for x in rotated]  # who works in place may do so again
        gradients = self._backward(rotated, sample)
        return relative_errors(self._problem, self._samples[0], kept, gradients)

    def saved_bytes(self) -> dict[str, int]:
        """Bytes kept for backward, without what all layers share and what is kept anyway.

        `kept` is all of it; `outputs` the part that is the rotated queries and keys, which
        attention keeps for its own backward in any case.
        """
        problem = self._problem
        shared = (*problem.weights, *problem.cos_sin, problem.positions, problem.packed_freqs)
        known = {_storage_address(x) for x in shared}
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if _storage_address(x) not in known:
                kept[_storage_address(x)] = x.untyped_storage().nbytes()
            return x

        sample = self._sample(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            rotated = self._call(sample.q, sample.k)
        outputs = {_storage_address(x) for x in rotated} & set(kept)
        return {"kept": sum(kept.values()), "outputs": sum(kept[x] for x in outputs)}

    def _sample(self, index: int) -> Sample:
        sample = self._samples[index]
        return sample.clone() if self._contender.in_place else sample

    def _backward(self, rotated: Any, sample: Sample) -> tuple[torch.Tensor, ...]:
        wanted = (sample.q, sample.k, *self._weights)
        return torch.autograd.grad(rotated, wanted, sample.grads)


def _storage_address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
