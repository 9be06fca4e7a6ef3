"""The command `finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import handle_interrupt, requires_extra, show


@dataclass(frozen=True)
class _InspectionOptions(options.OptionGroup):
    """What goes with --inspect-data."""

    inspect_limit: int | None = option(None, "Read only so many documents of each source.", min=1)
    duplicates: bool = option(
        False, "Look for exact and near duplicates among them.", "--duplicates"
    )
    write_deduplicated: Path | None = option(
        None,
        "Write the documents that are no duplicates to a new folder, as JSON lines.",
        metavar="FOLDER",
    )
    picture: Path | None = option(None, "Draw the histogram of lengths to an .svg or .png file.")


def finetune(
    context: typer.Context,
    *,
    config: Path | None = option(
        None, "The recipe: a YAML file, or one of those that `recipes` lists."
    ),
    plan: bool = option(False, "Say what memory it takes, and train nothing.", "--plan"),
    keys: bool = option(False, "List every key a recipe can have.", "--keys"),
    inspect_data: bool = option(
        False,
        "Read the recipe's data and say what they are: lengths, rows, duplicates. Trains nothing.",
        "--inspect-data",
    ),
    inspection: _InspectionOptions,
    as_json: bool = option(False, "The plan or the inspection as JSON on stdout.", "--json"),
) -> None:
    """Fine-tune a model for a longer context by a recipe.

    Any key of a recipe goes on the command line as --key value: model, method, factor or length,
    data, train_length, max_steps or tokens, learning_rate, lora_rank, loss, resume, output_dir (or
    --out), report_to, retrieval_steps, ..., and those of TrainingArguments. The finished
    model is in OUTPUT_DIR/model, the loss curve in OUTPUT_DIR/log.jsonl, everything that was
    resolved in OUTPUT_DIR/recipe.yaml. For several GPUs give the same to accelerate launch:

    \b
      rope-patch recipes fsdp2 > fsdp2.yaml
      accelerate launch --config_file fsdp2.yaml -m rope_patch.recipes.finetune --config ...

    With --resume auto a run goes on from its last whole checkpoint. It is refused if the weights,
    the data or a key of the recipe is another than before; --keys says which keys may change. One
    run at a time works in OUTPUT_DIR.

    A recipe with `stages` extends in steps, such as 4k, 32k, 128k. Each stage starts with the
    weights of the one before, in OUTPUT_DIR/stage-K, and its rotation is computed from the
    original model. --plan and --resume auto work on all of them.

    \b
    Examples:
      rope-patch finetune --config smoke_cpu
      rope-patch finetune --config yarn_64k --plan
      rope-patch finetune --config yarn_64k --inspect-data --duplicates --picture lengths.png
      rope-patch finetune --config yarn_64k --resume auto
    """
    from rope_patch.training.recipe_files import find_recipe

    if config is not None:
        find_recipe(config)  # a slip is answered before torch is imported
    with requires_extra("recipes need", "train"):
        from rope_patch.training import trainer as recipe
        from rope_patch.training.identity import CHANGEABLE_KEYS
        from rope_patch.training.inspection import report
        from rope_patch.training.settings import parse_settings, usable_keys
    if keys:
        keys_with_help = usable_keys()
        width = max(map(len, keys_with_help))
        for key, about in keys_with_help.items():
            change = " (may change when a run goes on)" if key in CHANGEABLE_KEYS else ""
            print(f"{key:<{width}}  {about}{change}")
        return
    words = [] if config is None else ["--config", str(config)]
    if inspect_data:
        if plan:
            raise ValueError("--inspect-data trains nothing: expected no --plan beside it")
        with handle_interrupt("--inspect-limit N reads fewer documents"):
            inspections = report.inspect_recipe(
                parse_settings([*words, *context.args])[0],
                limit=inspection.inspect_limit,
                duplicates=inspection.duplicates,
                clean_folder=inspection.write_deduplicated,
                picture=inspection.picture,
            )
            show(report.format_inspections(inspections, as_json=as_json))
        return
    for name, value in vars(inspection).items():
        if value is not None and value is not False:
            word = name.replace("_", "-")
            raise ValueError(f"--{word} is for --inspect-data: expected both, or neither")
    flags = {"--plan": plan, "--json": as_json}
    words += [flag for flag, on in flags.items() if on]
    with handle_interrupt("--resume auto goes on from the last checkpoint"):
        recipe.main([*words, *context.args])
