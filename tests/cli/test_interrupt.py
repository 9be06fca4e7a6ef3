"""Test that Ctrl-C prints one line and exits with status 130 at any moment of a command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import run_in_this_process

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")

# Sends SIGINT while torch is imported, as part of a library that takes any exception for a missing
# package.
DURING_IMPORTS = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                raise ImportError("torch") from None

sys.meta_path.insert(0, Finder())
sys.argv = ["rope-patch", *sys.argv[1:]]
from rope_patch.cli import main
main()
"""


@pytest.fixture(autouse=True)
def foreground_sigint():
    """Handle SIGINT as in a shell's foreground; background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


def test_interrupt_during_imports_is_one_line():
    words = ["eval", TINY, "--method", "none", "--lengths", "128"]
    result = subprocess.run(
        [sys.executable, "-c", DURING_IMPORTS, *words], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("rope_patch.evaluation.measures.speed.bench_methods", ["bench", TINY, "--method", "none"]),
        ("rope_patch.benchmarks.kernels.benchmark.bench", ["bench"]),
        ("rope_patch.diagnosing.pipeline.diagnose_subject", ["diagnose", TINY]),
        ("rope_patch.exporting.export", ["export", TINY, "--engine", "vllm"]),
        ("rope_patch.searching.search", ["search", TINY, "--length", 512]),
        (
            "rope_patch.recommending.recommend",
            ["recommend", TINY, "--length", 512, "--minutes", 1],
        ),
        ("rope_patch.evaluation.pipeline.read_config", ["eval", TINY, "--method", "none"]),
        ("rope_patch.cli.methods.json.dumps", ["methods", "--json"]),
    ],
)
def test_interrupt_during_a_command_is_one_line(target, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, interrupt)
    status, out, err = run_in_this_process(*words)
    assert (status, out) == (130, "")
    assert err.startswith("stopped")
    assert err.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
