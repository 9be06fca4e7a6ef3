"""What `rope_patch.patch` may do to a model that `rope_patch.encode` gave another encoding."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from rope_patch.extension import Extension
from rope_patch.methods.registry import find_method
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.replacement.encoding import RotaryEncoding, find_encoding
from rope_patch.utils.errors import Refused

_NOPE = "nope"


def encoded_extension(model: nn.Module, extension: Extension) -> Extension:
    """Return a request as an encoded model can take it; unchanged for all others.

    transformers' own code rotates where a hook replaces cos and sin, or where queries and keys are
    scaled after it.

    Raises:
        ValueError: The request does not suit the encoding.
    """
    encoding = find_encoding(model)
    if encoding is None:
        return extension
    if encoding.name == "none":
        if extension.method != _NOPE or "temperature" not in extension.options:
            raise Refused(
                "a model without positions has nothing to stretch, but its attention can be "
                f"sharpened: expected the method {_NOPE!r} with a temperature, such as "
                "rope_patch.patch(model, 'nope', temperature='log-n') or temperature=1.2, got "
                f"{extension.method!r}"
            )
    elif encoding.name == "rnope":
        method = find_method(extension.method)
        if method is not None and method.is_dynamic:
            raise Refused(
                f"{extension.method!r} re-rotates cached keys, and some layers of the encoding "
                f"{encoding.name!r} do not rotate: expected a method whose frequencies stay, such "
                "as yarn"
            )
    elif encoding.name != "xpos":
        return extension
    if extension.kernels not in ("auto", "hf"):
        raise Refused(
            f"kernels={extension.kernels!r} would rotate for the encoding {encoding.name!r}, which "
            "needs transformers' own code: leave kernels out"
        )
    return replace(extension, kernels="hf")


def rotation_refusal(model: nn.Module) -> Refused | None:
    """Return why no rotation of a model can be extended; None if one can."""
    encoding = find_encoding(model)
    if encoding is None:
        try:
            find_rotaries(model)
        except Refused as refusal:
            return refusal
        return None
    if encoding.name == "none" or isinstance(encoding, RotaryEncoding):
        return None
    return Refused(
        f"the encoding {encoding.name!r} cannot be extended: expected one of alibi, t5, learned, "
        "sinusoidal, integer, normalised, rope, rnope, xpos and none"
    )
