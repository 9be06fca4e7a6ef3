"""Count PyTorch's operators that launch a kernel on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operators that launch no kernel though they return no view.
_NO_KERNEL = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
)


class OperatorCount(TorchDispatchMode):
    """Counts operators while it is entered.

    Attributes:
        count: The operators so far that would launch a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this context."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_paused and _launches_a_kernel(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _launches_a_kernel(func: Any) -> bool:
    is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
    return not is_view and func.overloadpacket.__name__ not in _NO_KERNEL
