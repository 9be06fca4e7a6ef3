"""Jet-Long (arXiv:2607.07740): groups no larger than the present length needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rope_patch.methods.position_map import GroupedMap, require_window
from rope_patch.methods.registry import register_method


@register_method("jet-long", paper="Jet-Long, arXiv:2607.07740", training="not needed")
@dataclass(frozen=True, kw_only=True)
class JetLong(GroupedMap):
    """Jet-Long: groups of ceil(n / trained length) tokens beyond a window of exact distances.

    The relative position is i - j up to the window w0, and floor(i/G) - floor(j/G) beyond. The
    authors take G from the longest text of a batch; here each query takes it from the n tokens that
    it sees, so that all prompts and chunks agree. Their window is 2,048 tokens at a trained length
    of 32,768; 512 to 4,096 were within two points of RULER.
    """

    window_includes_end: ClassVar[int] = 1

    def window_of(self, reach: int) -> int:
        return max(1, min(2048, reach // 4)) if self.window is None else int(self.window)

    def longest_text(self, reach: int) -> float:
        require_window("window", self.window_of(reach), reach)
        return math.inf if self.group is None else reach * int(self.group)
