"""The command `serve`."""

from __future__ import annotations

import typer


def serve(context: typer.Context) -> None:
    """Run `transformers serve` with a folder that rope_patch saved, rotated as it was saved.

    Takes the model and the options of `transformers serve` (`transformers serve --help`). Plain
    `transformers serve` loads the unpatched model where transformers has no form of the method.
    Needs pip install 'transformers[serving]'.

    \b
    Examples:
      rope-patch serve ./my-model
      rope-patch serve ./my-model --continuous-batching --port 8000
    """
    from rope_patch.serving.transformers_server import serve as run_server

    run_server(context.args)
