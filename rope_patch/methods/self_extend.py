"""Self-Extend (arXiv:2401.01325): far keys share positions in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rope_patch.methods.position_map import GroupedMap, longest_grouped_text, require_window
from rope_patch.methods.registry import register_method


@register_method("self-extend", paper="Self-Extend, arXiv:2401.01325", training="not needed")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(GroupedMap):
    """Self-Extend: near keys exact, far ones in groups that share a position.

    The relative position is i - j below the window w, and floor(i/G) - floor(j/G) + w - floor(w/G)
    beyond. The released code shifts by w - w/G in some of its paths, so its prefill and decoding
    disagree unless G divides w; the floor of the paper is used throughout here.

    The group grows with the text unless given, so that positions stay within two thirds of the
    trained ones, as the authors recommend: the last third of them is badly trained.
    """

    def span(self, reach: int) -> int:
        """Return how many grouped positions there are beyond the window."""
        return max(1, 2 * reach // 3 - self.window_of(reach))

    def group_at(self, query: int, reach: int) -> int:
        if self.group is not None:
            return int(self.group)
        beyond = query + 1 - self.window_of(reach)
        return max(2, math.ceil(beyond / self.span(reach)))

    def first_query_of(self, group: int, reach: int) -> int:
        return (group - 1) * self.span(reach) + self.window_of(reach)

    def shift(self, group: int, window: int) -> int:
        return window - window // group

    def longest_text(self, reach: int) -> float:
        window = self.window_of(reach)
        if self.group is None:
            reason = "two thirds of the positions that the frequencies reach, unless group is given"
            require_window("window", window, 2 * reach // 3, reason)
            return math.inf
        require_window("window", window, reach)
        return longest_grouped_text(reach, window, int(self.group))
