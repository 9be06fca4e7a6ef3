"""Refuse continuous batching where its paged cache would give wrong results.

Cached keys would need re-rotation, or mix two rotations, or an encoding measures distances by slots
of the cache. Continuous batching keeps the keys of many requests in the blocks of one paged cache,
where they cannot be re-rotated. Its forward calls run in a thread of their own, where an error
would only fail the requests. So the method that starts it raises in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import is_paged, require_counted_cache
from rope_patch.transformers_api.generation import (
    START_BATCHING,
    batching_manager,
    batching_modules,
)
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    from rope_patch.patching.dynamic.hooks import LengthHooks

_ROTATION_ATTRIBUTE = "_rope_patch_rotation"


class BatchingGuard:
    """Wrapper of `init_continuous_batching` that refuses paged caches of several rotations.

    Attributes:
        module: The model.
        original_method: What is wrapped.
        rotation: Names what positions do to keys; a manager's cache is filled under one name.
        length_hooks: Hooks that follow lengths.
        refusal: Why the model is refused, whatever its lengths; None if it is not.
    """

    def __init__(
        self,
        module: nn.Module,
        rotation: str | None,
        length_hooks: Sequence[LengthHooks],
        refusal: str | None,
    ) -> None:
        self.module = module
        self.original_method = getattr(module, START_BATCHING)
        self.rotation = rotation
        self.length_hooks = length_hooks
        self.refusal = refusal

    def check(self) -> None:
        """Raise if no paged cache is right for the model."""
        if self.refusal is not None:
            raise Refused(self.refusal)
        for hooks in self.length_hooks:
            if hooks.fixed_length is None:
                raise Refused(paged_cache_refusal(hooks.method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        if self.rotation is None:
            return self.original_method(*args, **kwargs)
        lengths = [f"{hooks.fixed_length:g}" for hooks in self.length_hooks]
        rotation = " ".join([self.rotation, *lengths])
        manager = batching_manager(self.module)
        if manager is not None and vars(manager).get(_ROTATION_ATTRIBUTE) != rotation:
            raise Refused(manager_refusal(self.module))
        manager = self.original_method(*args, **kwargs)
        setattr(manager, _ROTATION_ATTRIBUTE, rotation)
        return manager


def guard_batching(
    model: nn.Module,
    undo_log: UndoLog,
    *,
    rotation: str | None = None,
    length_hooks: Sequence[LengthHooks] = (),
    refusal: str | None = None,
) -> None:
    """Have a model refuse continuous batching whose paged cache would mix rotations.

    Any paged cache does while frequencies depend on lengths, and so does a manager that was created
    under another rotation.

    Args:
        model: The model.
        undo_log: Log of the changes.
        rotation: Names what positions do to keys; None if that stays for as long as the model can
            have a manager.
        length_hooks: The patch's hooks that follow lengths.
        refusal: Why any paged cache is refused; None if it is not.
    """
    for module in batching_modules(model):
        guard = BatchingGuard(module, rotation, length_hooks, refusal)
        undo_log.set(module, START_BATCHING, guard)


def require_batching(model: nn.Module) -> None:
    """Raise if a model refuses continuous batching, before anything starts it.

    Raises:
        ValueError: It does. The message says why, and what to do instead.
    """
    for module in model.modules():
        guard = vars(module).get(START_BATCHING)
        while isinstance(guard, BatchingGuard):
            guard.check()
            guard = guard.original_method


def require_no_paged_cache(cache: Any, refusal: str) -> None:
    """Raise if the keys of a forward call go to a paged cache.

    Args:
        cache: What the forward is given, or None.
        refusal: The message, which names what to use instead.

    Raises:
        ValueError: They do, or the cache does not count its tokens.
    """
    if is_paged(cache):
        raise Refused(refusal)
    require_counted_cache(cache)


def require_no_batching_manager(model: nn.Module) -> None:
    """Raise if a model keeps a manager of continuous batching, whose cache may share old keys.

    Raises:
        ValueError: It does. The message says how to remove the manager.
    """
    for module in model.modules():
        if batching_manager(module) is not None:
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


def position_map_refusal(position_map: object) -> str:
    """Return the message that refuses continuous batching under a position map."""
    return (
        f"{position_map} compares each query with all keys of its sequence, and the paged cache of "
        "continuous batching holds the keys of many: expected a method that changes frequencies "
        "alone, such as yarn; or use model.generate"
    )


def slots_refusal(encoding: str) -> str:
    """Return the message that refuses continuous batching under an encoding that reads slots.

    Args:
        encoding: Names the encoding.
    """
    return (
        f"{encoding} measures distances by slots of the cache, and continuous batching packs many "
        "requests into one row of slots: expected a model that rotates, or that adds its positions "
        "to embeddings; or use model.generate"
    )
