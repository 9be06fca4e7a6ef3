"""Test the count of launches on narrow models, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from rope_patch import benchmarks, ops
from rope_patch.benchmarks.kernels import model_steps

CPU = torch.device("cpu")

# By hand from transformers' code, for one of queries and keys.
QWEN_NORM = ["_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul"]
ROTATION = ["mul", "neg", "cat", "mul", "add"]
QWEN_LAYER = 2 * (len(QWEN_NORM) + len(ROTATION))

needs_interpreter = pytest.mark.skipif(not ops.is_interpreted(), reason="needs TRITON_INTERPRET=1")


@needs_interpreter
def test_launches_of_few_layers():
    counts = {}
    for layers in (2, 4):
        (row,) = benchmarks.measure_launches(
            replace(benchmarks.SHAPES["qwen3-8b"], layers=layers), CPU
        )
        counts[layers] = row["hf"]
        assert row["ours"] == layers
        assert row["whole"]["hf"] - row["hf"] == row["whole"]["ours"] - row["ours"]
        assert row["profiler"] is False
    assert counts[4] - counts[2] == 2 * QWEN_LAYER


@needs_interpreter
@pytest.mark.slow
def test_launches_of_all_layers_of_qwen3():
    (row,) = benchmarks.measure_launches(benchmarks.SHAPES["qwen3-8b"], CPU)
    assert (row["hf"], row["ours"]) == (945, 36)


def test_launches_need_triton(monkeypatch):
    monkeypatch.setattr(model_steps, "is_interpreted", lambda: False)
    (row,) = benchmarks.measure_launches(benchmarks.SHAPES["qwen3-8b"], CPU)
    assert row["not_measured"].startswith("counting launches needs Triton on a GPU")


def test_operators_that_launch_nothing_do_not_count():
    counts = benchmarks.LaunchCounts()
    x = torch.zeros(4, 6)
    with benchmarks.dispatched_launches(counts):
        x.view(6, 4).transpose(0, 1)[1:].unsqueeze(0)
        torch.empty_like(x)
        assert counts.others == 0
        x + 1
        x.to(torch.bfloat16)
        torch.cat((x, x))
    assert (counts.ours, counts.others) == (0, 3)
