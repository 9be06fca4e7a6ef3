"""Graph break for what cannot run within a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call_outside_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in eager mode: its calls depend on the values of positions."""
    return function(*args, **kwargs)
