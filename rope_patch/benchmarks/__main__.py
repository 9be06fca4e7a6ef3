"""Run a day on a GPU, or one of its measurements: `python -m rope_patch.benchmarks gpu`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from rope_patch.benchmarks import gpu_steps
from rope_patch.benchmarks.gpu_day import Day
from rope_patch.utils import atomic_files, provenance
from rope_patch.utils.installation import own_version, version

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option(help="A file for the results as JSON.")]
Shape = Annotated[str, typer.Argument(help="A folder with a config.")]
Repeats = Annotated[int, typer.Option(min=1)]


@app.command()
def gpu(
    minutes: Annotated[float, typer.Option(help="Nothing runs on after them.", min=0.1)] = 12,
    out: Annotated[Path | None, typer.Option(help="Folder; out/gpu if left out.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="SmolLM2's weights: a folder, a GGUF file, or `demo`, if installed."),
    ] = None,
    rivals: Annotated[
        Path | None, typer.Option(help="Others' kernels; see `rope-patch bench --help`.")
    ] = None,
    only: Annotated[str, typer.Option(help="Names of steps, by commas; all if empty.")] = "",
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what is left, with commands; run nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Each step in little, on the CPU, in a clone.")
    ] = False,
) -> None:
    """Run the steps that are left and fit, in order of worth. The same command goes on.

    A folder's results are committed as they are: `git add -- OUT`.
    """
    if dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for all commands, too
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or dry_run or plan):
        raise ValueError(
            "a day on a GPU needs one, and torch finds none here: run this on a machine with a "
            "GPU, or give --dry-run, which runs each step in little on the CPU"
        )
    folder = Path("out", "gpu-dry" if dry_run else "gpu") if out is None else out
    sizes = gpu_steps.SMALL if dry_run else gpu_steps.REAL
    steps = gpu_steps.day_steps(folder, sizes, model=model, rivals=rivals)
    device = torch.cuda.get_device_name() if has_gpu and not dry_run else "CPU"
    day = Day(folder, steps, {"device": device, "dry_run": dry_run})
    names = [name for name in only.split(",") if name]
    if not plan:
        signal.signal(signal.SIGTERM, _interrupt)  # as `timeout` ends it: no step outlives it
        day.run(60 * minutes, names)
    print(day.plan(names))


@app.command()
def tiles(
    out: Out,
    shapes: Annotated[str, typer.Option()] = "llama-3-8b,qwen3-8b,gemma-3-12b",
    lengths: Annotated[str, typer.Option(help="Tokens, by commas.")] = "1,16,128,512,1024,2048",
    repeats: Repeats = 20,
    candidates: Annotated[int | None, typer.Option(help="Try only so many.", min=1)] = None,
) -> None:
    """Search for faster launches of the kernels."""
    from rope_patch.benchmarks.kernels.tile_search import search_tiles

    numbers = tuple(map(int, lengths.split(",")))
    results = search_tiles(tuple(shapes.split(",")), numbers, repeats, out, candidates)
    for row in results["measured"]:
        winner = row["winner"]
        shown = f"×{winner['ratio']:.3f} by {winner['choice']}" if winner else "as it is"
        print(f"{row['shape']}, {row['tokens']:,} tokens: {row['default_ms']:.4f} ms, {shown}")


@app.command()
def compiled(
    shape: Shape,
    out: Out,
    prompt: Annotated[int, typer.Option(min=1)] = 32768,
    decode: Annotated[int, typer.Option(min=2)] = 32,
    repeats: Repeats = 3,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    backend: str = "inductor",
) -> None:
    """Time eager and compiled decode steps of a random model."""
    from rope_patch.benchmarks.model_shapes import measure_compiled

    results = measure_compiled(
        shape, prompt=prompt, decode=decode, repeats=repeats, layers=layers, backend=backend
    )
    _write(out, results)


@app.command()
def training_step(
    shape: Shape,
    out: Out,
    length: Annotated[int, typer.Option(min=2)] = 32768,
    repeats: Repeats = 3,
) -> None:
    """Time and weigh a training step of a random model."""
    from rope_patch.benchmarks.model_shapes import measure_training_step

    _write(out, measure_training_step(shape, length=length, repeats=repeats))


def _write(out: Path, results: dict[str, Any]) -> None:
    """Print the results' rows, and write them with the machine, the versions and the date."""
    for row in results["rows"]:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    about = {
        "hardware": provenance.hardware(),
        "versions": provenance.versions() | {"triton": version("triton")},
        "date": provenance.now(),
        "rope_patch": own_version(),
    }
    atomic_files.write_json(out, results | about)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; an error is one line."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
