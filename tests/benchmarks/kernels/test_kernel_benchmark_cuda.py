"""Test the kernel benchmark on a GPU: clocks, graphs and launch counts."""

import pytest
import torch

from rope_patch.benchmarks.kernels import model_steps, timing
from rope_patch.benchmarks.kernels.benchmark import KernelBenchRequest, bench

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
    assert timing.peak_memory(lambda: x + 1) == 2**22
    rows = model_steps.measure(("qwen3-8b",), torch.device("cuda"), torch.bfloat16, repeats=1)
    transformers, ours = (row["launches"] for row in rows)
    assert transformers > ours > 0
