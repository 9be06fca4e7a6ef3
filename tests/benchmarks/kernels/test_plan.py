"""Test the estimate, the defaults on a GPU, and the three commands that a GPU's page names."""

import logging
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rope_patch.benchmarks import (
    KernelBenchRequest,
    builtin_implementations,
    third_party_implementations,
)
from rope_patch.benchmarks.kernels import benchmark, estimate, plan
from rope_patch.benchmarks.kernels.request import choose_settings, left_out
from rope_patch.cli import app
from rope_patch.cli import bench as benchmarking

README = Path(__file__).parents[3] / "eval" / "results" / "h200" / "README.md"


def on_gpu(**changes):
    known = [*builtin_implementations(), *third_party_implementations(None)]
    return choose_settings(KernelBenchRequest(**changes), "cuda", known)


def minutes(**changes):
    return estimate.total(estimate.part_seconds(on_gpu(**changes))) / 60


def test_default_run_on_a_gpu_is_shorter_than_nine_minutes():
    assert 3 < minutes() < 8.5  # with some room


def test_options_left_out_would_make_the_default_run_longer():
    options = left_out(KernelBenchRequest())
    assert [option.split()[0] for option in options] == ["--lengths", "--batch", "--contenders"]
    lengths, batches, contenders = (option.split()[1].split(",") for option in options)
    added = (
        {"lengths": tuple(map(int, lengths))},
        {"batches": tuple(map(int, batches))},
        {"contenders": (*on_gpu().contenders, *contenders)},
    )
    assert all(minutes(**change) > minutes() for change in added)
    assert minutes(**added[0] | added[1] | added[2]) > 9
    assert left_out(KernelBenchRequest(lengths=(1,), batches=(1,), contenders=("hf",))) == []


def test_estimate_has_the_parts_of_the_run():
    settings = on_gpu()
    contenders = [c for c in builtin_implementations() if c.name in settings.contenders]
    parts = benchmark._parts(settings, contenders, torch.device("cpu"))
    assert list(estimate.part_seconds(settings)) == [part.key for part in parts]


def test_graphs_of_torch_compile_are_counted_once():
    one = {"shapes": ("llama-3-8b",), "repeats": 1, "steps": False}
    base = minutes(**one, lengths=(1024,), contenders=("hf-compile",))
    more = minutes(**one, lengths=(1024, 2048, 4096), contenders=("hf-compile",))
    assert 0 < more - base < 10 / 60  # seconds: no graphs beside the first length's


def test_estimate_is_printed_before_anything_is_measured(monkeypatch, caplog, tmp_path):
    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(benchmark, "current_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(benchmark, "_header", lambda *_: {"identity": {}, "date": ""})
    monkeypatch.setattr(benchmark, "_measure_problem", stop)
    with caplog.at_level(logging.INFO, logger="rope_patch"), pytest.raises(Stopped):
        benchmark.bench(KernelBenchRequest(lengths=(1,)), tmp_path)
    text = caplog.messages[0]
    assert re.match(r"12 parts, about [\d.]+ minutes on a GPU such as an H200\. Assumed, not", text)
    assert "20 s for each graph of torch.compile" in text
    assert "--batch 1,4" in text


def test_each_command_and_its_parts_fit_their_times():
    assert len(plan.COMMANDS) == 3
    for command in plan.COMMANDS:
        assert command.longest() < estimate.LIMIT == 9 * 60
        for run in command.runs:
            assert run.seconds() < run.timeout
        assert all(line.startswith("timeout -k 5 ") for line in command.lines())


def test_command_lines_ask_for_the_planned_runs(monkeypatch, tmp_path):
    """Parsed by the command itself, they give the same requests."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / plan.RIVALS).mkdir()
    asked = []
    monkeypatch.setattr(benchmarking, "_bench_kernels", lambda *a, **request: asked.append(request))
    for run in (run for command in plan.COMMANDS for run in command.runs):
        words = shlex.split(run.command())
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0
        given = {name: value for name, value in asked.pop().items() if value is not None}
        assert on_gpu(**given | {"rivals": None}) == run.settings()


def test_page_of_the_gpu_shows_what_the_command_prints():
    printed = CliRunner().invoke(app, ["bench", "--plan"], catch_exceptions=False).stdout
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks[0] == printed
    assert printed.count("timeout ") == 6
    assert "--no-build-isolation --no-deps" in printed
    assert "--no-index" in printed


def test_files_of_the_plan_exist():
    root = README.parents[3]
    paths = [word for word in plan._TESTS.split() if word.startswith("tests/")]
    assert paths
    assert all((root / path).exists() for path in paths)
