"""What the kernel benchmark measures; how long anything takes is no matter of tests."""

import math

import pytest
import torch

from rope_patch.benchmarks.kernels import benchmark, ground_truth, timing
from rope_patch.benchmarks.kernels.benchmark import KernelBenchRequest, bench
from rope_patch.benchmarks.kernels.implementations import (
    Implementation,
    Unavailable,
    builtin_implementations,
)
from rope_patch.benchmarks.kernels.shapes import (
    BHSD,
    PACKED,
    SHAPES,
    VIEWS,
    Problem,
    samples_needed,
)
from rope_patch.benchmarks.kernels.workers import ImplementationRun
from rope_patch.ops import dispatch

NAMES = ("hf", "ours", "ours-output", "ours-tables", "liger")


@pytest.fixture(autouse=True, scope="module")
def as_usual():
    """Turn Triton's interpreter off, which the kernels' own tests use."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (dispatch, benchmark):
            patched.setattr(module, "is_interpreted", lambda: False)
        yield


def problem(shape="qwen3-8b", length=6, layout=VIEWS, **changes):
    made = {"batch": 2, "dtype": torch.float32, "device": torch.device("cpu"), **changes}
    return Problem(shape=SHAPES[shape], length=length, layout=layout, **made)


def contender(name):
    return next(c for c in builtin_implementations() if c.name == name)


def run(case, *contenders):
    rows = benchmark._measure_problem(case, list(contenders), repeats=2)["rows"]
    return {row["contender"]: row for row in rows}


def wrong(case):
    """Rotate as transformers does, with a small error in queries only."""
    right = contender("hf").build(case)

    def call(q, k):
        q, k = right(q, k)
        return 1.1 * q, k

    return call


def in_place(case):
    """Rotate correctly, but overwrite queries, keys and gradients without saying so."""
    right = contender("hf").build(case)

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x.clone()
            x.zero_()
            return out

        @staticmethod
        def backward(ctx, grad):
            kept = grad.clone()
            grad.zero_()
            return kept

    def call(q, k):
        rotated = right(Greedy.apply(q), Greedy.apply(k))
        return tuple(Greedy.apply(x) for x in rotated)

    return call


@pytest.fixture(scope="module")
def results():
    shapes = ("llama-3-8b", "qwen3-8b")
    return bench(
        KernelBenchRequest(shapes=shapes, lengths=(1, 8), repeats=2, contenders=NAMES, steps=False)
    )


def test_every_size_is_measured_and_the_layouts_at_one(results):
    sizes = [(case["shape"], case["length"], case["layout"]) for case in results["cases"]]
    assert sizes == [
        (shape, *size)
        for shape in ("llama-3-8b", "qwen3-8b")
        for size in ((1, VIEWS), (8, VIEWS), (8, PACKED), (8, BHSD))
    ]
    assert results["cases"][1]["bytes"] == 8 * 40 * 128 * 4


def test_the_copy_is_the_measure_of_all(results):
    for case in results["cases"]:
        phases = {"wall"} if case["length"] == 1 else {"forward", "backward", "both"}
        for row in case["rows"]:
            assert set(row["times"]) == (set() if "not_measured" in row else phases)
            for time in row["times"].values():
                assert 0 < time["min"] <= time["percent"] <= time["max"] < math.inf
                assert time["ms"] > 0
        copy = case["rows"][0]
        assert copy["contender"] == "copy"
        assert all(t["percent"] == t["min"] == t["max"] == 100 for t in copy["times"].values())
        once = copy["times"]["wall" if case["length"] == 1 else "forward"]["ms"]
        assert copy["bytes_per_second"] == pytest.approx(2 * case["bytes"] / once * 1e3)


def test_everyone_is_right_and_says_how_right(results):
    for case in results["cases"]:
        for row in case["rows"]:
            if row["contender"] != "copy" and "not_measured" not in row:
                weights = {"dw"} if case["shape"] == "qwen3-8b" else set()
                assert set(row["errors"]) == {"q", "k", "dq", "dk"} | weights
                assert max(row["errors"].values()) < 1e-6
                assert row["wrong"] is False


def test_who_is_not_there_says_why(results):
    rows = [row for case in results["cases"] for row in case["rows"]]
    reasons = {row["contender"]: row["not_measured"] for row in rows if "not_measured" in row}
    assert set(reasons) == {"ours-output", "liger"}
    assert reasons["liger"] == "Triton needs a GPU, or TRITON_INTERPRET=1 and patience"


def test_what_is_kept_for_backward(results):
    """As counted in the kernels' own research: nothing by a rotation, 3.02 N with a norm."""
    kept = {case["shape"]: case for case in results["kept"]}
    shares = {
        shape: {row["contender"]: row.get("kept", 0) / case["bytes"] for row in case["rows"]}
        for shape, case in kept.items()
    }
    assert shares["llama-3-8b"]["hf"] == 0
    assert shares["qwen3-8b"]["hf"] == pytest.approx(3.02, abs=0.01)


def test_outputs_that_are_kept_are_told_apart():
    def keeping(case):
        right = contender("hf").build(case)
        return lambda q, k: tuple(x.exp() for x in right(q, k))  # whose backward needs its outputs

    case = problem("llama-3-8b")
    made = Implementation(name="x", title="x", build=keeping)
    saved = ImplementationRun(made, case, [case.sample(0)]).saved_bytes()
    assert saved == {"kept": case.bytes, "outputs": case.bytes}


def test_a_wrong_contender_is_measured_and_shown_as_wrong():
    case = problem()
    row = run(case, Implementation(name="bad", title="bad", build=wrong))["bad"]
    assert row["wrong"] is True
    assert row["errors"]["q"] == pytest.approx(0.1, rel=1e-4)
    assert row["errors"]["dq"] == pytest.approx(0.1, rel=1e-4)
    assert row["errors"]["k"] < 1e-6
    assert row["errors"]["dw"] > 0.01
    assert set(row["times"]) == {"forward", "backward", "both"}


def test_nan_is_wrong():
    def build(case):
        return lambda q, k: (q.transpose(1, 2) * math.nan, k.transpose(1, 2))

    row = run(problem("llama-3-8b"), Implementation(name="bad", title="bad", build=build))["bad"]
    assert row["wrong"] is True


def test_who_works_in_place_spoils_nothing():
    greedy = Implementation(name="greedy", title="greedy", build=in_place, in_place=True)
    for layout in (VIEWS, PACKED, BHSD):
        rows = run(problem(layout=layout), greedy, contender("hf"))
        assert not rows["greedy"]["wrong"]
        assert not rows["hf"]["wrong"]


def test_frozen_weights_have_no_gradients():
    frozen = Implementation(name="f", title="f", build=contender("hf").build, frozen=True)
    assert "dw" not in run(problem(), frozen)["f"]["errors"]


def test_one_failure_costs_nobody_else():
    def missing(case):
        raise Unavailable("not today")

    def broken(case):
        def call(q, k):
            raise RuntimeError("first line\nsecond line")

        return call

    makers = {"missing": missing, "broken": broken}
    made = [Implementation(name=name, title=name, build=build) for name, build in makers.items()]
    rows = run(problem(), *made, contender("hf"))
    assert rows["missing"]["not_measured"] == "not today"
    assert rows["broken"]["not_measured"] == "RuntimeError: first line"
    assert set(rows["hf"]["times"]) == {"forward", "backward", "both"}


def test_a_phase_can_fail_alone():
    def build(case):
        right, calls = contender("hf").build(case), []

        def call(q, k):
            calls.append(0)
            if len(calls) > 7:  # past the check, both peaks, what is saved, and some of forward
                raise torch.OutOfMemoryError("CUDA out of memory")
            return right(q, k)

        return call

    row = run(problem(), Implementation(name="big", title="big", build=build))["big"]
    assert row["times"] == {}
    assert row["failed"] == dict.fromkeys(("forward", "backward", "both"), "out of memory")


def test_what_does_not_fit_is_skipped_and_says_so(monkeypatch):
    monkeypatch.setattr(benchmark, "_available_memory", lambda device: 1000)
    case = benchmark._measure_problem(problem(), [contender("hf")], repeats=1)
    assert case["rows"] == []
    assert case["not_measured"].endswith("and 0.0 GB are free")


@pytest.mark.parametrize("layout", [VIEWS, PACKED, BHSD])
def test_layouts_are_what_they_say(layout):
    sample = problem(layout=layout).sample(0)
    fresh = sample.clone()
    originals, copies = ((x.q, x.k, *x.grads) for x in (sample, fresh))
    for x, other in zip(originals, copies, strict=True):
        assert x.stride() == other.stride()
        assert torch.equal(x, other)
        assert x.data_ptr() != other.data_ptr()
    assert sample.q.shape == (2, 6, 32, 128)
    assert sample.grads[1].shape == (2, 8, 6, 128)
    assert sample.q.is_contiguous() == (layout != PACKED)
    assert (sample.k.data_ptr() - sample.q.data_ptr() == 32 * 128 * 4) == (layout == PACKED)
    assert sample.grads[0].is_contiguous() == (layout == BHSD)


def test_errors_are_the_same_in_pieces(monkeypatch):
    case = problem("gemma-3-12b", length=11)
    runner = ImplementationRun(contender("hf"), case, [case.sample(0)])
    whole = runner.relative_errors()
    monkeypatch.setattr(ground_truth, "_CHUNK_ELEMENTS", 2 * 16 * 256 * 4)  # 4 tokens
    assert runner.relative_errors() == pytest.approx(whole, rel=1e-3)


def test_samples_fill_the_cache_several_times():
    case = problem()
    assert samples_needed(case, case.bytes) == 4
    assert samples_needed(case, 100) == 1
    assert samples_needed(case, 10**9) == 8


def test_peaks_are_of_the_call_alone():
    held = torch.zeros(1000)

    def call():
        one = held + 1
        two = one + 1
        del one
        return two + 1

    assert 2 * 4000 <= timing.peak_memory(call) < 2 * 4000 + 100  # the ones are tensors, too


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": ("llama-2",)}, "shapes must be of llama-3-8b, .* got llama-2"),
        ({"contenders": ("hf", "xformers")}, "contenders must be of hf, .* got xformers"),
        ({"lengths": (0,)}, "lengths must be whole numbers of at least 1"),
        ({"batches": ()}, "batches must be whole numbers of at least 1"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1, got 0"),
        ({"dtype": "float8"}, "dtype must be of auto, float32"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        bench(KernelBenchRequest(**changes))


def test_rivals_must_be_a_folder(tmp_path):
    with pytest.raises(ValueError, match="rivals must be a folder"):
        bench(KernelBenchRequest(rivals=tmp_path / "none"))
