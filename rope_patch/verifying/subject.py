"""The model that an engine is compared with, without a patch, and what is asked of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.extension import Extension
from rope_patch.patching import current
from rope_patch.pretrained import demo
from rope_patch.pretrained.loading import load, read_model, read_tokenizer
from rope_patch.pretrained.model_folder import has_tokenizer
from rope_patch.pretrained.sidecar import patch_to_restore
from rope_patch.verifying.engine import CannotVerify


@dataclass(frozen=True)
class Subject:
    """The model to compare with.

    Attributes:
        model: The model, without a patch.
        extension: What is asked of the engine; None for the checkpoint's own rotation.
        tokenizer: Its tokenizer; None if there is none.
    """

    model: Any
    extension: Extension | None
    tokenizer: Any


@contextmanager
def open_subject(
    against: Any, extension: Extension | None, engine: Any, **loading: Any
) -> Iterator[Subject]:
    """Yield the model to compare with; a live one gets its patch back afterwards.

    Args:
        against: A model's folder, its name on the Hub, `demo`, or a live model.
        extension: The request; None for the patch that the model has or was saved with, or else
            the checkpoint's own rotation.
        engine: The live model that is verified, if one is.
        **loading: Arguments of `rope_patch.load`.

    Raises:
        CannotVerify: Both are one object.
        ValueError: The model cannot be read, or the request cannot be met.
    """
    if isinstance(against, nn.Module):
        if against is engine:
            raise CannotVerify(
                "against is the very model that is verified, expected one to compare it with: give "
                "the checkpoint's folder, or copy.deepcopy(model) without the changes"
            )
        handle = current(against)
        if handle is None:
            yield Subject(against, extension, None)
            return
        handle._deactivate()
        try:
            yield Subject(against, extension or handle.extension, None)
        finally:
            handle._restore(against)
        return
    path = demo.resolve_model_path(against) if isinstance(against, str) else against
    gguf_file = loading.get("gguf_file")
    tokenizer = None
    if gguf_file is not None or has_tokenizer(path):
        tokenizer = read_tokenizer(path, gguf_file=gguf_file)
    if extension is None and patch_to_restore(path) is None:
        yield Subject(read_model(path, **loading), None, tokenizer)
        return
    model = load(path, extension, **loading)
    handle = current(model)
    if handle is None:
        raise CannotVerify(
            f"{against} has no rotation, expected a decoder with RoPE: verify compares rotations"
        )
    handle.undo()
    yield Subject(model, handle.extension, tokenizer)
