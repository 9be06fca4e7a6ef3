"""Commands that read no weights: `methods` and `diagnose`."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from rope_patch.cli.options import GGUF, Factor, Json, Length, Model, Option, TrainedLength, options


def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each does, its paper, whether it needs fine-tuning.

    \b
    Examples:
      rope-patch methods
      rope-patch methods yarn
    """
    from rope_patch.methods import methods as descriptions
    from rope_patch.methods import registered
    from rope_patch.methods.registry import get

    chosen = registered() if name is None else {name: get(name)}
    rows: list[dict[str, Any]] = [
        {
            "name": key,
            "description": descriptions()[key],
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
        print(f"{'':<{width}}  {row['paper']}; fine-tuning: {row['training']}")
        for key, about in row["options"].items():
            if name is not None:
                print(f"{'':<{width}}    {key} (default: {about['default']}): {about['help']}")
            elif key != "factor":
                print(f"{'':<{width}}    {key}: {about['help']}")


def diagnose(
    model: Model,
    method: Annotated[
        str, typer.Option(help="What to apply; `default` shows the rotation as it is.")
    ] = "default",
    factor: Factor = None,
    length: Length = None,
    trained_length: TrainedLength = None,
    option: Option = None,
    gguf_file: GGUF = None,
    as_json: Json = False,
) -> None:
    """Show every rotated pair: its wavelength, its turns in training, what a method does to it.

    A pair that never completed a turn in training meets new angles beyond the trained length; the
    first of them is the critical dimension. Reads the config only, no weights.

    \b
    Examples:
      rope-patch diagnose demo --length 16384
      rope-patch diagnose demo --method yarn --factor 2
    """
    from rope_patch import demo
    from rope_patch.diagnosing import diagnose
    from rope_patch.loading import read_config

    config = read_config(demo.resolve(model), gguf_file=gguf_file)
    diagnosis = diagnose(
        config,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        **options(option),
    )
    print(json.dumps(diagnosis.to_dict(), indent=1) if as_json else diagnosis)
