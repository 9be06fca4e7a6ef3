"""The Trainer's callbacks and methods, and Liger's kernels as the Trainer applies them."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from rope_patch.transformers_api.releases import installed_release
from rope_patch.utils.errors import Refused

__all__ = ["ExportableState", "TrainerCallback", "liger_patcher", "require_overridable"]


def liger_patcher() -> Any:
    """Return the function that applies Liger's kernels to a model.

    Raises:
        ImportError: The release has it in its Trainer only.
    """
    from transformers.integrations.liger import apply_liger_kernel

    return apply_liger_kernel


def require_overridable(base: Any, subclass: Any, *names: str) -> None:
    """Raise if a class of transformers lacks a method that a subclass overrides.

    An override that nobody calls would do nothing, in silence.

    Args:
        base: The class of transformers.
        subclass: The subclass.
        names: The methods.

    Raises:
        ValueError: It does. The message names the release.
    """
    lacking = [name for name in names if not hasattr(base, name)]
    if lacking:
        raise Refused(
            f"{base.__name__} of {installed_release()} has no {', '.join(lacking)}, which "
            f"{subclass.__name__} overrides: expected a release that calls it"
        )
