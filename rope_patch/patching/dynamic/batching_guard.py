"""Refuse paged attention where cached keys would need re-rotation, or would mix two rotations.

Continuous batching keeps the keys of many requests in the blocks of one paged cache, where they
cannot be re-rotated. Its forward calls run in a thread of their own, where an error would only fail
the requests. So the method that starts it raises in the caller's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    from rope_patch.patching.dynamic.hooks import LengthHooks

_ENTRY_METHOD = "init_continuous_batching"  # `generate_batch` and the context manager call it, too
_MANAGER_ATTRIBUTE = "_cached_continuous_batching_manager"
_ROTATION_ATTRIBUTE = "_rope_patch_rotation"


class BatchingGuard:
    """Wrapper of `init_continuous_batching` that refuses paged caches of several rotations."""

    def __init__(self, module: nn.Module, rotation: str, followings: list[LengthHooks]) -> None:
        self.module = module
        self.original_method = getattr(module, _ENTRY_METHOD)
        self.rotation = rotation
        self.length_hooks = followings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hooks in self.length_hooks:
            if hooks.fixed_length is None:
                raise Refused(paged_cache_refusal(hooks.method))
        lengths = [f"{hooks.fixed_length:g}" for hooks in self.length_hooks]
        rotation = " ".join([self.rotation, *lengths])
        manager = vars(self.module).get(_MANAGER_ATTRIBUTE)
        if manager is not None and vars(manager).get(_ROTATION_ATTRIBUTE) != rotation:
            raise Refused(manager_refusal(self.module))
        manager = self.original_method(*args, **kwargs)
        setattr(manager, _ROTATION_ATTRIBUTE, rotation)
        return manager


def guard_batching(
    model: nn.Module, rotation: str, length_hooks: list[LengthHooks], undo_log: UndoLog
) -> None:
    """Have a model refuse continuous batching whose paged cache would mix rotations.

    Any paged cache does while frequencies depend on lengths, and so does a manager that was created
    under another rotation.

    Args:
        model: The model.
        rotation: The digest of the patch's rotation.
        length_hooks: The patch's hooks that follow lengths.
        undo_log: Log of the changes.
    """
    for module in model.modules():
        if hasattr(type(module), _ENTRY_METHOD):
            undo_log.set(module, _ENTRY_METHOD, BatchingGuard(module, rotation, length_hooks))


def require_no_paged_cache(arguments: dict[str, Any], method: object) -> None:
    """Raise if the keys of a forward call go to a paged cache.

    Args:
        arguments: The decoder's arguments, by name.
        method: The length-dependent method.

    Raises:
        ValueError: They do. The message names what to use instead.
    """
    if arguments.get("cache") is not None:
        raise Refused(paged_cache_refusal(method))


def require_no_batching_manager(model: nn.Module) -> None:
    """Raise if a model keeps a manager of continuous batching, whose cache may share old keys.

    Raises:
        ValueError: It does. The message says how to remove the manager.
    """
    for module in model.modules():
        if vars(module).get(_MANAGER_ATTRIBUTE) is not None:
            raise Refused(manager_refusal(module))


def manager_refusal(module: nn.Module) -> str:
    """Return the message that refuses a manager and says how to remove it."""
    return (
        f"{type(module).__name__} keeps a manager of continuous batching "
        "(persistent_manager=True), whose paged cache holds keys of another rotation: call "
        "model.destroy_cached_continuous_batching_manager() first"
    )


def paged_cache_refusal(method: object) -> str:
    """Return the message that refuses continuous batching and names what to use instead."""
    return (
        f"{method} follows the length of each sequence, and keys in the paged cache of continuous "
        "batching cannot be rotated again: expected a method whose frequencies stay, such as yarn; "
        "or say the length beforehand (`handle.fix_length(...)`), or use model.generate"
    )
