"""The command `extend`."""

from __future__ import annotations

from pathlib import Path

import typer

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import command_line, show_result, study

NOTHING_SHOWN = 3  # the exit code if no method is shown to help


def extend(
    model: options.Model,
    to: str = option(
        ...,
        "The target: a factor such as 4x, or tokens such as 32768 or 32k. A number without a unit "
        "is a factor up to 64, and tokens beyond.",
        metavar="4x|32768|32k",
    ),
    budget: str = option(
        "8h",
        "Wall time of all steps together, such as 8h, 90m or 1h30m. What does not fit is left out, "
        "and the card says so.",
    ),
    train: bool = option(
        False,
        "Fine-tune as well, if memory and the budget allow it: all weights, or LoRA where they do "
        "not fit. A trained model is published only if it is shown to be better than the rotation "
        "alone.",
        "--train",
    ),
    data: list[str] | None = option(
        None,
        "Documents to train on, as the key `data` of a recipe: a file, a folder, hub:NAME; "
        "several. Left out: the novels of the package that are not measured on.",
    ),
    recipe: list[str] | None = option(
        None,
        "Another key of a recipe for --train (`finetune --keys`), such as learning_rate=1e-5; "
        "several.",
        metavar="KEY=VALUE",
    ),
    text: list[str] | None = option(
        None, "What questions and documents are made of: a novel's name or a file; several."
    ),
    search: bool = option(True, "Search as well, with what the recommendation leaves of its time."),
    samples: int = option(96, "Samples of each kind, at most."),
    engines: options.Engines = None,
    trained_length: options.TrainedLength = None,
    start: options.Start = "auto",
    anyway: options.Anyway = False,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: Path = option(Path("out/extend"), "A new folder, or the one to continue in."),
    seed: options.Seed = 42,
    plan: options.Plan = False,
    as_json: options.Json = False,
) -> None:
    """Take a checkpoint to a longer context, with the proof beside it.

    Diagnoses the model, recommends a method, trains it if asked to, compares it with the plain
    model on other questions than it was chosen by, and writes OUT/model: the model with its
    tokenizer, a card with the evidence, lines for other engines, and the report. Where no method is
    shown to help, nothing is written to publish, the evidence stays in OUT/work, and the exit code
    is 3.

    OUT/progress.html shows the steps. The same command continues a run that was stopped; other
    arguments are refused in the same folder.

    \b
    Examples:
      rope-patch extend demo --to 2x --budget 1h --out out/smollm2-16k
      rope-patch extend ./my-model --to 32k --budget 8h --for vllm,llama.cpp
      rope-patch extend ./my-model --to 32k --budget 8h --train --data ./long-documents
    """
    with study("extending needs", "all"):
        from rope_patch.extending import Extended, extend
        from rope_patch.extending.request import PUBLISHED

        result = extend(
            model,
            to,
            out=out,
            budget=budget,
            train=train,
            data=data or (),
            recipe=options.parse_options(recipe),
            texts=text or (),
            search=search,
            samples=samples,
            engines=options.split_commas(",".join(engines or ())),
            trained_length=trained_length,
            start=start,
            anyway=anyway,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            seed=seed,
            plan=plan,
            command=command_line(),
        )
    show_result(result, as_json)
    if isinstance(result, Extended) and result.outcome != PUBLISHED:
        raise typer.Exit(NOTHING_SHOWN)
