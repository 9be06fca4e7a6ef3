"""T5's buckets of distances, which a patch has longer distances share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.t5_buckets import squeeze_tail, t5_bucket
from rope_patch.patching.encodings.site import Site, Stretch
from rope_patch.patching.undo_log import UndoLog

FUNCTION = "_relative_position_bucket"


@dataclass(frozen=True, eq=False)
class BucketsSite(Site):
    """An attention that owns a table of biases by bucket (T5 and its kin).

    Attributes:
        max_distance: Where its last bucket begins, before any patch.
    """

    max_distance: int = field(init=False)

    kind: ClassVar[str] = "t5"
    methods: ClassVar[tuple[str, ...]] = (
        "log-tail",
        "max-distance",
        "linear",
        "dynamic-log-tail",
        "dynamic-linear",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_distance", self._settings["max_distance"])

    @property
    def _settings(self) -> dict[str, Any]:
        owner: Any = self.module
        return {
            "bidirectional": not owner.is_decoder,
            "buckets": owner.relative_attention_num_buckets,
            "max_distance": owner.relative_attention_max_distance,
        }

    @property
    def exact(self) -> int:
        """Return how many distances have a bucket of their own."""
        settings = self._settings
        return settings["buckets"] // (4 if settings["bidirectional"] else 2)

    def trained_length(self, config: Any) -> int | None:
        """Return T5's `n_positions`, which checkpoints state and no code reads."""
        length = getattr(config, "n_positions", None)
        return length if isinstance(length, int) else None

    def changes(self, stretch: Stretch) -> bool:
        """Return whether any distance up to the target falls into another bucket."""
        if stretch.is_dynamic:
            return True
        assert stretch.length is not None
        distances, settings = torch.arange(stretch.length), self._settings
        before = t5_bucket(-distances, **settings)
        if stretch.formula == "max-distance":
            settings["max_distance"] = round(settings["max_distance"] * stretch.factor)
            return not torch.equal(before, t5_bucket(-distances, **settings))
        return not torch.equal(before, t5_bucket(-self.squeeze(distances, stretch), **settings))

    def squeeze(self, distances: torch.Tensor, stretch: Stretch) -> torch.Tensor:
        """Return the distances whose buckets are read, whole numbers from 0 on.

        Args:
            distances: Whole numbers from 0 on, of any shape.
            stretch: How far the site is extended.
        """
        length = stretch.length
        if stretch.is_dynamic:
            length = int(distances.max()) + 1
        assert length is not None
        trained = stretch.trained_length
        if length <= trained:
            return distances
        if stretch.formula == "linear":
            return distances * trained // length
        return squeeze_tail(distances, trained=trained, length=length, exact=self.exact)

    def describe(self, stretch: Stretch) -> str:
        """Return which distances share buckets."""
        if stretch.formula == "max-distance":
            largest = round(self.max_distance * stretch.factor)
            return f"{self.name}: the last bucket begins at {largest:,} tokens"
        if stretch.formula == "linear":
            return f"{self.name}: T5's buckets are read at distances divided by the factor"
        return (
            f"{self.name}: T5's buckets are exact below {self.exact} tokens; longer distances are "
            "squeezed into trained ones"
        )

    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Put a function before the module's own, or raise the distance of its last bucket."""
        if stretch.formula == "max-distance":
            name = "relative_attention_max_distance"
            largest = round(self._settings["max_distance"] * stretch.factor)
            undo_log.set(self.module, name, largest)
            return
        own = getattr(self.module, FUNCTION)
        undo_log.set(self.module, FUNCTION, SqueezedBuckets(self, stretch, own))


@dataclass(frozen=True, eq=False)
class SqueezedBuckets:
    """A module's bucket function, called with squeezed distances.

    Attributes:
        site: The module's site.
        stretch: How far it is extended.
        own: The module's own function.
    """

    site: BucketsSite
    stretch: Stretch
    own: Any

    def __call__(self, relative_position: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the bucket of each relative position."""
        distances = self.site.squeeze(relative_position.abs(), self.stretch)
        return self.own(relative_position.sign() * distances, *args, **kwargs)
