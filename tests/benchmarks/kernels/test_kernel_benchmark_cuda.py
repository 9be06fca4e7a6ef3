"""Test the kernel benchmark on a GPU: clocks, graphs and launch counts."""

import pytest
import torch

from rope_patch import benchmarks
from rope_patch.benchmarks import KernelBenchRequest, QueueSleep
from rope_patch.benchmarks.kernels import copy_kernel
from rope_patch.benchmarks.kernels.benchmark import bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_all_phases_are_timed():
    request = KernelBenchRequest(
        shapes=("llama-3-8b", "gemma-3-12b"),
        lengths=(1, 64),
        batches=(1,),
        repeats=2,
        contenders=("hf", "ours", "ours-output"),
        steps=False,
    )
    for case in bench(request)["cases"]:
        phases = {"graph", "wall"} if case["length"] == 1 else {"forward", "backward", "both"}
        for row in (row for row in case["rows"] if "not_measured" not in row):
            assert set(row["times"]) == phases, row
            assert not row.get("wrong"), row


def test_peak_memory_and_launches():
    x = torch.zeros(2**20, device="cuda")
    assert benchmarks.peak_memory(lambda: x + 1) == 2**22
    (row,) = benchmarks.measure_launches(benchmarks.SHAPES["qwen3-8b"], torch.device("cuda"))
    assert (row["hf"], row["ours"], row["profiler"]) == (945, 36, True)


def test_copy_kernel_copies():
    source = torch.randn(3, 5120, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_kernel.copy(target, source)
    assert torch.equal(target, source)


def test_sleep_covers_calls_with_many_launches():
    """A thousand launches take the CPU longer than the first sleep."""
    x = torch.zeros(16, device="cuda")
    sleep = QueueSleep()

    def call():
        for _ in range(1000):
            x.add_(1)

    seconds = benchmarks.time_calls(lambda: [call], sleep)
    assert sleep.is_covering
    assert sleep.cycles > QueueSleep().cycles
    assert 0 < seconds[0] < 1


def test_calls_that_wait_for_the_device_are_marked():
    x = torch.ones(16, device="cuda")
    sleep = QueueSleep()
    benchmarks.time_calls(lambda: [lambda: x.sum().item()], sleep)
    assert not sleep.is_covering
