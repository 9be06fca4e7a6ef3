"""The three commands that measure the kernels on a GPU, each shorter than nine minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.benchmarks.kernels import estimate
from rope_patch.benchmarks.kernels.implementations import builtin_implementations
from rope_patch.benchmarks.kernels.request import (
    ALL_LENGTHS,
    BenchSettings,
    KernelBenchRequest,
    choose_settings,
)
from rope_patch.benchmarks.kernels.third_party import third_party_implementations

FOLDER = Path("eval/results/h200")
RIVALS = "rivals"
_KILL_AFTER = 5  # seconds in which a part writes its page after SIGTERM

_PREPARATION = (
    "pip install --no-build-isolation --no-deps -e .",
    f"mkdir -p wheels {RIVALS}",
    "find wheels -name '*.whl' -exec pip install --no-index --no-deps {} +",
)
_TESTS = "python -m pytest -q tests/gpu tests/benchmarks/kernels/test_kernel_benchmark_cuda.py"


@dataclass(frozen=True)
class PlannedRun:
    """A run of the bench.

    Attributes:
        folder: Where its results go, below `FOLDER`.
        timeout: Seconds after which it is ended.
        request: What it measures; the device's defaults are a GPU's.
    """

    folder: str
    timeout: int
    request: KernelBenchRequest

    def settings(self) -> BenchSettings:
        """Return what the run measures on a GPU."""
        known = [*builtin_implementations(), *third_party_implementations(None)]
        return choose_settings(self.request, "cuda", known)

    def command(self) -> str:
        """Return the command line."""
        request = self.request
        options = [f"--shapes {','.join(request.shapes)}"]
        for name, values in (
            ("batch", request.batches),
            ("lengths", request.lengths),
            ("contenders", request.contenders),
        ):
            if values is not None:
                options.append(f"--{name} {','.join(map(str, values))}")
        options += [] if request.repeats is None else [f"--repeats {request.repeats}"]
        options += [] if request.steps else ["--no-model-steps"]
        options += [f"--rivals {RIVALS}", f"--out {FOLDER / self.folder}"]
        return f"rope-patch bench {' '.join(options)}"

    def seconds(self) -> float:
        """Return the estimated seconds."""
        return estimate.total(estimate.part_seconds(self.settings()))


@dataclass(frozen=True)
class Command:
    """One of the three commands.

    Attributes:
        title: What it answers.
        runs: Its runs, one after another.
        tests_timeout: Seconds for the tests on a GPU that come first; 0 for none.
    """

    title: str
    runs: tuple[PlannedRun, ...]
    tests_timeout: int = 0

    def lines(self) -> list[str]:
        """Return its command lines."""
        tests = [(self.tests_timeout, _TESTS)] if self.tests_timeout else []
        parts = tests + [(run.timeout, run.command()) for run in self.runs]
        return [f"timeout -k {_KILL_AFTER} {seconds} {command}" for seconds, command in parts]

    def longest(self) -> int:
        """Return the seconds after which all of it has ended."""
        parts = len(self.runs) + bool(self.tests_timeout)
        return self.tests_timeout + sum(r.timeout for r in self.runs) + parts * _KILL_AFTER


COMMANDS = (
    Command(
        "Are results right; launches; memory of a training step",
        (
            PlannedRun(
                "first",
                270,
                KernelBenchRequest(
                    shapes=("qwen3-8b", "gemma-3-12b"),
                    lengths=(8192,),
                    contenders=("hf", "ours", "ours-output", "ours-frozen"),
                ),
            ),
        ),
        tests_timeout=240,
    ),
    Command(
        "Rotation alone, against all others",
        (
            PlannedRun(
                "llama-3-8b",
                290,
                KernelBenchRequest(
                    shapes=("llama-3-8b",),
                    lengths=ALL_LENGTHS,
                    contenders=("hf", "hf-compile", "ours", "liger", "flash-attn", "unsloth"),
                    repeats=20,
                    steps=False,
                ),
            ),
            PlannedRun(
                "llama-3-8b-batch-4",
                230,
                KernelBenchRequest(
                    shapes=("llama-3-8b",),
                    batches=(4,),
                    lengths=(1, 1024, 8192),
                    contenders=("hf", "ours", "liger", "fla"),
                    repeats=20,
                    steps=False,
                ),
            ),
        ),
    ),
    Command(
        "Norm and rotation, against all others",
        (
            PlannedRun(
                "qwen3-8b",
                280,
                KernelBenchRequest(
                    shapes=("qwen3-8b",),
                    lengths=ALL_LENGTHS,
                    contenders=("hf", "hf-compile", "ours", "ours-frozen", "liger", "unsloth"),
                    repeats=20,
                    steps=False,
                ),
            ),
            PlannedRun(
                "gemma-3-12b",
                240,
                KernelBenchRequest(
                    shapes=("gemma-3-12b",),
                    lengths=(1, 1024, 8192, 131072),
                    contenders=("hf", "hf-compile", "ours", "ours-frozen", "liger"),
                    repeats=20,
                    steps=False,
                ),
            ),
        ),
    ),
)


def as_script() -> str:
    """Return the commands as lines for a shell, with what they answer as comments."""
    lines = [
        "# Nothing is downloaded. wheels/ holds wheels of others (liger-kernel, fla-core), and",
        f"# {RIVALS}/ the files that `rope-patch bench --help` names; both may stay empty.",
        "# A line that was ended early continues when it runs again.",
    ]
    lines += _PREPARATION
    for number, command in enumerate(COMMANDS, start=1):
        ends = f"ends after {command.longest()} s at the latest"
        lines += ["", f"# {number}. {command.title} ({ends})", *command.lines()]
    return "\n".join(lines)
