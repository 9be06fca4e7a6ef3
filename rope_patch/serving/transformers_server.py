"""Run `transformers serve` on folders that `rope_patch.save` wrote.

Plain transformers knows no sidecar. It loads the folder of a method that it lacks as the unpatched
model, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rope_patch.patching.dynamic.generation import require_batching
from rope_patch.pretrained.loading import load
from rope_patch.pretrained.sidecar import SIDECAR
from rope_patch.transformers_api.generation import served_folder, server
from rope_patch.utils.errors import Refused


def serve(arguments: Sequence[str]) -> None:
    """Run transformers' server until it is stopped.

    Args:
        arguments: Those of `transformers serve`: a model and options.

    Raises:
        ValueError: The installed transformers has no server, or packages that it needs are missing;
            or a folder's model cannot be served as asked.
    """
    import typer

    try:
        command, model_manager = server()
    except ImportError as error:
        raise Refused(
            f"this transformers has no server that loads models by a manager ({error}): expected "
            "a newer release (pip install -U 'transformers[serving]')"
        ) from error
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    with _manager_replaced(model_manager):
        try:
            app(list(arguments), prog_name="rope-patch serve", standalone_mode=False)
        except ImportError as error:
            raise Refused(str(error)) from error


def patched_manager(manager_class: Any) -> Any:
    """Return a subclass of transformers' `ModelManager` that loads saved folders as patched.

    It refuses a model that continuous batching would serve wrongly when the model is loaded, not
    request by request.
    """

    class PatchedModelManager(manager_class):
        """Loads folders with a sidecar by `rope_patch.load`, and others as transformers does."""

        def __init__(self, *args: Any, continuous_batching: bool = False, **kwargs: Any) -> None:
            self.batches_continuously = continuous_batching
            super().__init__(*args, continuous_batching=continuous_batching, **kwargs)

        def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            folder = served_folder(model_id_and_revision)
            if not (folder / SIDECAR).is_file():
                return super()._load_model(model_id_and_revision, *args, **kwargs)
            settings = {
                "attn_implementation": self.attn_implementation,
                "quantization_config": self.get_quantization_config(),
            }
            given = {name: value for name, value in settings.items() if value is not None}
            model = load(
                str(folder),
                device_map=self.device,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
                **given,
            )
            if self.batches_continuously:
                require_batching(model)
            return model

    return PatchedModelManager


@contextmanager
def _manager_replaced(module: Any) -> Iterator[None]:
    """Have transformers' server create our manager within the block."""
    original = module.ModelManager
    module.ModelManager = patched_manager(original)
    try:
        yield
    finally:
        module.ModelManager = original
