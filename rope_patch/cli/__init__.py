"""The command line: parses, calls, prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import typer

from rope_patch.cli import (
    benchmarking,
    evaluating,
    exporting,
    finetuning,
    inspecting,
    recommending,
    searching,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # examples stay on lines of their own, and logs stay readable
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Take a pretrained RoPE decoder to a longer context, and prove what that gained and cost.",
)

app.command()(inspecting.methods)
app.command()(inspecting.diagnose)
app.command("eval")(evaluating.evaluate)
app.command()(evaluating.compare)
app.command()(evaluating.report)
app.command()(benchmarking.bench)
app.command()(exporting.export)
app.command()(searching.search)
app.command()(recommending.recommend)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    finetuning.finetune
)


def main() -> None:
    """Runs the command line."""
    run(app)


def run(command: Callable[[], Any]) -> None:
    """Runs a command; a failure is one clear line on stderr and a non-zero exit."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("rope_patch").setLevel(logging.INFO)
    try:
        command()
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
