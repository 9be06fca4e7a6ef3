"""The command `recommend`."""

from __future__ import annotations

from pathlib import Path

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import command_line, show_result, study


def recommend(
    *,
    model: options.Model,
    length: int = option(
        ..., "Target length: tokens, or a factor.", metavar="32768|32k|4x", written=True
    ),
    minutes: float = option(
        ..., "Minutes for measuring, those of earlier runs in the same folder included."
    ),
    text: list[str] | None = option(
        None,
        "What questions and documents are made of: a novel's name or a file; several. All novels "
        "that come with the package if left out.",
    ),
    samples: Path | None = option(
        None,
        "Questions of your own instead: JSON lines with input_ids and labels (-100 where nothing "
        "is scored). Those longer than the trained length show what is gained, the others what it "
        "costs.",
    ),
    short_length: int | None = option(
        None,
        "Tokens of what is measured within the trained length; half of that if left out.",
        written=True,
    ),
    most: int = option(96, "Samples of each kind, at most."),
    search: bool = option(True, "Search as well, with what is left of the time."),
    engines: options.Engines = None,
    out: options.StateFolder = Path("out/recommend"),
    layers: options.LayerOptions,
    loading: options.LoadingOptions,
    seed: options.Seed = 42,
    plan: options.Plan = False,
    as_json: options.Json = False,
) -> None:
    """Measure on a model which method to use at a length.

    The plain model, the static methods, the same following the length, and what a search finds
    answer questions about text of the target length; what each costs is measured within the trained
    length. Says first what fits into the time, and if the plain model and one method do not, how
    many minutes they need. The same command continues a run that was stopped, with more --minutes
    one that has ended. On several GPUs: accelerate launch --no_python rope-patch recommend ...

    \b
    Examples:
      rope-patch recommend demo --length 16384 --minutes 60
      rope-patch recommend ./my-model --length 32768 --minutes 20 --plan
      rope-patch recommend ./my-model --length 32768 --minutes 60 --for vllm,llama.cpp
    """
    with study("recommending needs", "search"):
        from rope_patch.recommending import recommend
        from rope_patch.recommending.result import MARKDOWN_FILE

        result = recommend(
            model,
            length=length,
            budget=minutes,
            text=text,
            samples=samples,
            short_length=short_length,
            most=most,
            search=search,
            engines=options.split_commas(",".join(engines or ())),
            seed=seed,
            plan=plan,
            folder=out,
            command=command_line(),
            **layers.arguments(),
            **loading.arguments(),
        )
    show_result(result, as_json, None if plan else out / MARKDOWN_FILE)
