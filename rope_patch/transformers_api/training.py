"""The Trainer's callbacks and methods."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from rope_patch.transformers_api.models import installed_release
from rope_patch.utils.errors import Refused

__all__ = ["ExportableState", "TrainerCallback", "require_overridable"]


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
