"""Test that a killed run of the kernel benchmark continues, and only with the same options."""

import json
import signal

import pytest
import typer
from typer.testing import CliRunner

from rope_patch.benchmarks import KernelBenchRequest
from rope_patch.benchmarks.kernels import benchmark, report
from rope_patch.benchmarks.kernels.benchmark import bench
from rope_patch.benchmarks.kernels.run_state import as_json, read_results
from rope_patch.cli import app
from rope_patch.cli import bench as benchmarking

pytestmark = pytest.mark.usefixtures("without_interpreter")
SETTINGS = {
    "shapes": ("llama-3-8b",),
    "lengths": (1, 4),
    "repeats": 1,
    "contenders": ("hf",),
    "steps": False,
}
PARTS = [
    "llama-3-8b, 1 token × 1, views",
    "llama-3-8b, 4 tokens × 1, views",
    "llama-3-8b, 4 tokens × 1, packed",
    "llama-3-8b, 4 tokens × 1, bhsd-gradients",
    "llama-3-8b, kept",
]


class Killed(BaseException):
    """The end of the process, which no handler catches."""


@pytest.fixture
def measured(monkeypatch):
    """Return the lengths and layouts that are measured; a -1 in front kills the run there."""
    measured = []
    measure = benchmark._measure_problem

    def recorded(problem, *arguments):
        if measured and measured[0] == -1 and len(measured) == 3:
            raise Killed
        measured.append((problem.length, problem.layout))
        return measure(problem, *arguments)

    monkeypatch.setattr(benchmark, "_measure_problem", recorded)
    return measured


@pytest.fixture
def killed(tmp_path, measured):
    """Return the folder of a run that was killed in its third case."""
    measured.append(-1)
    with pytest.raises(Killed):
        bench(KernelBenchRequest(**SETTINGS), tmp_path)
    measured.clear()
    return tmp_path


def test_killed_run_has_written_what_it_measured(killed):
    stored = json.loads((killed / "bench.json").read_text())
    assert [case["layout"] for case in stored["cases"]] == ["views", "views"]
    assert stored["missing"] == PARTS[2:]
    assert list(killed.iterdir()) == [killed / "bench.json"]


def test_unfinished_results_have_a_page_that_says_so(killed):
    report.write_all(read_results(killed), killed)
    page = (killed / "bench.html").read_text()
    assert f"3 of 5 parts are missing, the next is {PARTS[2]}" in page


def test_continued_run_measures_only_what_is_missing(killed, measured):
    before = read_results(killed)
    results = bench(KernelBenchRequest(**SETTINGS), killed)
    assert measured == [(4, "packed"), (4, "bhsd-gradients")]
    assert results["cases"][:2] == before["cases"]
    assert results["date"] == before["date"]
    assert list(results["seconds"]) == PARTS
    assert results["missing"] == []
    assert read_results(killed) == json.loads(as_json(results))
    measured.clear()
    assert as_json(bench(KernelBenchRequest(**SETTINGS), killed)) == as_json(results)
    assert measured == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"repeats": 2}, "expected repeats 1, got 2"),
        ({"lengths": (1, 4, 8)}, "lengths 1,4, got 1,4,8"),
        ({"contenders": ("hf", "ours")}, "contenders hf, got hf,ours"),
        ({"steps": True}, "steps False, got True"),
    ],
)
def test_other_options_are_refused(killed, measured, change, fact):
    before = (killed / "bench.json").read_bytes()
    with pytest.raises(ValueError, match=fact):
        bench(KernelBenchRequest(**SETTINGS | change), killed)
    assert measured == []
    assert (killed / "bench.json").read_bytes() == before


def test_other_device_code_and_rivals_are_refused(killed, tmp_path, monkeypatch):
    rivals = tmp_path / "rivals"
    rivals.mkdir()
    bench(KernelBenchRequest(**SETTINGS, rivals=rivals), killed)  # an empty folder changes nothing
    (rivals / "rotary.py").write_text("")
    with pytest.raises(ValueError, match=r"files of rivals \{\}, got .*rotary.py"):
        bench(KernelBenchRequest(**SETTINGS, rivals=rivals), killed)
    for name in ("_device_name", "_source_digest"):
        with monkeypatch.context() as patched:
            patched.setattr(benchmark, name, lambda *_: "another")
            with pytest.raises(ValueError, match="got another"):
                bench(KernelBenchRequest(**SETTINGS), killed)


@pytest.mark.parametrize(
    ("content", "fact"),
    [('{"cases": []}', "another version"), ('{"cases": [', "damaged"), ("[]", "a list")],
)
def test_other_files_are_refused(tmp_path, content, fact):
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(ValueError, match=fact):
        bench(KernelBenchRequest(**SETTINGS), tmp_path)


def test_failed_cases_are_tried_again(tmp_path, measured, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(benchmark, "_available_memory", lambda device: 0)
        bench(KernelBenchRequest(**SETTINGS), tmp_path)
    assert len(measured) == 4
    results = bench(KernelBenchRequest(**SETTINGS), tmp_path)
    assert len(measured) == 8
    assert all(case["rows"] for case in results["cases"])


def test_results_with_nan_continue(tmp_path):
    """JSON has no NaN, which wrong results can have as their error."""
    (tmp_path / "bench.json").write_text(as_json({"errors": [float("nan"), float("inf")], "x": 1}))
    stored = read_results(tmp_path)
    assert stored["errors"][1] == float("inf")
    assert stored["errors"][0] != stored["errors"][0]


def test_page_is_made_of_another_machines_results(killed, monkeypatch):
    monkeypatch.setattr(benchmark, "bench", None)
    result = CliRunner().invoke(app, ["bench", "--page", "--out", str(killed)])
    assert result.exit_code == 0
    assert "3 of 5 parts are missing" in (killed / "bench.html").read_text()


def test_page_needs_results(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--page", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"expected results in {tmp_path / 'bench.json'}, got none" in result.output


def test_sigterm_writes_the_page_and_says_how_to_continue(tmp_path, monkeypatch, capsys):
    """As `timeout` ends a run."""
    measure = benchmark._measure_problem

    def end(problem, *arguments):
        if problem.layout == "packed":
            signal.raise_signal(signal.SIGTERM)
        return measure(problem, *arguments)

    monkeypatch.setattr(benchmark, "_measure_problem", end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as stopped:
        benchmarking._bench_kernels(False, tmp_path, **SETTINGS)
    assert stopped.value.exit_code == 130
    assert "the same command continues from here" in capsys.readouterr().err
    assert "3 of 5 parts are missing" in (tmp_path / "bench.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is before
