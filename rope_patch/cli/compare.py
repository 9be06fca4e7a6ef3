"""The command `compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli import options
from rope_patch.cli.evaluation import Folder, parse_methods, run_and_report
from rope_patch.cli.options import option
from rope_patch.cli.runtime import command_line, requires_extra


@dataclass(frozen=True)
class _SampleOptions(options.SampleOptions):
    depths: options.Depths = "10,30,50,70,90"


def compare(
    *,
    model: options.Model,
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
    seed: options.Seed = 42,
    out: Folder = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Compare what methods gain at length and cost at short.

    Retrieval, perplexity, ordinary short tasks, speed and memory, for every method on the same
    samples, with intervals and paired tests, and with the controls that show what the numbers are
    worth. Needs --factor or --length unless all methods follow the length.

    \b
    Examples:
      rope-patch compare demo --method none,linear,yarn --factor 2 --lengths 4096,8192,12288
      rope-patch compare ./my-model --factor 4 --precision 0.05 --out comparison
    """
    chosen = parse_methods(
        ["none", *(method or [])], method_options.trained_length, method_options.start
    )
    parsed: dict[str, Any] = {
        "lengths": options.parse_ints("lengths", lengths, minimum=1) if lengths else (),
        **method_options.arguments(),
        **sample_options.arguments(),
        **text_options.arguments(),
        **loading.arguments(),
    }
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.profiles import DEFAULT_METHODS, comparison_request
    if method is None:
        chosen["methods"] = DEFAULT_METHODS
    request = comparison_request(
        model,
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
    run_and_report(request, as_json)
