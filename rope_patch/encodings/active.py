"""The handle of whatever patch is in effect on a model."""

from __future__ import annotations

from torch import nn

from rope_patch.encodings.sites.handle import EncodingPatch, current_encoding
from rope_patch.patching import handle as rotation


def current(model: nn.Module) -> rotation.Patch | EncodingPatch | None:
    """Return the handle of the patch that is in effect on a model, or None.

    Raises:
        TypeError: Not a torch module.
    """
    return rotation.current(model) or current_encoding(model)
