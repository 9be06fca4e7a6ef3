"""Test the kernel benchmark's files, command and model steps, on small runs."""

import json
import sys
from html.parser import HTMLParser

import pytest
import torch
from helpers.tiny_models import make_model
from typer.testing import CliRunner

import rope_patch
from rope_patch.benchmarks import (
    Implementation,
    KernelBenchRequest,
    auto_implementation,
    builtin_implementations,
    third_party_implementations,
)
from rope_patch.benchmarks.kernels import benchmark, model_steps, report
from rope_patch.benchmarks.kernels.benchmark import read_results
from rope_patch.cli import app
from rope_patch.cli import bench as benchmarking
from rope_patch.patching.kernels import attention_forward

pytestmark = pytest.mark.usefixtures("without_interpreter")
TINY = ("--shapes", "qwen3-8b", "--lengths", "1,8", "--repeats", "2")
NAMES = ("--contenders", "hf,ours,flash-attn")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=True)


class Tables(HTMLParser):
    """Parser of the cells of a page's tables, by caption."""

    def __init__(self, page):
        super().__init__()
        self.found, self.caption, self.inside = {}, "", ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside = tag
        if tag == "tr" and self.caption:
            self.found[self.caption].append([])

    def handle_data(self, data):
        if self.inside == "caption":
            self.caption, self.inside = data, ""
            self.found[data] = []
        elif self.inside in ("td", "th", "small", "span") and self.caption and data.strip():
            self.found[self.caption][-1].append(data.strip())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    result = bench(*TINY, *NAMES, "--no-model-steps", "--out", str(folder))
    assert result.exit_code == 0, result.exception
    return result, folder


def test_run_writes_all_files(run):
    _, folder = run
    files = {path.name for path in folder.iterdir()}
    assert files == {"bench.html", "bench.json", "bench.md", "bench.png"}
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_all_files_show_the_same_numbers(run):
    result, folder = run
    results = json.loads((folder / "bench.json").read_text())
    page = (folder / "bench.html").read_text()
    case = next(c for c in results["cases"] if c["length"] == 8 and c["layout"] == "views")
    row = next(row for row in case["rows"] if row["contender"] == "hf")
    table = Tables(page).found["Forward, by tokens"]
    assert table[2][:2] == ["copy", "100%"]
    assert table[3][0] == "HF eager"
    percent = table[3][1]
    rounding = 0.05 if "." in percent else 0.5
    measured = row["times"]["forward"]["percent"]
    assert float(percent.rstrip("%")) == pytest.approx(measured, abs=1.01 * rounding)
    markdown = (folder / "bench.md").read_text()
    assert f"| HF eager | {percent}" in markdown
    assert "Forward, by tokens" in result.stdout
    assert str(folder / "bench.html") in result.stdout
    for form in (page, markdown, result.stdout):
        assert "flash-attention" in form
        assert "Triton needs a GPU" in form


def test_page_is_self_contained(run):
    page = (run[1] / "bench.html").read_text()
    assert "<svg" in page
    assert "prefers-color-scheme: dark" in page
    for word in ("http://", "https://", "<script", "<link", "src="):
        assert word not in page


def test_every_contender_has_a_line_in_the_picture(run, tmp_path):
    results = read_results(run[1])
    contenders = [*builtin_implementations(), *third_party_implementations(None)]
    results["titles"] |= {c.name: c.title for c in contenders}
    for case in results["cases"]:
        row = next(row for row in case["rows"] if row["contender"] == "hf")
        copies = [row for row in case["rows"] if row["contender"].startswith("copy")]
        case["rows"] = [*copies, *(row | {"contender": c.name} for c in contenders)]
    report.write_all(results, tmp_path)
    page = (tmp_path / "bench.html").read_text()
    assert all(f"> {c.title}</text>" in page or f"<!--  {c.title} -->" in page for c in contenders)


def test_sizes_in_l2_and_times_with_launches_are_marked(run, tmp_path):
    """As on a GPU, where the cache's size is known."""
    results = read_results(run[1])
    case = next(c for c in results["cases"] if c["length"] == 8)
    row = next(row for row in case["rows"] if row["contender"] == "hf")
    size = case["working_set"]
    for l2_bytes, head, waits in ((size, "8, in L2", False), (size - 1, "8", True)):
        row["times"]["forward"]["with_launches"] = waits
        report.write_all(results | {"l2_bytes": l2_bytes}, tmp_path)
        page = (tmp_path / "bench.html").read_text()
        table = Tables(page).found["Forward, by tokens"]
        assert table[1][-1] == head
        assert table[3][-1].endswith(", with launches") == waits
        assert f"L2 cache of {l2_bytes / 1e6:.1f} MB" in page
        assert ("in L2</text>" in page or "<!-- in L2 -->" in page) == (head != "8")
    assert "in L2" not in (run[1] / "bench.html").read_text()  # the CPU's is not known


def test_launches_are_shown():
    row = {"model": "qwen3-8b", "layers": 36, "hf": 945, "ours": 36, "profiler": False}
    row["whole"] = {"hf": 2037, "ours": 1128}
    table = report.launch_table({"launches": [row, {"model": "x", "not_measured": "y"}]})
    assert [(r.name, [cell.text for cell in r.cells]) for r in table.rows] == [
        ("qwen3-8b, 36 layers", ["945", "36", "2,037", "1,128"])
    ]


def test_json_output(tmp_path):
    options = ("--contenders", "hf", "--no-model-steps", "--rivals", str(tmp_path))
    result = bench(*TINY, *options, "--json", "--out", str(tmp_path))
    results = json.loads(result.stdout)
    assert results["shapes"] == ["qwen3-8b"]
    assert results["rivals"] == str(tmp_path)


def test_wrong_implementation_is_shown_as_wrong(monkeypatch, tmp_path):
    right = builtin_implementations()[0]

    def build(problem):
        call = right.build(problem)
        return lambda q, k: tuple(torch.where(x > 3, torch.nan, x) for x in call(q, k))

    bad = Implementation(name="hf-compile", title="The bad one", build=build)
    monkeypatch.setattr(benchmark, "builtin_implementations", lambda: [right, bad])
    request = KernelBenchRequest(shapes=("llama-3-8b",), lengths=(8,), repeats=1, steps=False)
    results = benchmark.bench(request)
    report.write_all(results, tmp_path)
    text = report.as_text(results)
    line = next(line for line in text.splitlines() if line.strip().startswith("The bad one"))
    assert "wrong (error nan)" in line
    assert "The bad one" not in text.splitlines()[1]  # the verdict
    assert '<td class="number wrong"' in (tmp_path / "bench.html").read_text()
    assert json.loads((tmp_path / "bench.json").read_text())  # valid in spite of NaN


def test_report_without_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "_available_memory", lambda device: 0)
    request = KernelBenchRequest(shapes=("llama-3-8b",), lengths=(8,), contenders=("hf",))
    monkeypatch.setattr(
        model_steps, "measure_steps", lambda *_: [{"model": "x", "not_measured": "y"}]
    )
    results = benchmark.bench(request)
    report.write_all(results, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"bench.html", "bench.json", "bench.md"}
    text = report.as_text(results)
    assert "Nothing was measured" in text
    assert "whole model x: y" in text


def test_model_steps_are_measured():
    rows = model_steps.measure_steps("gemma-3-12b", torch.device("cpu"), torch.float32, repeats=1)
    assert [row["kernels"] for row in rows] == ["hf", "auto"]
    for row in rows:
        assert row["peak"] > 0
        for phase in ("token", "train"):
            assert row[phase]["min"] <= row[phase]["ratio"] <= row[phase]["max"]
    assert rows[0]["token"]["ratio"] == rows[0]["train"]["ratio"] == 1
    table = report.step_table({"steps": rows})
    assert [row.name for row in table.rows] == [
        "gemma-3-12b, transformers",
        "gemma-3-12b, rope_patch",
    ]


def test_row_of_auto_is_marked_and_single_tokens_have_a_verdict(tmp_path):
    request = KernelBenchRequest(
        shapes=("qwen3-8b", "llama-3-8b"),
        lengths=(1,),
        batches=(1,),
        repeats=1,
        contenders=("hf", "ours", "ours-tables"),
        steps=False,
    )
    text = report.as_text(benchmark.bench(request))
    _, normed, plain, *lines = text.splitlines()
    assert normed.startswith("qwen3-8b, 1 token × 1, of a copy's bandwidth: rope_patch, ")
    assert plain.startswith("llama-3-8b, 1 token × 1, of a copy's bandwidth: rope_patch, ")
    rows = [line.strip() for line in lines if line.startswith("  rope_patch")]
    assert any(row.startswith("rope_patch, cos and sin given (auto)  ") for row in rows)
    assert any(row.startswith("rope_patch, exact angles  ") for row in rows)


def test_auto_is_the_implementation_of_a_patched_model(monkeypatch):
    """On a CPU, it rotates by transformers' tables, with and without norms."""
    calls = []
    by_tables = attention_forward.rope_from_cos_sin
    monkeypatch.setattr(
        attention_forward,
        "rope_from_cos_sin",
        lambda *a, **k: calls.append(1) or by_tables(*a, **k),
    )
    for family in ("llama", "qwen3"):
        model = make_model(family)
        with rope_patch.patch(model, "yarn", factor=4, kernels="auto"):
            model(torch.tensor([[1, 2, 3]]))
        assert calls
        calls.clear()
    assert auto_implementation(torch.device("cpu"), torch.float32) == "ours-tables"


def test_failing_model_reports_a_reason(monkeypatch):
    monkeypatch.setattr(model_steps, "KERNELS", ("hf", "none such"))
    rows = model_steps.measure_steps("llama-3-8b", torch.device("cpu"), torch.float32, repeats=1)
    assert rows[0]["model"] == "llama-3-8b"
    assert "none such" in rows[0]["not_measured"]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("--method", "yarn"), "--method"),
        (("--compile",), "--compile"),
        (("demo", "--method", "yarn", "--shapes", "qwen3-8b"), "--shapes"),
        (("demo", "--method", "yarn", "--no-model-steps"), "--model-steps"),
        (("demo",), "at least one method"),
        (("--lengths", "x"), "--lengths"),
        (("--contenders", "me"), "contenders"),
    ],
)
def test_options_of_the_other_benchmark_are_refused(arguments, fact):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert fact in result.output


def test_results_are_written_without_the_plot_packages(tmp_path, monkeypatch, capsys):
    results = {"cases": [1]}
    monkeypatch.setattr(
        "rope_patch.benchmarks.kernels.benchmark.bench",
        lambda request, folder, measured: measured.update(results),
    )
    monkeypatch.delattr("rope_patch.benchmarks.kernels.report")
    monkeypatch.setitem(sys.modules, "rope_patch.benchmarks.kernels.report", None)
    benchmarking._bench_kernels(True, tmp_path, lengths=(2,))
    output = capsys.readouterr()
    assert json.loads(output.out)["cases"] == [1]
    assert "'.[eval]'" in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
