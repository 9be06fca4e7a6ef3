"""The command `compare`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_patch.cli import options
from rope_patch.cli.evaluation import Folder, parse_methods, run_and_report, server_fields
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import command_line, requires_extra


@dataclass(frozen=True)
class _SampleOptions(options.SampleOptions):
    """How many retrieval samples are taken, and where their answers stand."""

    depths: options.Depths = "10,30,50,70,90"


def compare(
    *,
    model: str = argument(..., f"{options.MODEL} Or the address of a running server."),
    other: str | None = argument(None, "The address of a second server to compare it with."),
    method: list[str] | None = option(
        None,
        "A method, or the folder of a search's result; several, or by commas: "
        "linear,ntk,yarn,dynamic-yarn if left out. The model as it is, `none`, is always with "
        "them.",
    ),
    factor: options.Factor = None,
    length: options.Length = None,
    lengths: str | None = option(
        None,
        "Lengths in tokens, by commas; if left out, half the trained length, the trained length, "
        "and its doubles up to the target.",
    ),
    profile: str | None = option(
        None,
        "quick: one retrieval task, for CPUs. standard: RULER's 13 tasks and four harder ones, 50 "
        "samples each. paper: 500. Left out: standard where there is a GPU, else quick.",
    ),
    tasks: str | None = option(None, "Other tasks than the profile's, as for `eval`."),
    sample_options: _SampleOptions,
    text_options: options.TextOptions,
    method_options: options.MethodOptions,
    loading: options.MeasuredLoadingOptions,
    server_options: options.ServerOptions,
    seed: options.Seed = 42,
    out: Folder = Path("out"),
    plan: options.Plan = False,
    as_json: options.Json = False,
) -> None:
    """Compare what methods gain at length and cost at short.

    Retrieval, perplexity, ordinary short tasks, speed and memory, for every method on the same
    samples, with intervals and paired tests, and with the controls that show what the numbers are
    worth. Needs --factor or --length unless all methods follow the length.

    Two addresses are compared as they are served, question by question: the same model with two
    rotations, on two engines, or quantised in two ways.

    \b
    Examples:
      rope-patch compare demo --method none,linear,yarn --factor 2 --lengths 4096,8192,12288
      rope-patch compare ./my-model --factor 4 --precision 0.05 --out comparison
      rope-patch compare http://localhost:8000 http://localhost:8001 --tokenizer ./my-model
    """
    server = server_fields(model, server_options)
    if (server is None) != (other is None):
        raise ValueError(
            "two servers are compared with one another, or methods on a model: expected two "
            f"addresses or one model, got {model} and {other or 'no second address'}; "
            "`rope-patch eval URL` measures one server"
        )
    if server is not None and method is not None:
        raise ValueError("--method goes with a model, got servers, which rotate as they started")
    chosen = parse_methods(
        ["none", *(method or [])], method_options.trained_length, method_options.start
    )
    parsed: dict[str, Any] = {
        "lengths": options.parse_lengths("lengths", lengths) if lengths else (),
        **method_options.arguments(),
        **sample_options.arguments(),
        **text_options.arguments(),
        **loading.arguments(),
    }
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.profiles import DEFAULT_METHODS, comparison_request
    if server is not None:
        chosen["methods"] = ("none",)
    elif method is None:
        chosen["methods"] = DEFAULT_METHODS
    request = comparison_request(
        model if server is None else server["tokenizer"],
        factor=factor,
        length=length,
        tasks=tuple(options.split_commas(tasks)) if tasks else (),
        profile=profile,
        seed=seed,
        folder=out,
        command=command_line(),
        **chosen,
        **parsed,
    )
    if server is not None:
        request = replace(request, model=model)
    run_and_report(request, as_json, server, other, plan)
