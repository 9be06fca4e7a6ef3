"""Test what the kernel benchmark measures, but no durations."""

import logging
import math
from pathlib import Path
from time import sleep

import pytest
import torch

from rope_patch import benchmarks, ops
from rope_patch.benchmarks import SHAPES, Implementation, ImplementationRun, KernelBenchRequest
from rope_patch.benchmarks.kernels import benchmark, copy_kernel, implementations, problems
from rope_patch.benchmarks.kernels.benchmark import bench, choose_settings, left_out

pytestmark = pytest.mark.usefixtures("without_interpreter")
VIEWS, PACKED, BHSD = "views", "packed", "bhsd-gradients"  # layouts
PHASES = ("forward", "backward", "both")
NAMES = ("hf", "ours", "ours-output", "ours-tables", "ours-inplace", "liger")


def problem(shape="qwen3-8b", length=6, layout=VIEWS, **changes):
    settings = {"batch": 2, "dtype": torch.float32, "device": torch.device("cpu"), **changes}
    return benchmarks.Problem(shape=SHAPES[shape], length=length, layout=layout, **settings)


def builtin(name):
    return next(c for c in benchmarks.builtin_implementations() if c.name == name)


def run(case, *contenders):
    rows = benchmark._measure_problem(case, list(contenders), repeats=2)["rows"]
    return {row["contender"]: row for row in rows}


def build_wrong(case):
    """Rotate as transformers does, with a small error in queries only."""
    right = builtin("hf").build(case)

    def call(q, k):
        q, k = right(q, k)
        return 1.1 * q, k

    return call


def build_in_place(case):
    """Rotate correctly, but overwrite queries, keys and gradients."""
    right = builtin("hf").build(case)

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x.clone()
            x.zero_()
            return out

        @staticmethod
        def backward(ctx, grad):
            copied = grad.clone()
            grad.zero_()
            return copied

    def call(q, k):
        rotated = right(Greedy.apply(q), Greedy.apply(k))
        return tuple(Greedy.apply(x) for x in rotated)

    return call


def test_the_contender_in_place_overwrites_its_inputs():
    case = problem("llama-3-8b", length=8)
    sample = case.sample(0).clone()
    rotated = builtin("ours-inplace").build(case)(sample.q, sample.k)
    for x, out in zip((sample.q, sample.k), rotated, strict=True):
        assert out.data_ptr() == x.data_ptr()


@pytest.fixture(scope="module")
def results():
    shapes = ("llama-3-8b", "qwen3-8b")
    return bench(
        KernelBenchRequest(shapes=shapes, lengths=(1, 8), repeats=2, contenders=NAMES, steps=False)
    )


def test_all_sizes_and_layouts_are_measured(results):
    sizes = [(case["shape"], case["length"], case["layout"]) for case in results["cases"]]
    assert sizes == [
        (shape, *size)
        for shape in ("llama-3-8b", "qwen3-8b")
        for size in ((1, VIEWS), (8, VIEWS), (8, PACKED), (8, BHSD))
    ]
    assert results["cases"][1]["bytes"] == 8 * 40 * 128 * 4


def test_times_are_relative_to_a_copy(results):
    for case in results["cases"]:
        phases = {"wall"} if case["length"] == 1 else set(PHASES)
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


def test_implementations_report_small_errors(results):
    for case in results["cases"]:
        for row in case["rows"]:
            if row["contender"] != "copy" and "not_measured" not in row:
                weights = {"dw"} if case["shape"] == "qwen3-8b" else set()
                gradients = {"dq", "dk"} | weights if case["length"] > 1 else set()
                assert set(row["errors"]) == {"q", "k"} | gradients
                assert max(row["errors"].values()) < 1e-6
                assert row["wrong"] is False


def test_missing_implementations_report_a_reason(results):
    rows = [row for case in results["cases"] for row in case["rows"]]
    reasons = {row["contender"]: row["not_measured"] for row in rows if "not_measured" in row}
    assert set(reasons) == {"ours-output", "liger"}
    assert reasons["liger"] == "Triton needs a GPU, or TRITON_INTERPRET=1 and patience"


def test_saved_bytes_for_backward(results):
    """A rotation saves nothing, a norm and rotation 3.02 times the input."""
    cases = {case["shape"]: case for case in results["kept"]}
    shares = {
        shape: {row["contender"]: row.get("kept", 0) / case["bytes"] for row in case["rows"]}
        for shape, case in cases.items()
    }
    assert shares["llama-3-8b"]["hf"] == 0
    assert shares["qwen3-8b"]["hf"] == pytest.approx(3.02, abs=0.01)


def test_saved_outputs_are_counted_separately():
    def build_saving(case):
        right = builtin("hf").build(case)
        return lambda q, k: tuple(x.exp() for x in right(q, k))  # exp saves its outputs

    case = problem("llama-3-8b")
    implementation = Implementation(name="x", title="x", build=build_saving)
    saved = ImplementationRun(implementation, case, [case.sample(0)]).saved_bytes()
    assert saved == {"kept": case.bytes, "outputs": case.bytes}


def test_wrong_implementation_is_measured_and_marked():
    def build_nan(case):
        return lambda q, k: (q.transpose(1, 2) * math.nan, k.transpose(1, 2))

    case = problem()
    row = run(case, Implementation(name="bad", title="bad", build=build_wrong))["bad"]
    assert row["wrong"] is True
    assert row["errors"]["q"] == pytest.approx(0.1, rel=1e-4)
    assert row["errors"]["dq"] == pytest.approx(0.1, rel=1e-4)
    assert row["errors"]["k"] < 1e-6
    assert row["errors"]["dw"] > 0.01
    nan = Implementation(name="nan", title="nan", build=build_nan)
    assert run(problem("llama-3-8b"), nan)["nan"]["wrong"] is True
    assert set(row["times"]) == set(PHASES)


def test_in_place_implementation_does_not_change_others():
    greedy = Implementation(name="greedy", title="greedy", build=build_in_place, in_place=True)
    for layout in (VIEWS, PACKED, BHSD):
        rows = run(problem(layout=layout), greedy, builtin("hf"))
        assert not rows["greedy"]["wrong"]
        assert not rows["hf"]["wrong"]


def test_failing_implementations_do_not_stop_others():
    def missing(case):
        raise benchmarks.Unavailable("not today")

    def broken(case):
        def call(q, k):
            raise RuntimeError("first line\nsecond line")

        return call

    makers = {"missing": missing, "broken": broken}
    implementations = [
        Implementation(name=name, title=name, build=build) for name, build in makers.items()
    ]
    rows = run(problem(), *implementations, builtin("hf"))
    assert rows["missing"]["not_measured"] == "not today"
    assert rows["broken"]["not_measured"] == "RuntimeError: first line"
    assert set(rows["hf"]["times"]) == set(PHASES)


def test_single_phases_can_fail():
    def build(case):
        right, calls = builtin("hf").build(case), []

        def call(q, k):
            calls.append(0)
            if len(calls) > 7:  # after the checks and part of the forward phase
                raise torch.OutOfMemoryError("CUDA out of memory")
            return right(q, k)

        return call

    row = run(problem(), Implementation(name="big", title="big", build=build))["big"]
    assert row["times"] == {}
    assert row["failed"] == dict.fromkeys(PHASES, "out of memory")


def test_problem_larger_than_memory_is_skipped(monkeypatch):
    monkeypatch.setattr(benchmark, "_available_memory", lambda device: 1000)
    case = benchmark._measure_problem(problem(), [builtin("hf")], repeats=1)
    assert case["rows"] == []
    assert case["not_measured"].endswith("and 0.0 GB are free")


@pytest.mark.parametrize("layout", [VIEWS, PACKED, BHSD])
def test_layouts_of_samples(layout):
    sample = problem(layout=layout).sample(0)
    clone = sample.clone()
    originals, copies = ((x.q, x.k, *x.grads) for x in (sample, clone))
    for x, other in zip(originals, copies, strict=True):
        assert x.stride() == other.stride()
        assert torch.equal(x, other)
        assert x.data_ptr() != other.data_ptr()
    assert sample.q.shape == (2, 6, 32, 128)
    assert sample.grads[1].shape == (2, 8, 6, 128)
    assert sample.q.is_contiguous() == (layout != PACKED)
    assert (sample.k.data_ptr() - sample.q.data_ptr() == 32 * 128 * 4) == (layout == PACKED)
    assert sample.grads[0].is_contiguous() == (layout == BHSD)


def test_errors_do_not_depend_on_chunks(monkeypatch):
    case = problem("gemma-3-12b", length=11)
    runner = ImplementationRun(builtin("hf"), case, [case.sample(0)])
    expected = runner.relative_errors()
    monkeypatch.setattr(problems, "_CHUNK_ELEMENTS", 2 * 16 * 256 * 4)  # 4 tokens
    assert runner.relative_errors() == pytest.approx(expected, rel=1e-3)


def test_samples_fill_the_cache_several_times():
    case = problem()
    assert benchmarks.samples_needed(case, case.bytes) == 4
    assert benchmarks.samples_needed(case, 100) == 1
    assert benchmarks.samples_needed(case, 10**9) == 8


def test_peak_memory_is_that_of_the_call():
    allocated = torch.zeros(1000)

    def call():
        one = allocated + 1
        two = one + 1
        del one
        return two + 1

    assert 2 * 4000 <= benchmarks.peak_memory(call) < 2 * 4000 + 100  # the scalars are tensors, too


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"shapes": ("llama-2",)}, "shapes .*llama-3-8b"),
        ({"contenders": ("hf", "xformers")}, "contenders .*xformers"),
        ({"lengths": (0,)}, "lengths"),
        ({"batches": ()}, "batches"),
        ({"repeats": 0}, "repeats .*got 0"),
        ({"dtype": "float8"}, "dtype"),
        ({"rivals": Path("none")}, "rivals must be a folder"),
    ],
)
def test_invalid_requests_are_refused(changes, fact):
    with pytest.raises(ValueError, match=fact):
        bench(KernelBenchRequest(**changes))


def test_the_default_run_on_a_gpu_says_what_it_leaves_out(monkeypatch, caplog):
    request = KernelBenchRequest()
    known = benchmark.all_implementations(request)
    settings = choose_settings(request, "cuda", known)
    options = left_out(request)
    assert [option.split()[0] for option in options] == ["--lengths", "--batch", "--contenders"]
    lengths, batches, contenders = (option.split()[1].split(",") for option in options)
    assert set(settings.lengths) < set(map(int, lengths))
    assert set(settings.batches) < set(map(int, batches))
    assert {*settings.contenders, *contenders} == {c.name for c in known}
    assert not set(settings.contenders) & set(contenders)
    assert left_out(KernelBenchRequest(lengths=(1,), batches=(1,), contenders=("hf",))) == []
    monkeypatch.setattr(benchmark, "current_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(benchmark, "_header", lambda *_: {})
    monkeypatch.setattr(benchmark, "_parts", lambda *_: [])
    with caplog.at_level(logging.INFO, logger="rope_patch"):
        bench(request)
    assert caplog.messages == [f"Left out unless asked for: {', '.join(options)}."]


def test_norm_backward_must_move_half_as_much_again():
    """It reads the gradients and the inputs, and writes the inputs' gradients."""
    for shape, backward in (("llama-3-8b", 2), ("qwen3-8b", 3)):
        case = problem(shape)
        moved = {phase: benchmarks.moved_bytes(case, phase) / case.bytes for phase in PHASES}
        assert moved == {"forward": 2, "backward": backward, "both": 2 + backward}
        copied = {phase: benchmarks.copied_bytes(case, phase) / case.bytes for phase in PHASES}
        assert copied == {"forward": 2, "backward": 2, "both": 4}


def test_share_scales_percentages_exactly():
    times, copy = [[0.2, 0.4], [0.2, 0.2]], [[0.1, 0.2], [0.2, 0.2]]
    once = benchmark._relative_to_copy(times, copy, 1)
    more = benchmark._relative_to_copy(times, copy, 1.5)
    assert (once["percent"], once["min"], once["max"]) == pytest.approx((200 / 3, 50, 100))
    assert {k: more[k] / once[k] for k in once} == pytest.approx(
        {"ms": 1, "percent": 1.5, "min": 1.5, "max": 1.5}
    )


def test_faster_copy_is_the_baseline(monkeypatch):
    case = problem("llama-3-8b")

    def slow(target, source):
        target.copy_(source)
        sleep(0.005)

    copies = {
        "copy": benchmarks.CopyBaseline(case, 1, slow),
        "copy-kernel": benchmarks.CopyBaseline(case, 1),
    }
    monkeypatch.setattr(benchmark, "_copies", lambda *_: copies)
    rows = run(case, builtin("hf"))
    for phase in PHASES:
        assert rows["copy-kernel"]["times"][phase]["percent"] == 100
        assert rows["copy"]["times"][phase]["percent"] < 60
    once = rows["copy-kernel"]["times"]["forward"]["ms"]
    assert rows["copy"]["bytes_per_second"] == pytest.approx(2 * case.bytes / once * 1e3)


def test_wrong_copy_is_refused():
    copy = benchmarks.CopyBaseline(
        problem(), 1, lambda target, source: target[1:].copy_(source[1:])
    )
    with pytest.raises(RuntimeError, match="the copy differs from its source"):
        copy.require_exact()


@pytest.mark.skipif(not ops.is_interpreted(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_kernel_copies(dtype):
    benchmarks.CopyBaseline(problem(length=3, dtype=dtype), 1, copy_kernel.copy).require_exact()


def test_our_frozen_weights_have_no_gradients():
    rows = run(problem(), builtin("ours"), builtin("ours-frozen"))
    assert set(rows["ours"]["errors"]) - set(rows["ours-frozen"]["errors"]) == {"dw"}
    assert max(rows["ours-frozen"]["errors"].values()) < 1e-6
    unnormed = run(problem("llama-3-8b"), builtin("ours-frozen"))["ours-frozen"]
    assert unnormed["not_measured"] == "a rotation has no weights"


@pytest.mark.parametrize("shape", ["llama-3-8b", "gemma-3-12b"])
def test_one_compilation_serves_all_lengths(shape, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compile_(f, backend=backend, **k))
    implementations._compiled_for.cache_clear()
    counts = []
    for length, layout in ((3, VIEWS), (8, VIEWS), (129, VIEWS), (8, PACKED), (1, VIEWS)):
        case = problem(shape, length=length, layout=layout)
        worker = ImplementationRun(builtin("hf-compile"), case, [case.sample(n) for n in range(2)])
        assert max(worker.relative_errors().values()) < 1e-5
        if length > 1:  # a single token is timed without gradients
            worker.prepare("forward", 1)()
        counts.append(len(graphs))
    implementations._compiled_for.cache_clear()
    assert counts == [1, 1, 1, 2, 3]
