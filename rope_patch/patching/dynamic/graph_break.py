"""Break a compiled graph where lengths must be followed outside of it."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable
def prepare_outside_graph(
    following: Any, given: dict[str, Any], tokens: torch.Tensor, cache: Any
) -> None:
    """Call `Following.prepare` in eager mode."""
    following.prepare(given, tokens, cache)
