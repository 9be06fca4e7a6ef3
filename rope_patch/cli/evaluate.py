"""The commands `eval`, `compare` and `report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

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
from rope_patch.cli.runtime import command_line, handle_interrupt, requires_extra

logger = logging.getLogger("rope_patch")

_DEFAULT_METHODS = ("none", "linear", "ntk", "yarn", "dynamic-yarn")

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


def evaluate(
    model: Model,
    method: Annotated[
        list[str],
        typer.Option(help="A method, or `none` for the model as it is; several are compared."),
    ],
    factor: Factor = None,
    length: Length = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the retrieval samples, in tokens, by commas.")
    ] = "4096,8192",
    tasks: Annotated[
        str,
        typer.Option(
            help="By commas: rp_ruler (RULER's 13 tasks), rp_hard (harder than needles), their "
            "single tasks such as rp_niah_single_2, each with _ll for the answer's likelihood in "
            "one forward pass instead of generation, some with _mc for the choice among answers; "
            "rp_short (ordinary tasks); perplexity, "
            "key_tokens (LongPPL), sliding, speed; any task of lm-eval whose data is at hand."
        ),
    ] = "rp_niah_single_2,perplexity",
    samples: Samples = None,
    precision: Precision = None,
    max_samples: MaxSamples = 500,
    depths: Depths = "10,50,90",
    per_text: PerText = None,
    controls: Annotated[
        bool, typer.Option(help="Ask questions of texts without their answer, too.")
    ] = False,
    share: Annotated[
        bool, typer.Option(help="Read what prompts begin with in common once.")
    ] = True,
    text: Texts = None,
    documents: Documents = None,
    haystack: Haystacks = None,
    questions: Questions = None,
    perplexity_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a document; the longest of --lengths if left out."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens in one point of the perplexity curve.", min=1)
    ] = None,
    control_context: Annotated[
        int | None,
        typer.Option(
            help="Context of the control, in tokens; half the trained length if left out.", min=2
        ),
    ] = None,
    stride: Annotated[
        int, typer.Option(help="Tokens scored in each window of sliding perplexity.", min=1)
    ] = 256,
    windows: Annotated[
        int, typer.Option(help="Windows of sliding perplexity in each document.", min=1)
    ] = 8,
    short_samples: Annotated[
        int, typer.Option(help="Samples of each ordinary short task.", min=1)
    ] = 100,
    trained_length: TrainedLength = None,
    start: Start = "auto",
    option: Option = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    gguf_file: GGUF = None,
    seed: Seed = 42,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm: print the lm_eval commands that run the same tasks on vLLM, with the "
            "methods as configs that it reads, instead of running anything."
        ),
    ] = None,
    out: Folder = Path("out"),
    as_json: Json = False,
) -> None:
    """Measure methods on a model, and write a report.

    Writes report.html (one file, no network), report.md, report.json, the figures, and lm-eval's
    own results. The same command continues a run that was stopped, and tries again what failed.
    Nothing is downloaded but the model: texts and samples come with the package. On several GPUs:
    accelerate launch --no_python rope-patch eval ...

    \b
    Examples:
      rope-patch eval demo --method none --method yarn --factor 2 --lengths 4096,12288
      rope-patch eval ./my-model --method yarn --factor 4 --tasks perplexity --text book.txt
      rope-patch eval ./my-model --method none,yarn --factor 4 --tasks rp_ruler --precision 0.05
    """
    _run_and_report(
        out,
        as_json,
        engine=engine,
        model=model,
        methods=tuple(dict.fromkeys(split_commas(",".join(method)))),
        factor=factor,
        length=length,
        lengths=tuple(parse_ints("lengths", lengths, minimum=1)),
        tasks=tuple(split_commas(tasks)),
        samples=samples,
        precision=precision,
        max_samples=max_samples,
        depths=tuple(parse_ints("depths", depths, minimum=0)),
        per_text=per_text,
        controls=controls,
        share=share,
        texts=tuple(text or ["emma"]),
        documents=documents,
        haystacks=tuple(haystack or []),
        questions=None if questions is None else str(questions),
        perplexity_length=perplexity_length,
        window=window,
        control_context=control_context,
        stride=stride,
        windows=windows,
        short_samples=short_samples,
        trained_length=trained_length,
        start=start,
        options=parse_options(option),
        dtype=dtype,
        device_map=device_map,
        gguf_file=gguf_file,
        seed=seed,
    )


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
    named = split_commas(",".join(method or []))
    listed = tuple(parse_ints("lengths", lengths, minimum=1)) if lengths else ()
    answers_at = tuple(parse_ints("depths", depths, minimum=0))
    given = parse_options(option)
    from rope_patch.pretrained import demo
    from rope_patch.pretrained.loading import read_config

    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation import profiles
        from rope_patch.evaluation.request import EvalRequest, check_methods
    methods: dict[str, Any] = {
        "methods": tuple(dict.fromkeys(["none", *(named or _DEFAULT_METHODS)])),
        "factor": factor,
        "length": length,
        "trained_length": trained_length,
        "start": start,
        "options": given,
    }
    path = demo.resolve_model_path(model)
    # First, before the machine's profile is said and a tokenizer is read.
    check_methods(EvalRequest(model=model, **methods), path, read_config(path, gguf_file=gguf_file))
    chosen = profiles.choose_profile(profile)
    at = listed or profiles.default_lengths(model, factor, length, trained_length, start, gguf_file)
    _run_and_report(
        out,
        as_json,
        model=model,
        **methods,
        lengths=at,
        tasks=tuple(split_commas(tasks))
        if tasks
        else profiles.fit_tasks(chosen.tasks, model, gguf_file, min(at)),
        samples=samples or (None if precision else chosen.samples),
        precision=precision,
        max_samples=max_samples,
        depths=answers_at,
        per_text=per_text,
        controls=True,
        share=share,
        texts=tuple(text or chosen.texts),
        documents=documents,
        haystacks=tuple(haystack or []),
        questions=None if questions is None else str(questions),
        short_samples=chosen.short_samples,
        dtype=dtype,
        device_map=device_map,
        gguf_file=gguf_file,
        seed=seed,
    )


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or their report.json; several side by side."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; the run's own if there is one run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a report again, or one report of several runs.

    Results are checked first: files of something else, of an older version, or that were changed
    after they were written are refused with the reason.

    \b
    Examples:
      rope-patch report out
      rope-patch report runs/llama runs/qwen --out both
    """
    from rope_patch.utils import atomic_files

    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.report import gaps
        from rope_patch.evaluation.report import writer as reporting
        from rope_patch.utils import checksums
    if len(runs) > 1 and out is None:
        raise ValueError("a report of several runs needs a folder of its own: give --out FOLDER")
    results = [
        found
        for run in runs
        for found in _load_results(run, checksums.verify_checksum, reporting.check_results)
    ]
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    show = None if as_json else print
    with atomic_files.add_write_advice(
        "The saved results are as they were: REMEDY, or give another folder"
    ):
        page = reporting.write_report(results[0] if len(results) == 1 else results, folder, show)
    missing = [gap for found in results for gap in gaps.find_gaps(found)]
    if missing:
        logger.error(gaps.gap_sentence(missing))
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"\n{page}")
    if missing:
        raise typer.Exit(1)


def _load_results(run: Path, verify: Any, check: Any) -> list[dict[str, Any]]:
    """The results of a run's folder or file, or of the runs that a report was made of."""
    path = run / "report.json" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(
            f"there is no {path}: expected the folder of a finished evaluation, or its report.json"
        )
    found = verify(path.read_bytes(), str(path))
    saved: list[dict[str, Any]] = found.get("runs") or [found]
    for results in saved:
        check(results, str(path))
    return saved


def _run_and_report(folder: Path, as_json: bool, engine: str | None = None, **request: Any) -> None:
    with requires_extra("evaluation needs", "eval"):
        from rope_patch.evaluation.pipeline import evaluate
        from rope_patch.evaluation.report.gaps import find_gaps
        from rope_patch.evaluation.request import EvalRequest
    command = command_line()
    asked = EvalRequest(**request, folder=folder, command=command)
    if engine is not None:
        from rope_patch.evaluation import vllm_commands

        print("\n\n".join(vllm_commands.commands(engine, asked)))
        return
    with handle_interrupt():
        results = evaluate(asked, None if as_json else print)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"), end="")
    else:
        print(f"\n{folder / 'report.html'}")
    if find_gaps(results):  # the report and stderr name them
        raise typer.Exit(1)
