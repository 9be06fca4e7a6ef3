"""Refuse paged attention where cached keys would have to be rotated again, or are of two rotations.

Continuous batching keeps the keys of many requests in the blocks of one paged cache, which no
method of ours can reach. Its forward calls run in a thread of their own, so a refusal there only
fails the requests. The method that starts it refuses in the caller's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rope_patch.patching.undo_log import Swaps

if TYPE_CHECKING:
    from rope_patch.patching.dynamic.hooks import Following

_ENTRY = "init_continuous_batching"  # `generate_batch` and the context manager call it, too
_KEPT = "_cached_continuous_batching_manager"
_MARK = "_rope_patch_rotation"


class BatchingGuard:
    """A model's `init_continuous_batching`, refused where a paged cache would mix rotations."""

    def __init__(self, module: nn.Module, rotation: str, followings: list[Following]) -> None:
        self.module = module
        self.own = getattr(module, _ENTRY)
        self.rotation = rotation
        self.followings = followings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for following in self.followings:
            if following.fixed is None:
                raise ValueError(refusal(following.method))
        lengths = [f"{following.fixed:g}" for following in self.followings]
        rotation = " ".join([self.rotation, *lengths])
        manager = vars(self.module).get(_KEPT)
        if manager is not None and vars(manager).get(_MARK) != rotation:
            raise ValueError(manager_refusal(self.module))
        manager = self.own(*args, **kwargs)
        setattr(manager, _MARK, rotation)
        return manager


def guard_batching(
    model: nn.Module, rotation: str, followings: list[Following], swaps: Swaps
) -> None:
    """Have a model refuse continuous batching whose paged cache would mix rotations.

    That is any while frequencies follow lengths, and a manager that was kept from another rotation.

    Args:
        model: The model.
        rotation: The digest of the patch's rotation.
        followings: The parts of the patch that follow lengths.
        swaps: Where the changes are recorded.
    """
    for module in model.modules():
        if hasattr(type(module), _ENTRY):
            swaps.set(module, _ENTRY, BatchingGuard(module, rotation, followings))


def require_no_pages(given: dict[str, Any], method: object) -> None:
    """Raise if the keys of a forward call go to a paged cache.

    Args:
        given: What the decoder is given, by name.
        method: The method that follows lengths.

    Raises:
        ValueError: They do; it says what to use instead.
    """
    if given.get("cache") is not None:
        raise ValueError(refusal(method))


def require_no_manager(model: nn.Module) -> None:
    """Raise if a model keeps a manager of continuous batching, whose cache may share old keys.

    Raises:
        ValueError: It does; it says how to let go of it.
    """
    for module in model.modules():
        if vars(module).get(_KEPT) is not None:
            raise ValueError(manager_refusal(module))


def manager_refusal(module: nn.Module) -> str:
    """Say why a kept manager is refused, and how to let go of it."""
    return (
        f"{type(module).__name__} keeps a manager of continuous batching "
        "(persistent_manager=True), whose paged cache holds keys of another rotation: call "
        "model.destroy_cached_continuous_batching_manager() first"
    )


def refusal(method: object) -> str:
    """Say why continuous batching is refused, and what to use instead."""
    return (
        f"{method} follows the length of each sequence, and keys in the paged cache of continuous "
        "batching cannot be rotated again: expected a method whose frequencies stay, such as yarn; "
        "or say the length beforehand (`handle.fix_length(...)`), or use model.generate"
    )
