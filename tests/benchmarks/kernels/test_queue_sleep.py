"""Test the sleep before timed calls on a simulated GPU, whose clock is a list of events."""

from types import SimpleNamespace

import pytest
import torch

from rope_patch.benchmarks import QueueSleep, time_calls

LAUNCH, KERNEL = 0.01, 0.002  # milliseconds of the CPU and of the GPU


class SimulatedGPU:
    """A CPU's time and the time at which the GPU has done all that is queued, in milliseconds."""

    def __init__(self):
        self.cpu = self.gpu = 0.0
        self.sleeps = []

    def queue(self, ms):
        self.gpu = max(self.gpu, self.cpu) + ms

    def sleep(self, cycles):
        self.sleeps.append(cycles)
        self.queue(cycles / 2e6)

    def launch(self, kernels):
        for _ in range(kernels):
            self.cpu += LAUNCH
            self.queue(KERNEL)

    def synchronize(self):
        self.cpu = max(self.cpu, self.gpu)

    def event(self, enable_timing):
        gpu = self

        class Event(SimpleNamespace):
            def record(self):
                gpu.queue(0)
                self.at = gpu.gpu

            def query(self):
                return gpu.cpu >= self.at

            def elapsed_time(self, end):
                return end.at - self.at

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    simulated = SimulatedGPU()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "_sleep", simulated.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    return simulated


@pytest.mark.parametrize("kernels", [1, 76, 300, 1000])
def test_time_excludes_launches_however_many(gpu, kernels):
    sleep = QueueSleep()
    seconds = time_calls(lambda: [lambda: gpu.launch(kernels)] * 3, sleep)
    assert seconds == pytest.approx([kernels * KERNEL / 1e3] * 3)
    assert sleep.is_covering


def test_few_launches_keep_the_first_sleep(gpu):
    sleep = QueueSleep()
    for _ in range(5):
        time_calls(lambda: [lambda: gpu.launch(10)], sleep)
    assert set(gpu.sleeps) == {QueueSleep().cycles}
    assert len(gpu.sleeps) == 1 + 5  # a warm-up, and no repetition


def test_longer_sleep_is_kept(gpu):
    sleep = QueueSleep()
    for _ in range(2):
        gpu.sleeps.clear()
        time_calls(lambda: [lambda: gpu.launch(300)], sleep)
    assert gpu.sleeps == [sleep.cycles]


@pytest.mark.parametrize(("slow_call", "ms"), [(1, 5000), (2, 50)], ids=["compilation", "hiccup"])
def test_single_slow_call_does_not_lengthen_the_sleep(gpu, slow_call, ms):
    calls = []

    def call():
        calls.append(0)
        gpu.cpu += ms if len(calls) == slow_call else 0
        gpu.launch(1)

    sleep = QueueSleep()
    assert time_calls(lambda: [call], sleep) == pytest.approx([KERNEL / 1e3])
    assert sleep.cycles == QueueSleep().cycles


def test_calls_that_wait_for_the_device_end_and_are_marked(gpu):
    def call():
        gpu.launch(1)
        gpu.synchronize()
        gpu.launch(1)

    sleep = QueueSleep()
    seconds = time_calls(lambda: [call], sleep)
    assert not sleep.is_covering
    assert seconds[0] > 2 * KERNEL / 1e3
    gpu.sleeps.clear()
    time_calls(lambda: [call], sleep)
    assert len(gpu.sleeps) == 1  # no more attempts


def test_calls_are_prepared_again_for_each_repetition(gpu):
    """A backward pass can run only once."""
    used = set()

    def prepare():
        token = object()

        def call():
            assert token not in used
            used.add(token)
            gpu.launch(300)

        return [call]

    time_calls(prepare, QueueSleep())
    assert len(used) > 2
