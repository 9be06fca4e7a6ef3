"""Timed calls of implementations: their preparation, errors and saved memory."""

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
    """Base class of timed calls, one per sample."""

    def __init__(self, count: int) -> None:
        self._count = count

    @abstractmethod
    def prepare(self, phase: str, index: int) -> Thunk:
        """Return the timed part of a phase on a sample; all else is done before."""

    def clock(self, phase: str) -> Callable[[], list[float]]:
        """Return a function that runs a phase on every sample and returns the seconds per call.

        A single token is timed in a loop, because one call is shorter than a clock's overhead.
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
    """The baseline: a copy of as many bytes as queries and keys have."""

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
    """An implementation on one problem's samples."""

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
        """Return the errors against float64; see `ground_truth.relative_errors`."""
        sample = self._sample(0)
        rotated = self._call(sample.q, sample.k)
        outputs = [x.detach().clone() for x in rotated]  # the backward pass may work in place, too
        gradients = self._backward(rotated, sample)
        return relative_errors(self._problem, self._samples[0], outputs, gradients)

    def saved_bytes(self) -> dict[str, int]:
        """Return the bytes saved for backward, without tensors that all layers share.

        `kept` is all of them; `outputs` the part of the rotated queries and keys, which attention
        saves in any case.
        """
        problem = self._problem
        shared_tensors = (
            *problem.weights,
            *problem.cos_sin,
            problem.positions,
            problem.packed_freqs,
        )
        shared_storages = {_storage_address(x) for x in shared_tensors}
        saved_storages: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if _storage_address(x) not in shared_storages:
                saved_storages[_storage_address(x)] = x.untyped_storage().nbytes()
            return x

        sample = self._sample(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            rotated = self._call(sample.q, sample.k)
        outputs = {_storage_address(x) for x in rotated} & set(saved_storages)
        return {
            "kept": sum(saved_storages.values()),
            "outputs": sum(saved_storages[x] for x in outputs),
        }

    def _sample(self, index: int) -> Sample:
        sample = self._samples[index]
        return sample.clone() if self._contender.in_place else sample

    def _backward(self, rotated: Any, sample: Sample) -> tuple[torch.Tensor, ...]:
        inputs = (sample.q, sample.k, *self._weights)
        return torch.autograd.grad(rotated, inputs, sample.grads)


def _storage_address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
