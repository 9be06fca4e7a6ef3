"""The run that `eval` and `compare` start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.runtime import command_line, handle_interrupt, requires_extra

Folder = Annotated[Path, typer.Option(help="Folder for the report and everything measured.")]


def run_and_report(folder: Path, as_json: bool, engine: str | None = None, **request: Any) -> None:
    """Run an evaluation and print its report; exit with 1 if a part of it is missing."""
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.pipeline import evaluate
        from rope_patch.evaluation.report.gaps import find_gaps
        from rope_patch.evaluation.request import EvalRequest
    command = command_line()
    evaluation = EvalRequest(**request, folder=folder, command=command)
    if engine is not None:
        from rope_patch.evaluation import vllm_commands

        print("\n\n".join(vllm_commands.commands(engine, evaluation)))
        return
    with handle_interrupt():
        results = evaluate(evaluation, None if as_json else print)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"), end="")
    else:
        print(f"\n{folder / 'report.html'}")
    if find_gaps(results):  # the report and stderr name them
        raise typer.Exit(1)
