"""Commands that read no weights: `methods` and `diagnose`."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.options import (
    GGUF,
    Factor,
    Json,
    Length,
    Model,
    Option,
    Start,
    TrainedLength,
    parse_options,
    split_commas,
)

logger = logging.getLogger("rope_patch")


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or show one with its paper and options.

    \b
    Examples:
      rope-patch methods
      rope-patch methods yarn
    """
    from rope_patch.methods import list_methods, registered_methods
    from rope_patch.methods.registry import get_method

    chosen = registered_methods() if name is None else {name: get_method(name)}
    rows: list[dict[str, Any]] = [
        {
            "name": key,
            "description": list_methods()[key],
            "paper": cls.paper,
            "training": cls.training,
            "options": {
                f.name: {
                    "help": f.metadata["help"],
                    "default": "required" if f.default is MISSING else f.default,
                }
                for f in fields(cls)
            },
        }
        for key, cls in chosen.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['description']}")
    if name is None:
        print("\n`rope-patch methods NAME` shows a method's paper and options.")
        return
    (row,) = rows
    print(f"{'':<{width}}  {row['paper']}; fine-tuning: {row['training']}")
    for key, about in row["options"].items():
        print(f"{'':<{width}}    {key} (default: {about['default']}): {about['help']}")


def diagnose(
    model: Model,
    method: Annotated[
        str, typer.Option(help="What to apply; `default` shows the rotation as it is.")
    ] = "default",
    factor: Factor = None,
    length: Length = None,
    trained_length: TrainedLength = None,
    layer_types: Annotated[
        str | None, typer.Option(help="Which layers to look at, by commas; those that see far.")
    ] = None,
    start: Start = "auto",
    option: Option = None,
    gguf_file: GGUF = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw every pair's wavelength, before and after, into this .svg or .png file."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a model's rotation, and say what a length needs.

    Says whether transformers does what the config says. Findings come first, each with its number
    and the line that puts it right; then a recommendation; then every rotated pair: its wavelength,
    its turns in training, what a method does to it. A pair that never completed a turn in training
    meets new angles beyond the trained length; the first of them is the critical dimension. Reads
    configs only, no weights. MODEL may also be a folder with a PEFT adapter.

    \b
    Examples:
      rope-patch diagnose demo --length 16384
      rope-patch diagnose demo --method yarn --factor 2 --picture yarn.svg
    """
    from rope_patch.diagnosing.pipeline import diagnose_subject
    from rope_patch.diagnosing.plot import require_plot_suffix
    from rope_patch.diagnosing.subject import open_subject
    from rope_patch.pretrained import demo
    from rope_patch.utils import atomic_files

    if picture is not None:
        require_plot_suffix(picture)
        atomic_files.require_writable_file(picture, "the picture", folder_exists=True)
    subject = open_subject(
        demo.resolve_model_path(model), gguf_file=gguf_file, display_name=shlex.quote(model)
    )
    diagnosis = diagnose_subject(
        subject,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        layer_types=None if layer_types is None else split_commas(layer_types),
        start=start,
        options=parse_options(option),
    )
    print(json.dumps(diagnosis.to_dict(), indent=1, allow_nan=False) if as_json else diagnosis)
    if picture is not None:  # last: a library or a folder that is missing costs no diagnosis
        diagnosis.plot(picture)
        logger.info("picture: %s", picture)
