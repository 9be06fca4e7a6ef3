"""The methods, one file each; importing this package registers them in the order users see.

For a method of your own: `Method`, `Geometry`, `Frequencies`, `option` and `register_method`.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method, option
from rope_patch.methods.origin import load_plugin
from rope_patch.methods.registry import build, register_method, registered_methods
from rope_patch.units import parse_factor, parse_tokens
from rope_patch.utils.installation import warn_renamed
from rope_patch.utils.lazy_exports import export_lazily

__all__ = [
    "Frequencies",
    "Geometry",
    "Method",
    "build",
    "frequencies",
    "list_methods",
    "load_plugin",
    "option",
    "register_method",
    "registered_methods",
]

for _file in (
    "default",
    "linear",
    "ntk",
    "ntk_by_parts",
    "yarn",
    "llama3",
    "abf",
    "longrope",
    "proportional",
    "nope",
    "ntk_by_parts_2023_06",
    "clipped",
    "mixed",
    "dynamic",
    "rerope",
    "self_extend",
    "jet_long",
    "dca",
    "string_map",
    "lampe",
    "dpe",
    "lm_infinite",
    "streaming",
    "recorded",
):
    import_module(f"rope_patch.methods.{_file}")


def list_methods() -> dict[str, str]:
    """Return names and one-line descriptions of all methods for rotation, in a stable order.

    Methods for other encodings: docs/other-encodings.md, and `rope-patch methods`.
    """
    return {
        name: (inspect.cleandoc(cls.__doc__ or "") or name).splitlines()[0]
        for name, cls in registered_methods().items()
    }


def frequencies(
    method: str,
    *,
    head_dim: int,
    theta: float,
    trained_length: int | str,
    factor: float | str = 1.0,
    seq_len: float | str | None = None,
    rotary_dim: int | None = None,
    **options: Any,
) -> Frequencies:
    """Compute a method's rotation without a model.

    Args:
        method: A name from `list_methods()`.
        head_dim: Size of one attention head (D).
        theta: Rope base.
        trained_length: Context length in pretraining, in tokens.
        factor: Target length / trained length.
        seq_len: Tokens in the sequence, for methods that depend on it; None for the target length.
        rotary_dim: Dimensions that rotate (R), if not the whole head.
        **options: The method's options.

    Returns:
        `.inv_freq`, radians per token, float64, `[R / 2]`, and `.attention_factor`.

    Raises:
        ValueError: The method or an option is unknown, or a value is out of range.
    """
    geometry = Geometry(
        head_dim=head_dim,
        theta=theta,
        trained_length=parse_tokens("trained_length", trained_length),
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
    )
    built = build(method, factor=parse_factor("factor", factor), **options)
    return built.frequencies(geometry, parse_tokens("seq_len", seq_len))


class _Callable(ModuleType):
    """This package, which can still be called as the function `rope_patch.methods()` once could."""

    def __call__(self) -> dict[str, str]:
        warn_renamed("rope_patch.methods()", "rope_patch.list_methods()")
        return list_methods()


sys.modules[__name__].__class__ = _Callable


export_lazily(
    __name__,
    {
        "dynamic": "Dynamic",
        "mixed": "Mixed",
        "origin": "origin_of",
        "position_map": "near_region PositionMap Region",
        "registry": "ENCODING_METHODS find_method get_method outside_methods",
        "temperature": "Temperature",
    },
)
