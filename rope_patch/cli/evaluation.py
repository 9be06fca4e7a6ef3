"""Options of `eval` and `compare`, and the run that both start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.runtime import command_line, handle_interrupt, requires_extra

Samples = Annotated[
    int | None, typer.Option(help="Retrieval samples at each length of each task.", min=1)
]
Precision = Annotated[
    float | None,
    typer.Option(
        help="Take as many samples as it needs for accuracies known to plus or minus this, such as "
        "0.05, with 95% confidence."
    ),
]
MaxSamples = Annotated[int, typer.Option(help="What --precision stops at.", min=1)]
Depths = Annotated[str, typer.Option(help="Where answers stand, in percent of the text.")]
PerText = Annotated[
    int | None,
    typer.Option(
        help="Samples that share a text, asked another question or at another depth; what they "
        "share is read once, and intervals count them as the cluster that they are. One if left "
        "out (five for _mc).",
        min=1,
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text", help="A long document for perplexity: a novel's name or a file; several."
    ),
]
Documents = Annotated[
    int | None, typer.Option(help="Excerpts of the texts; one of each if left out.", min=1)
]
Haystacks = Annotated[
    list[str] | None,
    typer.Option("--haystack", help="What prompts are made of: a novel's name or a file; several."),
]
Questions = Annotated[
    Path | None,
    typer.Option(help="Questions in SQuAD's format for rp_qa_1, instead of generated ones."),
]
DeviceMap = Annotated[
    str | None, typer.Option(help="As in transformers; auto where there is a GPU.")
]
Seed = Annotated[int, typer.Option(help="Another seed makes other samples.")]
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
