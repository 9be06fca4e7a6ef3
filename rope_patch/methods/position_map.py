"""Position maps: methods that change the distances at which attention compares tokens.

Frequencies stay; each query meets far keys at positions that the model was trained on. A map cuts
the keys of a query into intervals. In each interval the relative position of query i and key j is
a(i) - b(j), so rotated queries and cached rotated keys need only be turned by a(i) - i and
b(j) - j.

Papers fix a map for a whole text. Here it depends on the query alone: a query within the trained
length attends as in the plain model, and a later one by the map for the tokens that it sees. So
whole prompts, chunks and single steps give the same, whatever the cache holds.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method, option, require_tokens
from rope_patch.methods.registry import build, get_method
from rope_patch.methods.temperature import Temperature
from rope_patch.utils.errors import Refused

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Region:
    """Keys that queries meet at relative positions of one form, a(i) - b(j).

    Attributes:
        start: First position of each query's keys, whole numbers, `[..., Q]`.
        stop: The position behind the last one; no key where it is not above `start`.
        query_shift: a(i) - i, float64, `[..., Q]`, or `[..., Q, N]` with one for each of N equal
            parts of the rotated pairs; None where it is 0.
        key_shift: b(j) - j, `[..., K]` or `[..., K, N]`; None where it is 0.
        key_rule: What `key_shift` depends on beside the key's position; equal rules turn a key the
            same way, so turned keys can be kept.
    """

    start: torch.Tensor
    stop: torch.Tensor
    query_shift: torch.Tensor | None = None
    key_shift: torch.Tensor | None = None
    key_rule: Hashable = None


@dataclass(frozen=True, kw_only=True)
class PositionMap(Method):
    """Base class of position maps.

    Subclasses define `map_regions`, `map_start` and `longest_text`.

    Attributes:
        on: The static method that stretches the frequencies below the map, with its factor, such
            as "yarn:4"; empty for the checkpoint's own frequencies.
    """

    is_dynamic: ClassVar[bool] = True  # it needs no factor
    default_temperature: ClassVar[str] = "log-n"

    on: str = option(
        "static method and factor for the frequencies below the map, such as yarn:4; the "
        "checkpoint's own unless given",
        default="",
    )
    temperature: float | str | None = option(
        "factor on the attention logits, by the query's position: log-n, none, a number, llama4 "
        "or drope:COEFFICIENT; unless given log-n for maps that see all tokens, and none where the "
        "frequencies bring an attention factor of their own",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner
        if self.factor != 1:
            raise Refused(
                f"{self.name} stretches no frequencies, so it has no factor of its own, got "
                f"{self.factor:g}: leave factor out, or write on='yarn:{self.factor:g}'"
            )
        if self.temperature is not None and self._has_inner_temperature() and self._is_tempered():
            raise Refused(
                f"on={self.on!r} brings an attention factor, which is a temperature already: "
                "expected temperature='none', or none given"
            )

    @property
    def inner(self) -> Method | None:
        """Return the method that stretches the frequencies, or None."""
        if not self.on:
            return None
        if not isinstance(self.on, str):
            raise TypeError(f"on must be a text such as 'yarn:4', got {self.on!r}")
        name, _, text = self.on.partition(":")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not factor >= 1:
            raise Refused(
                f"on must name a method and a factor of at least 1, such as 'yarn:4', got "
                f"{self.on!r}"
            )
        method_class = get_method(name)
        if method_class.is_dynamic:
            raise Refused(
                f"on={self.on!r}: {name} has no fixed factor; expected a method whose frequencies "
                "stay, such as yarn or abf"
            )
        for field in fields(method_class):
            if field.default is MISSING:
                raise Refused(
                    f"on={self.on!r}: {name} needs the option {field.name!r}, for which there is "
                    "no place here; expected a method with a factor alone, such as yarn:4"
                )
        method = build(name, factor=factor)
        if method.is_length_dependent(1) or method.start_token_count:
            raise Refused(
                f"on={self.on!r}: the frequencies of {name} depend on the sequence; expected a "
                "method whose frequencies stay, such as yarn or abf"
            )
        return method

    @property
    def query_temperature(self) -> Temperature | None:
        if self.temperature is None:
            default = "none" if self._has_inner_temperature() else self.default_temperature
            temperature = Temperature.parse(default)
            return temperature if temperature.changes_logits else None
        return super().query_temperature

    @property
    def has_config_form(self) -> bool:
        return False

    def frequencies(self, geometry: Geometry, seq_len: float | None = None) -> Frequencies:
        inner = self.inner
        if inner is None:
            return Frequencies(geometry.inv_freq())
        return inner.frequencies(geometry, seq_len)

    def rope_parameters(self, geometry: Geometry) -> dict[str, Any]:
        """Return the unextended rotation: no config can express a map."""
        return {"rope_type": "default", "rope_theta": geometry.theta}

    def attention_changes(self, length: float, trained_length: int) -> dict[str, Any]:
        changes = super().attention_changes(length, trained_length)
        reach = self.reach(trained_length)
        if length > self.map_start(reach):
            options = {k: v for k, v in self.options().items() if k not in ("temperature", "on")}
            changes["map"] = [self.name, options, reach]
        return changes

    def reach(self, trained_length: int) -> int:
        """Return how many positions the frequencies below the map reach, in tokens."""
        inner = self.inner
        return round(trained_length * (1.0 if inner is None else inner.factor))

    @abstractmethod
    def map_start(self, reach: int) -> int:
        """Return the first query position at which the map differs from the plain model."""

    @abstractmethod
    def longest_text(self, reach: int) -> float:
        """Return the longest text whose positions stay within reach; infinite if all do.

        Args:
            reach: Positions that the frequencies reach.

        Raises:
            ValueError: No text beyond the reach can be mapped with these options.
        """

    @abstractmethod
    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        """Return the regions of queries that are mapped; the first one is near and unshifted.

        Args:
            queries: Positions, whole numbers, `[..., Q]`.
            keys: Positions, `[..., K]`.
            reach: Positions that the frequencies reach.
            last_query: The largest query position, as a number.
        """

    @abstractmethod
    def describe_distances(self, reach: int) -> str:
        """Return in a few words at which distances mapped queries meet their keys."""

    def describe(self, trained_length: int) -> str:
        """Return a sentence about what the map does to queries, and which ones."""
        reach = self.reach(trained_length)
        first = self.map_start(reach)
        return f"queries from position {first:,} on: {self.describe_distances(reach)}"

    def regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        """Return the regions of all queries; see `map_regions`.

        Queries before `map_start` have all their keys in the first region.
        """
        import torch

        near, *far = self.map_regions(queries, keys, reach, last_query)
        plain = queries < self.map_start(reach)
        near = replace(
            near,
            start=torch.where(plain, 0, near.start),
            stop=torch.where(plain, queries + 1, near.stop),
        )
        return [near, *(replace(r, stop=torch.where(plain, r.start, r.stop)) for r in far)]

    def _is_tempered(self) -> bool:
        return super().query_temperature is not None

    def _has_inner_temperature(self) -> bool:
        inner = self.inner
        if inner is None:
            return False
        probe = Geometry(head_dim=64, theta=1e4, trained_length=4096)
        return inner.frequencies(probe).attention_factor != 1

    def __str__(self) -> str:
        return f"{self.name} on {self.on}" if self.on else self.name


def near_region(queries: torch.Tensor, window: int) -> Region:
    """Return the region of the last `window` keys of each query, at their own distances."""
    return Region(start=(queries - window + 1).clamp(min=0), stop=queries + 1)


def require_window(name: str, value: int, limit: int, reason: str = "") -> None:
    """Raise ValueError unless a count of tokens is at least 1 and below a limit.

    Args:
        name: The option.
        value: Its value, given or by default.
        limit: The first value that is too large.
        reason: What the limit is; the positions that the frequencies reach unless given.
    """
    require_tokens(name, value)
    if value >= limit:
        raise Refused(
            f"{name} must be below {limit:,}, "
            f"{reason or 'the positions that the frequencies reach'}, got {value:,}: give a "
            "smaller one, or stretch the frequencies, such as on='yarn:4'"
        )


@dataclass(frozen=True, kw_only=True)
class GroupedMap(PositionMap):
    """A map that floors far positions by a group size, which may grow with the query.

    Attributes:
        window: Keys that keep their own distance.
        group: Neighbours that share a position; None for the smallest that the length allows.
    """

    window_includes_end: ClassVar[int] = 0  # 1 if a key `window` tokens back is near, too

    window: int | None = option("tokens that keep their exact distance", default=None)
    group: int | None = option(
        "neighbouring far tokens that share a position; grows with the text unless given",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "group"):
            if getattr(self, name) is not None:
                require_tokens(name, getattr(self, name))

    def window_of(self, reach: int) -> int:
        """Return the window in tokens: a quarter of the reach unless given."""
        return max(1, reach // 4) if self.window is None else int(self.window)

    def group_at(self, query: int, reach: int) -> int:
        """Return the group size of the query at a position."""
        if self.group is not None:
            return int(self.group)
        return max(1, math.ceil((query + 1) / reach))

    def first_query_of(self, group: int, reach: int) -> int:
        """Return the first position whose query has that group size, if groups grow."""
        return (group - 1) * reach

    def shift(self, group: int, window: int) -> int:
        """Return what is added to the grouped distance."""
        return 0

    def map_start(self, reach: int) -> int:
        return reach

    def describe_distances(self, reach: int) -> str:
        near = self.window_of(reach) + self.window_includes_end
        size = "that grow with the text" if self.group is None else f"of {self.group:,}"
        return f"distances below {near:,} exact, farther tokens in groups {size}"

    def map_regions(
        self, queries: torch.Tensor, keys: torch.Tensor, reach: int, last_query: int
    ) -> list[Region]:
        import torch

        window = self.window_of(reach)
        near = near_region(queries, window + self.window_includes_end)
        first_group = self.group_at(self.map_start(reach), reach)
        regions = [near]
        for group in range(first_group, max(first_group, self.group_at(last_query, reach)) + 1):
            is_member = torch.ones_like(queries, dtype=torch.bool)
            if self.group is None:
                first, behind = (self.first_query_of(g, reach) for g in (group, group + 1))
                is_member = (queries < behind) & ((queries >= first) | (group == first_group))
            floor = torch.div(queries, group, rounding_mode="floor")
            regions.append(
                Region(
                    start=torch.zeros_like(queries),
                    stop=torch.where(is_member, near.start, 0),
                    query_shift=(floor + self.shift(group, window) - queries).double(),
                    key_shift=(torch.div(keys, group, rounding_mode="floor") - keys).double(),
                    key_rule=("floor", group),
                )
            )
        return regions


def longest_grouped_text(reach: int, window: int, group: int) -> int:
    """Return the tokens whose positions floor(i/G) + w - floor(w/G) stay below the reach."""
    return (reach - window + window // group) * group
