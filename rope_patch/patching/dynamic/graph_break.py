"""Graph break for updates that cannot run within a compiled graph."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable
def prepare_outside_graph(
    hooks: Any, arguments: dict[str, Any], tokens: torch.Tensor, cache: Any
) -> None:
    """Call `LengthHooks.prepare` in eager mode."""
    hooks.prepare(arguments, tokens, cache)
