"""The command `verify`."""

from __future__ import annotations

from pathlib import Path

import typer

from rope_patch.cli import options
from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import show_result


def verify(
    *,
    url: str = argument(
        ..., "The engine's address, as http://HOST:PORT, or a folder or GGUF file."
    ),
    against: str = option(..., "What it serves: a model's folder, a name on the Hub, or `demo`."),
    method: str | None = option(
        None, "How it should rotate; left out: as the model's config or rope_patch.json says."
    ),
    factor: options.Factor = None,
    length: options.Length = None,
    method_option: options.MethodOption = None,
    layers: options.LayerOptions,
    engine: str = option("auto", "The engine's API: auto, openai, llama.cpp or sglang."),
    served_model: str | None = option(None, "The served model's name, where a server has several."),
    tokens: int | None = option(
        None,
        "Tokens of the longest prompt; a little more than the trained length unless given, at most "
        "4,096.",
        written=True,
    ),
    seconds: float = option(600.0, "Time budget."),
    seed: options.Seed = 0,
    loading: options.LoadingOptions,
    junit: Path | None = option(
        None, "Also write the verdict to this file as JUnit XML, for a build server."
    ),
    as_json: options.Json = False,
) -> None:
    """Find out whether a running engine rotates as asked, from its log-probabilities.

    Sends prompts of token ids, computes the same with transformers under every rotation that the
    engine may have, and prints the one that explains its numbers: as asked, unscaled, without the
    attention factor, with another theta, scaled twice, ... Exit code: 0 as asked, 1 another
    rotation, 2 an error, 3 cannot tell.

    \b
    Examples:
      rope-patch verify http://localhost:8000 --against Qwen/Qwen3-8B --method yarn --factor 4
      rope-patch verify http://localhost:8080 --against ./my-model-32k --json
    """
    from rope_patch.utils.atomic_files import atomic_write, require_writable_file
    from rope_patch.verifying import verify as run

    if junit is not None:
        require_writable_file(junit, "the verdict", folder_exists=False)
    verification = run(
        url,
        against=against,
        method=method,
        factor=factor,
        length=length,
        engine=engine,
        served_model=served_model,
        tokens=tokens,
        seconds=seconds,
        seed=seed,
        **layers.arguments(),
        **loading.arguments(),
        **options.parse_options(method_option),
    )
    if junit is not None:
        atomic_write(junit, verification.to_junit())
    show_result(verification, as_json)
    raise typer.Exit(verification.exit_code)
