"""The command `bench`: methods on a model, or the kernels."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import (
    VERDICT,
    command_line,
    handle_interrupt,
    requires_extra,
    terminable,
)
from rope_patch.utils.installation import install_hint


@dataclass(frozen=True)
class _ModelOptions(options.OptionGroup):
    """What a MODEL is measured with."""

    method: list[str] | None = option(
        None,
        "With a MODEL: a method, or `none` for the model as it is; compared with the one named "
        "first.",
    )
    factor: float = option(
        4,
        "Target length / trained length; dynamic methods follow up to there.",
        metavar=options.FACTOR,
        written=True,
    )
    prompt: int | None = option(
        None, "Tokens of the prompt; factor times the trained length if left out.", written=True
    )
    decode: int = option(32, "Tokens decoded in each repeat.")
    trained_length: options.TrainedLength = None
    anyway: options.Anyway = False
    compiled: bool = option(
        False, "Count torch.compile's graph breaks and recompilations.", "--compile"
    )
    random_weights: bool = option(
        False, "Read the config alone; times stay the same.", "--random-weights"
    )


@dataclass(frozen=True)
class _KernelOptions(options.OptionGroup):
    """What is measured without a MODEL, and whether."""

    shapes: str | None = option(
        None,
        "Without a MODEL: whose heads, by commas; llama-3-8b (rotation alone), qwen3-8b and "
        "gemma-3-12b (norm and rotation) if left out.",
    )
    lengths: str | None = option(None, "Tokens, by commas; 1 is a decoding step.")
    batch: str | None = option(None, "Rows, by commas.")
    contenders: str | None = option(
        None,
        "Which, by commas, of hf, hf-compile, ours, ours-output, ours-frozen, ours-tables, "
        "ours-inplace, ours-reference, liger, flash-attn, unsloth, fla; all if left out, but on a "
        "GPU without ours-tables, ours-reference and fla.",
    )
    rivals: Path | None = option(
        None,
        "A folder with files of others that are no wheels, any of: rotary.py "
        "(flash_attn/ops/triton/ in the sdist of flash-attn 2.8), rope_embedding.py and "
        "qk_norm_rope.py (unsloth/kernels/ in the wheel of unsloth). Liger (liger-kernel) and FLA "
        "(fla-core) are imported if installed.",
    )
    model_steps: bool = option(True, "Measure steps of small random models, too.")
    page: bool = option(
        False,
        "Make the page of the results in --out, which another machine may have measured; measure "
        "nothing.",
        "--page",
    )
    self_test: bool = option(
        False,
        "Compare all kernels with float64 at the sizes of real models, or of --shapes, and print a "
        "table for a bug report; the exit code is 1 if one is wrong.",
        "--self-test",
    )


def bench(
    context: typer.Context,
    *,
    model: str | None = argument(None, f"{options.MODEL} Without one, kernels are measured."),
    on_model: _ModelOptions,
    on_kernels: _KernelOptions,
    dtype: options.Dtype = "auto",
    repeats: int | None = option(
        None, "How often everything timed is done; 5, or 10 for kernels on a GPU."
    ),
    out: Path | None = option(
        None,
        "With a MODEL, a file for the results as JSON, too; without, the folder of the report, "
        "out/bench if left out.",
    ),
    as_json: options.Json = False,
) -> None:
    """Time methods on a model; without a model, the kernels.

    Of a model: prompts, decoding, growth, memory, as ratios to the method named first, of times
    taken in turns in this one run, because times of different runs do not compare. Growth is what
    dynamic methods pay when the sequence outgrows their frequencies and all cached keys turn.

    Without a model: the rotation of queries and keys by transformers, torch.compile, the kernels
    of others and ours, forward and backward, beside a copy of as many bytes, each checked against
    float64; and whole steps of small models. Writes bench.html, bench.md, bench.json, bench.png.
    bench.json is written after each part: a run that was ended keeps what it measured.

    \b
    Examples:
      rope-patch bench demo --trained-length 1024 --method yarn,dynamic-yarn
      rope-patch bench ./my-model --method none,yarn,dynamic-yarn --compile --out speed.json
      rope-patch bench --shapes qwen3-8b --lengths 1,8192 --rivals ./rivals
    """
    for name in vars(on_model if model is None else on_kernels):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            word = "compile" if name == "compiled" else name.replace("_", "-")
            form = "needs a MODEL" if model is None else "is for kernels, without a MODEL"
            raise ValueError(f"--{word} {form}: `rope-patch bench --help` shows both forms")
    if on_kernels.page:
        _make_page(out or Path("out/bench"))
        return
    if on_kernels.self_test:
        _run_self_test(as_json, tuple(options.parse_names(on_kernels.shapes) or ()))
        return
    if model is None:
        _bench_kernels(
            as_json,
            out or Path("out/bench"),
            shapes=options.parse_names(on_kernels.shapes),
            lengths=None
            if on_kernels.lengths is None
            else tuple(options.parse_lengths("lengths", on_kernels.lengths)),
            batches=None
            if on_kernels.batch is None
            else tuple(options.parse_ints("batch", on_kernels.batch, minimum=1)),
            contenders=options.parse_names(on_kernels.contenders),
            rivals=on_kernels.rivals,
            steps=on_kernels.model_steps,
            dtype=dtype,
            repeats=repeats,
        )
        return
    from rope_patch.evaluation.measures import speed
    from rope_patch.utils import atomic_files

    if out is not None:
        atomic_files.require_writable_file(out, "the results", folder_exists=False)
    results = speed.bench_methods(
        speed.SpeedRequest(
            model=model,
            methods=tuple(options.split_commas(",".join(on_model.method or []))),
            factor=on_model.factor,
            prompt=on_model.prompt,
            decode=on_model.decode,
            repeats=5 if repeats is None else repeats,
            trained_length=on_model.trained_length,
            anyway=on_model.anyway,
            dtype=dtype,
            compiled=on_model.compiled,
            random_weights=on_model.random_weights,
        )
    )
    # Print first, so that a full disk loses no measurement.
    print(json.dumps(results, indent=1) if as_json else speed.format_table(results))
    if out is not None:
        with atomic_files.add_write_advice("The results are printed above"):
            atomic_files.write_json(out, results)


def _make_page(folder: Path) -> None:
    """Make the page of the results in a folder."""
    from rope_patch.benchmarks.kernels.benchmark import read_results

    results = read_results(folder)
    with requires_extra("the page needs", "eval"):
        from rope_patch.benchmarks.kernels import report
    report.write_all(results, folder)
    print(folder / "bench.html")


def _run_self_test(as_json: bool, shapes: tuple[str, ...]) -> None:
    """Print the self-test; exit with 1 if a kernel is wrong."""
    from rope_patch.benchmarks.kernels.self_test import run_self_test

    result = run_self_test(shapes)
    print(json.dumps(result.as_dict(), indent=1) if as_json else result.as_text())
    if not result.is_ok:
        raise typer.Exit(VERDICT)


def _bench_kernels(as_json: bool, folder: Path, **request: Any) -> None:
    from rope_patch.benchmarks.kernels import benchmark
    from rope_patch.benchmarks.kernels.implementations import user_inductor_cache
    from rope_patch.utils import atomic_files

    atomic_files.require_writable_folder(folder, "the report")
    settings = {name: value for name, value in request.items() if value is not None}
    results: dict[str, Any] = {}
    with handle_interrupt("nothing was measured yet"), user_inductor_cache(), terminable():
        try:
            benchmark.bench(benchmark.KernelBenchRequest(**settings), folder, results)
        except KeyboardInterrupt:
            if not results.get("seconds"):
                raise
            _write_report(results, folder)
            with handle_interrupt(f"{folder} has what was measured"):
                raise
    # Print first, so that a full disk loses no measurement.
    if as_json:
        print(benchmark.as_json(results), end="")
    page = f"rope-patch bench --page --out {shlex.quote(str(folder))}"
    with atomic_files.add_write_advice(f"REMEDY, and `{page}` makes the page"):
        report = _write_report(results, folder)
    if report is not None and not as_json:
        print(f"{report}\n\n{folder / 'bench.html'}")


def _write_report(results: dict[str, Any], folder: Path) -> str | None:
    """Write all files; return the report as text, None where packages of the page are missing."""
    from rope_patch.benchmarks.kernels import benchmark
    from rope_patch.utils import atomic_files

    results["command"] = command_line()
    try:
        from rope_patch.benchmarks.kernels import report
    except ImportError as error:  # keep the numbers even if no page can be made
        atomic_files.atomic_write(folder / benchmark.FILE, benchmark.as_json(results))
        print(
            f"{folder / benchmark.FILE}: no page, because {error.name} is not installed: "
            f"{install_hint('eval')}",
            file=sys.stderr,
        )
        return None
    report.write_all(results, folder)
    return report.as_text(results)
