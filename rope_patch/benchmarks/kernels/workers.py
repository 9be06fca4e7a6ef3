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


def moved_bytes(problem: Problem, phase: str) -> int:
    """Return the bytes that any implementation of a phase must read and write.

    A rotation reads and writes N bytes in each direction. Backward of the norm reads the gradients
    and what forward saved, and writes the inputs' gradients: 3 N.
    """
    backward = 3 if problem.weights else 2
    return problem.bytes * {BACKWARD: backward, BOTH: 2 + backward}.get(phase, 2)


def copied_bytes(problem: Problem, phase: str) -> int:
    """Return the bytes that the copy beside a phase reads and writes."""
    return problem.bytes * (4 if phase == BOTH else 2)


class Clock:
    """The clock of one phase: a call of it runs the phase on every sample.

    Args:
        time: Returns the seconds per call.
        sleep: The GPU's sleep before each call; None if there is none.
    """

    def __init__(
        self, time: Callable[[], list[float]], sleep: timing.QueueSleep | None = None
    ) -> None:
        self._time, self._sleep = time, sleep

    def __call__(self) -> list[float]:
        """Return the seconds per call."""
        return self._time()

    @property
    def includes_launches(self) -> bool:
        """Return whether the GPU waited for launches, against the intention."""
        return self._sleep is not None and not self._sleep.is_covering


class TimedCalls(ABC):
    """Base class of timed calls, one per sample."""

    def __init__(self, count: int) -> None:
        self._count = count

    @abstractmethod
    def prepare(self, phase: str, index: int) -> Thunk:
        """Return the timed part of a phase on a sample; all else is done before."""

    def clock(self, phase: str) -> Clock:
        """Return the clock of a phase.

        A single token is timed in a loop, because one call is shorter than a clock's overhead.
        """
        sleep = timing.QueueSleep()
        if phase in TRAINING:
            prepare = partial(self._prepare_all, phase)
            return Clock(partial(timing.time_calls, prepare, sleep), sleep)
        loop = torch.no_grad()(timing.unrolled(self._prepare_all(phase)))
        if phase == WALL:
            return Clock(partial(timing.wall_time, loop))
        return Clock(partial(timing.graph_time, timing.capture_graph(loop), sleep), sleep)

    def _prepare_all(self, phase: str) -> list[Thunk]:
        return [self.prepare(phase, index) for index in range(self._count)]


class CopyBaseline(TimedCalls):
    """A copy of as many bytes as queries and keys have, by `copy_` or another function.

    Args:
        problem: The problem.
        count: Copies in turn.
        copy: Copies the second tensor into the first one.
    """

    def __init__(
        self,
        problem: Problem,
        count: int,
        copy: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_,
    ) -> None:
        super().__init__(count)
        self._copy = copy
        size = (2, problem.bytes // problem.dtype.itemsize)  # forward's and backward's
        self._sources = [
            torch.randn(size, dtype=problem.dtype, device=problem.device) for _ in range(count)
        ]
        self._targets = [torch.empty_like(source) for source in self._sources]

    def prepare(self, phase: str, index: int) -> Thunk:
        """See `TimedCalls.prepare`."""
        part = slice(None) if phase == BOTH else int(phase == BACKWARD)
        return partial(self._copy, self._targets[index][part], self._sources[index][part])

    def require_exact(self) -> None:
        """Raise RuntimeError if a copy differs from its source."""
        self.prepare(BOTH, 0)()
        if not torch.equal(self._targets[0], self._sources[0]):
            raise RuntimeError("the copy differs from its source")


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
        """Return the errors against float64; see `ground_truth.relative_errors`.

        A single token is a decode step, which has no gradients.
        """
        sample = self._sample(0)
        if self._problem.length == 1:
            with torch.no_grad():
                outputs = self._call(sample.q, sample.k)
            return relative_errors(self._problem, self._samples[0], outputs, ())
        rotated = self._call(sample.q, sample.k)
        # The backward pass may work in place, too.
        outputs = rotated[0].detach().clone(), rotated[1].detach().clone()
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
