"""Test what is left of a kernel benchmark that was ended: its numbers, and a page of them."""

import json
import signal

import pytest
import typer
from typer.testing import CliRunner

from rope_patch.benchmarks import KernelBenchRequest
from rope_patch.benchmarks.kernels import benchmark, report
from rope_patch.benchmarks.kernels.benchmark import as_json, bench, read_results
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


def end_by(end, layout, monkeypatch):
    """Call `end` when a layout is to be measured."""
    measure = benchmark._measure_problem

    def measure_or_end(problem, *arguments):
        if problem.layout == layout:
            end()
        return measure(problem, *arguments)

    monkeypatch.setattr(benchmark, "_measure_problem", measure_or_end)


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """Return the folder of a run that was killed in its third case."""

    def kill():
        raise Killed

    with monkeypatch.context() as patched:
        end_by(kill, "packed", patched)
        with pytest.raises(Killed):
            bench(KernelBenchRequest(**SETTINGS), tmp_path)
    return tmp_path


def test_killed_run_has_written_what_it_measured(killed):
    stored = json.loads((killed / "bench.json").read_text())
    assert [case["layout"] for case in stored["cases"]] == ["views", "views"]
    assert list(stored["seconds"]) == PARTS[:2]
    assert stored["missing"] == PARTS[2:]
    assert list(killed.iterdir()) == [killed / "bench.json"]


def test_unfinished_results_have_a_page_that_says_so(killed):
    report.write_all(read_results(killed), killed)
    page = (killed / "bench.html").read_text()
    assert f"3 of 5 parts are missing, the next is {PARTS[2]}" in page


def test_the_next_run_measures_everything(killed):
    results = bench(KernelBenchRequest(**SETTINGS), killed)
    assert list(results["seconds"]) == PARTS
    assert results["missing"] == []
    assert read_results(killed) == json.loads(as_json(results))


@pytest.mark.parametrize(
    ("content", "fact"),
    [('{"cases": []}', "another version"), ('{"cases": [', "damaged"), ("[]", "a list")],
)
def test_other_files_have_no_page(tmp_path, content, fact):
    (tmp_path / "bench.json").write_text(content)
    result = CliRunner().invoke(app, ["bench", "--page", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert fact in " ".join(result.output.split())


def test_results_with_nan_are_read(tmp_path):
    """JSON has no NaN, which wrong results can have as their error."""
    results = {"errors": [float("nan"), float("inf")], "x": 1, "missing": []}
    (tmp_path / "bench.json").write_text(as_json(results))
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


def test_sigterm_writes_the_page(tmp_path, monkeypatch, capsys):
    """As `timeout` ends a run."""
    end_by(lambda: signal.raise_signal(signal.SIGTERM), "packed", monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as stopped:
        benchmarking._bench_kernels(False, tmp_path, **SETTINGS)
    assert stopped.value.exit_code == 130
    assert f"stopped; {tmp_path} has what was measured" in capsys.readouterr().err
    assert "3 of 5 parts are missing" in (tmp_path / "bench.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_early_end_leaves_the_page_of_the_run_before(killed, monkeypatch):
    report.write_all(read_results(killed), killed)
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    end_by(lambda: signal.raise_signal(signal.SIGTERM), "views", monkeypatch)
    with pytest.raises(typer.Exit):
        benchmarking._bench_kernels(False, killed, **SETTINGS)
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before
