"""The command `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.evaluation import (
    Depths,
    DeviceMap,
    Documents,
    Folder,
    Haystacks,
    MaxSamples,
    PerText,
    Precision,
    Questions,
    Samples,
    Seed,
    Texts,
    run_and_report,
)
from rope_patch.cli.options import (
    GGUF,
    Dtype,
    Factor,
    Json,
    Length,
    Model,
    Option,
    Start,
    TrainedLength,
    parse_ints,
    parse_options,
    split_commas,
)
from rope_patch.cli.runtime import requires_extra

_DEFAULT_METHODS = ("none", "linear", "ntk", "yarn", "dynamic-yarn")


def compare(
    model: Model,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method; several, or by commas: linear,ntk,yarn,dynamic-yarn if left out. The "
            "model as it is, `none`, is always with them."
        ),
    ] = None,
    factor: Factor = None,
    length: Length = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths in tokens, by commas; if left out, half the trained length, the trained "
            "length, and its doubles up to the target."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="quick: one retrieval task, for CPUs. standard: RULER's 13 tasks "
            "and four harder ones, 50 samples each. paper: 500. Left out: standard where there is "
            "a GPU, else quick."
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Other tasks than the profile's, as for `eval`.")
    ] = None,
    samples: Samples = None,
    precision: Precision = None,
    max_samples: MaxSamples = 500,
    depths: Depths = "10,30,50,70,90",
    per_text: PerText = 5,
    share: Annotated[
        bool, typer.Option(help="Read what prompts begin with in common once.")
    ] = True,
    text: Texts = None,
    documents: Documents = None,
    haystack: Haystacks = None,
    questions: Questions = None,
    trained_length: TrainedLength = None,
    start: Start = "auto",
    option: Option = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    gguf_file: GGUF = None,
    seed: Seed = 42,
    out: Folder = Path("out"),
    as_json: Json = False,
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
    method_names = split_commas(",".join(method or []))
    token_lengths = tuple(parse_ints("lengths", lengths, minimum=1)) if lengths else ()
    answers_at = tuple(parse_ints("depths", depths, minimum=0))
    method_options = parse_options(option)
    from rope_patch.pretrained import demo
    from rope_patch.pretrained.loading import read_config

    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation import profiles
        from rope_patch.evaluation.request import EvalRequest, check_methods
    methods: dict[str, Any] = {
        "methods": tuple(dict.fromkeys(["none", *(method_names or _DEFAULT_METHODS)])),
        "factor": factor,
        "length": length,
        "trained_length": trained_length,
        "start": start,
        "options": method_options,
    }
    path = demo.resolve_model_path(model)
    # First, before the machine's profile is said and a tokenizer is read.
    check_methods(EvalRequest(model=model, **methods), path, read_config(path, gguf_file=gguf_file))
    selected = profiles.choose_profile(profile)
    test_lengths = token_lengths or profiles.default_lengths(
        model, factor, length, trained_length, start, gguf_file
    )
    run_and_report(
        out,
        as_json,
        model=model,
        **methods,
        lengths=test_lengths,
        tasks=tuple(split_commas(tasks))
        if tasks
        else profiles.fit_tasks(selected.tasks, model, gguf_file, min(test_lengths)),
        samples=samples or (None if precision else selected.samples),
        precision=precision,
        max_samples=max_samples,
        depths=answers_at,
        per_text=per_text,
        controls=True,
        share=share,
        texts=tuple(text or selected.texts),
        documents=documents,
        haystacks=tuple(haystack or []),
        questions=None if questions is None else str(questions),
        short_samples=selected.short_samples,
        dtype=dtype,
        device_map=device_map,
        gguf_file=gguf_file,
        seed=seed,
    )
