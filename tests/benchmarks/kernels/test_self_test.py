"""Test the kernels' self-test in Triton's interpreter, with right and wrong kernels."""

import json

import pytest
import torch

pytest.importorskip("triton")

import triton
from typer.testing import CliRunner

from rope_patch import Refused, ops
from rope_patch.benchmarks.kernels import self_test
from rope_patch.cli import app
from rope_patch.ops.kernels import rope

pytestmark = pytest.mark.skipif(not ops.is_interpreted(), reason="needs TRITON_INTERPRET=1")
SIZES = {"heads": 2, "key_heads": 1, "head_dim": 8}
SMALL = {
    "rotates": SIZES,
    "norms": {"op": "qk_norm_rope", **SIZES},
}


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.setattr(self_test, "_models", lambda: SMALL)
    monkeypatch.setattr(self_test, "_SIZES", ((2, 1), (1, 1030)))  # the second for GPUs only


def break_launch(monkeypatch, answer):
    """Let backward rotations of float16 fail: by `answer`, applied to the results."""
    real = rope.launch

    def launch(q, k, *rest):
        outputs = real(q, k, *rest)
        return answer(outputs) if q.dtype == torch.float16 and rest[5] else outputs

    monkeypatch.setattr(rope, "launch", launch)


def test_right_kernels():
    result = self_test.run_self_test()
    assert result.is_ok
    assert {row.verdict for row in result.rows} == {"ok"}
    assert len(result.rows) == 3 * (5 + 7)  # dtypes; kernels of both models
    assert all(0 < row.error <= row.limit for row in result.rows)
    text = result.as_text()
    for part in (torch.__version__, triton.__version__, "interpreter", "36 of 36 are right"):
        assert part in text
    assert sum(line.endswith("| ok |") for line in text.splitlines()) == 36


def test_wrong_kernel_is_found(monkeypatch):
    break_launch(monkeypatch, lambda outputs: tuple(1.02 * x for x in outputs))
    result = self_test.run_self_test(("rotates",))
    (wrong,) = (row for row in result.rows if row.verdict != "ok")
    assert (wrong.kernel, wrong.dtype, wrong.verdict) == ("rope backward", "float16", "wrong")
    # 2% of the largest number, in halves of float16's spacing, and a little for rounding.
    assert wrong.error == pytest.approx(0.02 / 2**-11, rel=0.1)
    assert "- rope backward, rotates, 2 x 1, float16: gradient of" in result.as_text()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (triton.CompilationError(None, None, "no such instruction"), "did not compile"),
        (RuntimeError("an illegal memory access"), "did not run"),
    ],
    ids=["compiler", "driver"],
)
def test_kernel_that_raises(monkeypatch, error, verdict):
    def fail(outputs):
        raise error

    break_launch(monkeypatch, fail)
    result = self_test.run_self_test(("rotates",))
    assert [(row.kernel, row.verdict) for row in result.rows if row.verdict != "ok"] == [
        ("rope backward", verdict)
    ]
    assert type(error).__name__ in result.as_text()


def test_exit_codes_of_the_command(monkeypatch):
    command = ["bench", "--self-test", "--shapes", "rotates"]
    right = CliRunner().invoke(app, command)
    assert right.exit_code == 0
    assert "18 of 18 are right" in right.output
    break_launch(monkeypatch, lambda outputs: tuple(torch.full_like(x, torch.nan) for x in outputs))
    wrong = CliRunner().invoke(app, command)
    assert wrong.exit_code == 1
    assert "17 of 18 are right" in wrong.output
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert report["ok"] is False
    assert sum(row["verdict"] == "wrong" for row in report["rows"]) == 1


def test_machines_without_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(self_test, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match=r"no GPU here.*TRITON_INTERPRET=1"):
        self_test.run_self_test()
    monkeypatch.setattr(self_test, "triton_unavailable_reason", lambda: "Triton is 2.0")
    with pytest.raises(Refused, match="but triton is 2"):
        self_test.run_self_test()


def test_unknown_shapes_are_refused():
    with pytest.raises(Refused, match=r"'lama'.*rotates, norms"):
        self_test.run_self_test(("lama",))


def test_shapes_are_those_of_real_models(monkeypatch):
    monkeypatch.undo()
    models = self_test._models()
    assert {"llama-3-8b", "qwen3-8b", "gemma-3-12b", "glm-4-9b", "olmo-2-7b"} <= set(models)
    variants = [
        variant
        for model in models.values()
        for _, variant in self_test._variants(model, torch.device("cpu"), torch.float32)
    ]
    for name in ("interleaved", "sections", "inplace", "norm_all_heads", "recompute_input"):
        assert {getattr(variant, name) for variant in variants} == {False, True}
    assert {variant.head_dim for variant in variants} == {64, 128, 256}
    ops = {"rope", "qk_norm_rope", "rerotate_", "rope_into_cache", "qk_norm_rope_into_cache"}
    assert {variant.op for variant in variants} == ops
    assert any(variant.rotary_dim < variant.head_dim for variant in variants)
