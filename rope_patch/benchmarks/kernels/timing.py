"""Timed calls of implementations and of the copy beside them: clocks, errors and memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rope_patch.benchmarks.kernels.implementations import Implementation
from rope_patch.benchmarks.kernels.problems import Problem, Sample, relative_errors
from rope_patch.evaluation.measures.speed import time_call

Thunk = Callable[[], Any]

FORWARD, BACKWARD, BOTH, WALL, GRAPH = "forward", "backward", "both", "wall", "graph"
TRAINING = (FORWARD, BACKWARD, BOTH)

# Cycles that a GPU sleeps before a call, at first and at most: about 1 and 70 ms.
_FIRST_SLEEP, _LONGEST_SLEEP = 2_000_000, 128_000_000
_SLEEP_GROWTH = 2

# Calls per loop, where a single call is shorter than the overhead of a clock or a graph.
_CALLS_PER_LOOP = 20

_CPU_CACHE = 32 * 2**20  # bytes; torch does not report it, and too much does no harm


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

    def __init__(self, time: Callable[[], list[float]], sleep: QueueSleep | None = None) -> None:
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
        sleep = QueueSleep()
        if phase in TRAINING:
            prepare = partial(self._prepare_all, phase)
            return Clock(partial(time_calls, prepare, sleep), sleep)
        loop = torch.no_grad()(unrolled(self._prepare_all(phase)))
        if phase == WALL:
            return Clock(partial(wall_time, loop))
        return Clock(partial(graph_time, capture_graph(loop), sleep), sleep)

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
        """Return the errors against float64; see `problems.relative_errors`.

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


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache, an assumed one where torch does not report it."""
    return l2_bytes(device) or _CPU_CACHE


def l2_bytes(device: torch.device) -> int | None:
    """Return the size of a GPU's L2 cache as torch reports it; None if it does not."""
    if device.type != "cuda":
        return None
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)


class QueueSleep:
    """A GPU's sleep before a call, in which the CPU queues all of the call's kernels.

    `triton.testing.do_bench` has no such sleep, so that it includes the launches of calls with many
    kernels; nor does it take implementations in turns, or prepare a graph for each backward call.

    Where the sleep ends before the last kernel is queued, the GPU waits for the CPU and the time
    includes launches. Then the calls are repeated, and the sleep is made longer for good if that
    does not help.

    Attributes:
        cycles: Length of the sleep.
        is_covering: Whether the sleep covers the queueing. It cannot where a call waits for the
            device; such calls are timed with the first length.
        is_warm: Whether the calls have run before, so that their compilation does not count.
    """

    def __init__(self) -> None:
        self.cycles = _FIRST_SLEEP
        self.is_covering = True
        self.is_warm = False

    def lengthen(self) -> None:
        """Lengthen the sleep, or give up on covering the queueing."""
        self.cycles *= _SLEEP_GROWTH
        if self.cycles > _LONGEST_SLEEP:
            self.cycles, self.is_covering = _FIRST_SLEEP, False


def time_calls(prepare: Callable[[], list[Thunk]], sleep: QueueSleep) -> list[float]:
    """Return the seconds of each call, by CUDA events if there is a GPU.

    The results live until all calls are done, so that each call writes to different memory.

    Args:
        prepare: Returns the calls; all that is not timed is done before it returns. It is called
            again for each repetition.
        sleep: The sleep before each call; lengthened until it covers the queueing.
    """
    if not torch.cuda.is_available():
        results: list[Any] = []
        return [time_call(partial(_append_result, results, call)) for call in prepare()]
    if not sleep.is_warm:
        _time_queued(prepare(), sleep.cycles)
        sleep.is_warm = True
    is_repetition = False
    while True:
        seconds, is_covered = _time_queued(prepare(), sleep.cycles)
        if is_covered or not sleep.is_covering:
            return seconds
        if is_repetition:  # the first time may have been another process's fault
            sleep.lengthen()
        is_repetition = True


def _time_queued(calls: list[Thunk], cycles: int) -> tuple[list[float], bool]:
    """Return the seconds of each call, and whether every sleep outlasted its call's queueing."""
    results: list[Any] = []
    events = []
    is_covered = True
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        results.append(call())
        is_covered &= not start.query()  # the event behind the sleep has not happened yet
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events], is_covered


def _append_result(results: list[Any], call: Thunk) -> None:
    results.append(call())


def unrolled(calls: list[Thunk]) -> Thunk:
    """Return a call that runs `_CALLS_PER_LOOP` of the calls, in rotation."""

    def loop() -> None:
        for i in range(_CALLS_PER_LOOP):
            calls[i % len(calls)]()

    return loop


def wall_time(loop: Thunk) -> list[float]:
    """Return the seconds of one call within a loop, launches included."""
    return [time_call(loop) / _CALLS_PER_LOOP]


def graph_time(graph: Thunk, sleep: QueueSleep) -> list[float]:
    """Return the seconds of one call within a CUDA graph of a loop."""
    return [time_calls(lambda: [graph], sleep)[0] / _CALLS_PER_LOOP]


def capture_graph(loop: Thunk) -> Thunk:
    """Capture a loop in a CUDA graph; return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up outside of the graph: compilation, library setup
        loop()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def peak_memory(call: Thunk) -> int:
    """Return the peak bytes of a call, beyond those held before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else some builds of torch log to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return max(accumulate(memory_changes(profiler)), default=0)


def memory_changes(profiler: Any) -> list[int]:
    """Return the bytes allocated (positive) and freed (negative), in order of time."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
