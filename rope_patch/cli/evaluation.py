"""The run that `eval` and `compare` start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_patch.cli import options
from rope_patch.cli.runtime import VERDICT, handle_interrupt, requires_extra, show, show_report
from rope_patch.methods import list_methods

if TYPE_CHECKING:
    from rope_patch.evaluation.request import EvalRequest

Folder = Annotated[Path, typer.Option(help="Folder for the report and everything measured.")]


def run_and_report(request: EvalRequest, as_json: bool) -> None:
    """Run an evaluation and print its report; exit with 1 if a part of it is missing."""
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.pipeline import evaluate
        from rope_patch.evaluation.report.conclusions import find_gaps

    with handle_interrupt():
        results = evaluate(request, None if as_json else show)
    show_report(request.folder, as_json)
    if find_gaps(results):  # the report and stderr name them
        raise typer.Exit(VERDICT)


def parse_methods(words: list[str], trained_length: int | None, start: str) -> dict[str, Any]:
    """Return the fields `methods` and `arguments` of a request from names and folders of searches.

    Args:
        words: What `--method` was given: names, `none` and folders, also by commas.
        trained_length: The request's.
        start: The request's.

    Raises:
        ValueError: A folder has no result of a search; or one that was made with another trained
            length or start, or beside which there is another `longrope`.
    """
    names: list[str] = []
    arguments: dict[str, dict[str, Any]] = {}
    for word in options.split_commas(",".join(words)):
        if word in list_methods() or not (Path(word).exists() or "/" in word):
            names.append(word)
            continue
        from rope_patch.searching import SearchResult

        found = SearchResult.load(word)
        for option, value in (("trained_length", trained_length), ("start", start)):
            if found.asked.get(option, value) != value:
                raise ValueError(
                    f"{word} was searched with {option} {found.asked[option]}: give "
                    f"--{option.replace('_', '-')} {found.asked[option]}, too"
                )
        names.append("longrope")
        arguments["longrope"] = dict(found)
    if arguments and names.count("longrope") > 1:
        raise ValueError("--method: a search's result is a `longrope`, evaluate one at a time")
    return {"methods": tuple(dict.fromkeys(names)), "arguments": arguments}
