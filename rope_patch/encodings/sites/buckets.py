"""T5's buckets of distances, which a patch has longer distances share."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.biases import exact_distances, squeeze_tail, t5_bucket
from rope_patch.encodings.sites.site import Site, SiteFacts, Stretch
from rope_patch.patching.undo_log import UndoLog
from rope_patch.utils.errors import Refused

_MASKS = ("mask", "attention_mask")  # what attentions call the mask that they are given
FUNCTION = "_relative_position_bucket"
# A field of T5's configs, and an attribute of its attentions.
_MAX_DISTANCE = "relative_attention_max_distance"


@dataclass(frozen=True, eq=False)
class BucketsSite(Site):
    """An attention that owns a table of biases by bucket (T5 and its kin).

    Attributes:
        max_distance: Where its last bucket begins, before any patch.
    """

    max_distance: int = field(init=False)

    kind: ClassVar[str] = "t5"
    reads_slots: ClassVar[bool] = True
    methods: ClassVar[tuple[str, ...]] = (
        "log-tail",
        "max-distance",
        "linear",
        "dynamic-log-tail",
        "dynamic-linear",
    )

    function: ClassVar[str] = FUNCTION  # name of the module's function that a patch wraps
    limit: ClassVar[str] = _MAX_DISTANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_distance", self.settings["max_distance"])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of `t5_bucket` that the module has now."""
        owner: Any = self.module
        return {
            "bidirectional": not getattr(owner, "is_decoder", False),
            "buckets": owner.relative_attention_num_buckets,
            "max_distance": getattr(owner, self.limit),
        }

    @property
    def exact(self) -> int:
        """Return how many distances have a bucket of their own."""
        settings = self.settings
        return exact_distances(settings["buckets"], bidirectional=settings["bidirectional"])

    @property
    def least_length(self) -> int:
        """Return the shortest trained length whose farthest distance shares its bucket."""
        return self.exact + 1

    def trained_length(self, config: Any) -> int | None:
        """Return T5's `n_positions`, which checkpoints state and no code reads."""
        length = getattr(config, "n_positions", None)
        return length if isinstance(length, int) else None

    def facts(self, model: nn.Module, stretch: Stretch | None = None) -> SiteFacts:
        """Return the site's facts, with a number where a patch changed it in the whole model."""
        facts = super().facts(model, stretch)
        if stretch is None or stretch.formula != "max-distance":
            return facts
        # One field is for encoder and decoder. UDOP's encoder has modules of biases that do not
        # read it, and an attention that keeps the old number.
        numbers = {getattr(m, _MAX_DISTANCE) for m in model.modules() if _owns_buckets(m)}
        if len(numbers) != 1:
            return facts
        return replace(facts, number=(_MAX_DISTANCE, self.max_distance, numbers.pop()))

    def changes(self, stretch: Stretch) -> bool:
        """Return whether any distance up to the target falls into another bucket."""
        if stretch.is_dynamic:
            return True
        assert stretch.length is not None
        distances, settings = torch.arange(stretch.length), self.settings
        before = t5_bucket(-distances, **settings)
        if stretch.formula == "max-distance":
            settings["max_distance"] = round(settings["max_distance"] * stretch.factor)
            return not torch.equal(before, t5_bucket(-distances, **settings))
        return not torch.equal(before, t5_bucket(-self.squeeze(distances, stretch), **settings))

    def squeeze(
        self, distances: torch.Tensor, stretch: Stretch, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the distances whose buckets are read, whole numbers from 0 on.

        Args:
            distances: Whole numbers from 0 on, of any shape.
            stretch: How far the site is extended.
            tokens: Tokens of the longest row, for dynamic methods; None if all slots hold tokens.
        """
        return squeeze_distances(distances, stretch, self.exact, tokens)

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
            largest = round(self.settings["max_distance"] * stretch.factor)
            undo_log.set(self.module, self.limit, largest)
            return
        own, counter = getattr(self.module, self.function), None
        if stretch.is_dynamic and self.is_given_mask:
            counter = TokenCounter(self.name)
            undo_log.hook(self.module, before=counter)
        undo_log.set(self.module, self.function, self.replacement(stretch, own, counter))

    @property
    def is_given_mask(self) -> bool:
        """Return whether the module's calls say which slots hold tokens."""
        return True

    def replacement(self, stretch: Stretch, own: Any, counter: TokenCounter | None) -> Any:
        """Return what replaces the module's own function."""
        return SqueezedBuckets(self, stretch, own, counter)


def _owns_buckets(module: nn.Module) -> bool:
    """Return whether a module has a table of biases by bucket; attentions without one read none."""
    return hasattr(module, _MAX_DISTANCE) and any(
        isinstance(child, nn.Embedding) for child in module.children()
    )


@dataclass(frozen=True, eq=False)
class InputBucketsSite(BucketsSite):
    """A module of biases that prepares distances in a function of its own (UDOP's encoder)."""

    function: ClassVar[str] = "prepare_input"
    limit: ClassVar[str] = "max_distance"

    @property
    def is_given_mask(self) -> bool:
        """Return whether distances count tokens, and are not measured on a page."""
        return self.module.scaling_factor == 1  # type: ignore[return-value]

    def replacement(self, stretch: Stretch, own: Any, counter: TokenCounter | None) -> Any:
        """Return what replaces the module's own function."""
        return SqueezedDistances(self, stretch, own, counter)


@dataclass(frozen=True, eq=False)
class BlockBucketsSite(BucketsSite):
    """An attention that sees near tokens in a window and far ones as blocks (LongT5).

    The window's distances do not grow with the text. Those between a token's block and the
    summaries of others do, in blocks.
    """

    methods: ClassVar[tuple[str, ...]] = tuple(
        name for name in BucketsSite.methods if name != "max-distance"
    )

    @property
    def _block(self) -> int:
        return int(self.module.global_block_size)  # type: ignore[arg-type]

    @property
    def exact(self) -> int:
        """Return how many tokens have distances with a bucket of their own."""
        return super().exact * self._block

    @property
    def least_length(self) -> int:
        """Return the shortest trained length whose farthest block shares its bucket."""
        return self.exact + self._block

    def in_blocks(self, stretch: Stretch) -> Stretch:
        """Return a stretch with lengths in blocks."""
        trained = max(stretch.trained_length // self._block, 1)
        length = stretch.length
        return replace(
            stretch,
            trained_length=trained,
            length=None if length is None else max(length // self._block, trained),
        )

    def squeeze(
        self, distances: torch.Tensor, stretch: Stretch, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the distances whose buckets are read; those within the window stay.

        Args:
            distances: Whole numbers from 0 on: `[Q, K]` in tokens, or `[B, Q, G]` in blocks.
            stretch: How far the site is extended.
            tokens: Tokens of the longest row; None if all slots hold tokens.
        """
        if distances.ndim == 2:
            return distances
        blocks = self.in_blocks(stretch)
        if not blocks.is_dynamic and blocks.length == blocks.trained_length:
            return distances
        count = None if tokens is None else tokens // self._block
        return squeeze_distances(distances, blocks, self.exact // self._block, count)

    def describe(self, stretch: Stretch) -> str:
        """Return which distances share buckets."""
        return (
            f"{self.name}: T5's buckets of blocks of {self._block} tokens, from {self.exact:,} "
            "tokens on; distances within its window stay"
        )

    def changes(self, stretch: Stretch) -> bool:
        """Return whether any distance up to the target falls into another bucket."""
        if stretch.is_dynamic:
            return True
        distances = torch.arange(stretch.length or 1)[None, None]
        return not torch.equal(self.squeeze(distances, stretch), distances)


def squeeze_distances(
    distances: torch.Tensor, stretch: Stretch, exact: int, count: torch.Tensor | None = None
) -> torch.Tensor:
    """Return distances brought into the trained length.

    Args:
        distances: Whole numbers from 0 on, of any shape.
        stretch: The method, and its lengths in the same unit.
        exact: Distances that have a bucket of their own.
        count: What a dynamic method follows, in the same unit; None for the longest distance.
    """
    trained = stretch.trained_length
    length: int | torch.Tensor
    if stretch.is_dynamic:
        # Stays a tensor: to read it would wait for the device. At `trained` all distances stay.
        length = (distances.max() + 1 if count is None else count).clamp(min=trained)
    else:
        assert stretch.length is not None
        length = stretch.length
        if length <= trained:
            return distances
    if stretch.formula == "linear":
        return distances * trained // length
    return squeeze_tail(distances, trained=trained, length=length, exact=exact)


class TokenCounter:
    """Pre-hook of a module: counts the tokens of the longest row in the mask that it is given.

    Attributes:
        name: The module's name, for the error.
        counts: By thread, because threads may share a model; None where nothing is masked.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: dict[int, torch.Tensor | None] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        masks = [given[name] for name in _MASKS if name in given]
        self.counts[_thread()] = self._count(masks[0]) if masks else None

    def read(self) -> torch.Tensor | None:
        """Return the count of the present call; None where nothing is masked."""
        return self.counts.get(_thread())

    def _count(self, mask: Any) -> torch.Tensor | None:
        """Return how many tokens the longest row has so far, a tensor of one number."""
        # A mask is [B, S], or [B, 1, Q or 1, K] in which the last query sees all tokens so far.
        if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 5):
            return None  # without padding, or of a window, whose distances stay
        if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
            raise Refused(
                f"{self.name} is given a mask of another form ({type(mask).__name__}), so a method "
                "that follows the text cannot count its tokens: use eager or sdpa attention, or a "
                "method with a fixed factor"
            )
        row = mask if mask.ndim == 2 else mask[:, 0, -1]
        is_bias = mask.ndim == 4 and mask.is_floating_point()
        visible = row > torch.finfo(row.dtype).min if is_bias else row > 0
        return visible.sum(-1).max()

    def __deepcopy__(self, memo: Any) -> TokenCounter:
        return TokenCounter(self.name)

    def __reduce__(self) -> Any:
        return TokenCounter, (self.name,)


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


@dataclass(frozen=True, eq=False)
class SqueezedDistances:
    """A module's function of distances, whose result is squeezed.

    Attributes:
        site: The module's site.
        stretch: How far it is extended.
        own: The module's own function.
        counter: What counts the tokens of a call; None if the call or the target says it.
    """

    site: BucketsSite
    stretch: Stretch
    own: Any
    counter: TokenCounter | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the relative position of each query and key."""
        relative = self.own(*args, **kwargs)
        tokens = None if self.counter is None else self.counter.read()
        return relative.sign() * self.site.squeeze(relative.abs(), self.stretch, tokens)


@dataclass(frozen=True, eq=False)
class SqueezedBuckets(SqueezedDistances):
    """A module's bucket function, called with squeezed distances."""

    def __call__(
        self,
        relative_position: torch.Tensor,
        *args: Any,
        tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the bucket of each relative position."""
        if tokens is None and self.counter is not None:
            tokens = self.counter.read()
        if not self.site.settings["bidirectional"]:
            # Keys ahead share bucket 0, and a static cache has slots there that no token has.
            relative_position = relative_position.clamp(max=0)
        distances = self.site.squeeze(relative_position.abs(), self.stretch, tokens)
        return self.own(relative_position.sign() * distances, *args, **kwargs)
