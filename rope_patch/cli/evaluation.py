"""The run that `eval` and `compare` start."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_patch.cli import options
from rope_patch.cli.runtime import (
    VERDICT,
    handle_interrupt,
    requires_extra,
    show,
    show_report,
    show_result,
)
from rope_patch.evaluation.entry_points import is_address
from rope_patch.methods import list_methods

if TYPE_CHECKING:
    from rope_patch.evaluation.request import EvalRequest

Folder = Annotated[Path, typer.Option(help="Folder for the report and everything measured.")]


def run_and_report(
    request: EvalRequest,
    as_json: bool,
    server: dict[str, Any] | None = None,
    other: str | None = None,
    plan: bool = False,
) -> None:
    """Run an evaluation and print its report; exit with 1 if a part of it is missing.

    Args:
        request: What to evaluate.
        as_json: Whether to print JSON.
        server: The fields of `ServedRequest`, where the request's model is a server's address.
        other: The address of a second server to compare it with.
        plan: Whether to print the plan of the run, and measure nothing.
    """
    needed = ("lm_eval", "datasets", "matplotlib", "scipy")
    with requires_extra("evaluation needs", "eval", *needed):
        from rope_patch.evaluation.report.conclusions import find_gaps

        if server is None:
            from rope_patch.evaluation.pipeline import evaluate as run
        else:
            from rope_patch.served import pipeline
            from rope_patch.served.request import ServedRequest

            run = partial(pipeline.run, served=ServedRequest(**server))
            if other is not None:
                run = partial(pipeline.run_two, other=other, served=ServedRequest(**server))
    if plan:
        if server is not None:
            raise ValueError("--plan times a pass of a model here, got a server: leave it out")
        from rope_patch.evaluation.pipeline import plan as make_plan

        show_result(make_plan(request), as_json)
        return
    with handle_interrupt():
        results = run(request, show=None if as_json else show)
    show_report(request.folder, as_json)
    if find_gaps(results):  # the report and stderr name them
        raise typer.Exit(VERDICT)


def server_fields(model: str, server: options.ServerOptions) -> dict[str, Any] | None:
    """Return the fields of `ServedRequest` if a model is a server's address, else None.

    Raises:
        ValueError: An address without --tokenizer, or options of servers without an address.
    """
    given = server.arguments()
    if not is_address(model):
        if given:
            name = next(iter(given)).replace("_", "-")
            raise ValueError(
                f"--{name} goes with a server's address, such as http://localhost:8000, got "
                f"{model!r}: leave it out, or give the address"
            )
        return None
    if "tokenizer" not in given:
        raise ValueError(
            f"{model} is a server: expected --tokenizer MODEL, whose tokenizer makes the prompts; "
            "give the folder or the name of the model that it serves"
        )
    return given


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
