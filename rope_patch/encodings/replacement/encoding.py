"""Define what an encoding in the place of a model's own is, and build it from name and options.

Each encoding derives from one of three kinds (`AbsoluteEncoding`, `BiasEncoding`, `RotaryEncoding`)
and registers itself. `encoded_extension` says how `rope_patch.patch` may extend one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from rope_patch.encodings.sites.site import Site
from rope_patch.extension import Extension
from rope_patch.methods.registry import find_method
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.undo_log import ConfigOverride, UndoLog
from rope_patch.utils.errors import Refused


@dataclass(frozen=True)
class DecoderShape:
    """What an encoding needs to know about its decoder.

    Attributes:
        width: Components of hidden states (D).
        heads: Query heads of each attention (H).
        length: Tokens that the config states as the longest text.
        spread: Standard deviation of the config's initial weights.
    """

    width: int
    heads: int
    length: int
    spread: float


@dataclass(frozen=True, eq=False)
class Span:
    """The queries and keys of one attention call.

    Attributes:
        queries: Each query's slot in the cache, `[Q]`.
        keys: Each key's slot, `[K]`.
        positions: Positions of the queries, `[B, Q]` or `[1, Q]`, which padding shifts against
            slots; None if the attention is not told.
        mask: `[B, 1, Q, K]`, truths or numbers to add, or flex attention's blocks; None if every
            key up to a query is seen.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor | None = None
    mask: Any = None

    @property
    def distances(self) -> torch.Tensor:
        """Return how far each key lies behind each query, `[Q, K]`; 0 for masked ones ahead."""
        return (self.queries[:, None] - self.keys).clamp(min=0)

    @property
    def tokens(self) -> torch.Tensor:
        """Return how many tokens the longest row has so far, a tensor of one number."""
        if self.mask is None:
            return self.queries[-1] + 1
        if isinstance(self.mask, torch.Tensor):
            row = self.mask[:, 0, -1]
            visible = row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min
        else:
            visible = self._last_row_of_blocks()
        return visible.sum(-1).max()

    def _last_row_of_blocks(self) -> torch.Tensor:
        """Return which keys the last query of each row sees under flex attention, `[B, K]`."""
        from torch.nn.attention.flex_attention import create_mask

        last = len(self.queries) - 1

        def of_last(row: Any, head: Any, step: Any, slot: Any) -> Any:
            return self.mask.mask_mod(row, head, step + last, slot)

        device = str(self.queries.device)
        return create_mask(of_last, self.mask.shape[0], None, 1, len(self.keys), device)[:, 0, 0]


class Encoding(nn.Module, ABC):
    """A positional encoding, as a submodule of the decoder that it serves.

    Options are the keyword arguments of a subclass's `__init__`, whose one positional argument is
    the `DecoderShape`. Trained parts are parameters, so the model's `parameters()` and
    `state_dict()` have them.
    """

    name: ClassVar[str]  # set by `register_encoding`
    reads_slots: ClassVar[bool] = False  # whether distances are counted in slots of the cache
    is_in_config: ClassVar[bool] = False  # whether the config says all of it to transformers
    handle: Any = None  # the `EncodedModel`, once the encoding is in a model

    def rotates(self, layer: int) -> bool:
        """Return whether a layer rotates its queries and keys."""
        return False

    def install(
        self, model: nn.Module, decoder: nn.Module, undo_log: UndoLog, config: ConfigOverride
    ) -> None:
        """Change what hooks cannot; nothing unless overridden.

        Args:
            model: The whole model.
            decoder: The module that holds the layers.
            undo_log: Log of the changes.
            config: For changes of the config.

        Raises:
            ValueError: The model does not allow it.
        """

    def sites(self, name: str) -> Sequence[Site]:
        """Return where `rope_patch.patch` extends the encoding; nowhere unless overridden.

        Args:
            name: The module's name in the model.
        """
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Return what positions do, in one line for the summary."""


class AbsoluteEncoding(Encoding):
    """An encoding that adds a vector to each embedding."""

    @abstractmethod
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what is added at positions `[B, S]`, `[B, S, D]`."""

    def require_known(self, positions: torch.Tensor, slots: int | None) -> None:
        """Raise if the encoding has no vector for a position; nothing unless overridden.

        Args:
            positions: `[B, S]`.
            slots: Slots of the cache up to the last query's, which counted positions lie within;
                None if a device would have to be waited for to know them.

        Raises:
            ValueError: A position has no vector.
        """


class BiasEncoding(Encoding):
    """An encoding that adds a number to each attention logit."""

    reads_slots: ClassVar[bool] = True

    @abstractmethod
    def forward(self, span: Span) -> torch.Tensor:
        """Return the bias, `[1, H, Q, K]` or `[B, H, Q, K]`, in float32 or wider."""


class RotaryEncoding(Encoding):
    """An encoding that rotates queries and keys, in some layers or all."""

    def rotates(self, layer: int) -> bool:
        """Return whether a layer rotates its queries and keys."""
        return True


def find_encoding(model: nn.Module) -> Encoding | None:
    """Return the encoding that `rope_patch.encode` gave a model, or None."""
    return next((m for m in model.modules() if isinstance(m, Encoding)), None)


def require_share(name: str, value: Any) -> None:
    """Raise unless an option is a number above 0 and at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise Refused(f"{name} must be a share, above 0 and at most 1, got {value!r}")


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless an option is a whole number that is large enough."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Refused(f"{name} must be a whole number from {least} on, got {value!r}")


def require_positive(name: str, value: Any) -> None:
    """Raise unless an option is a number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise Refused(f"{name} must be a number above 0, got {value!r}")


_NOPE = "nope"


def encoded_extension(model: nn.Module, extension: Extension) -> Extension:
    """Return a request as an encoded model can take it; unchanged for all others.

    transformers' own code rotates where a hook replaces cos and sin, or where queries and keys are
    scaled after it.

    Raises:
        ValueError: The request does not suit the encoding.
    """
    encoding = find_encoding(model)
    if encoding is None:
        return extension
    if encoding.name == "none":
        if extension.method != _NOPE or "temperature" not in extension.options:
            raise Refused(
                "a model without positions has nothing to stretch, but its attention can be "
                f"sharpened: expected the method {_NOPE!r} with a temperature, such as "
                "rope_patch.patch(model, 'nope', temperature='log-n') or temperature=1.2, got "
                f"{extension.method!r}"
            )
    elif encoding.name == "rnope":
        method = find_method(extension.method)
        if method is not None and method.is_dynamic:
            raise Refused(
                f"{extension.method!r} re-rotates cached keys, and some layers of the encoding "
                f"{encoding.name!r} do not rotate: expected a method whose frequencies stay, such "
                "as yarn"
            )
    elif encoding.name != "xpos":
        return extension
    if extension.kernels not in ("auto", "hf"):
        raise Refused(
            f"kernels={extension.kernels!r} would rotate for the encoding {encoding.name!r}, which "
            "needs transformers' own code: leave kernels out"
        )
    return replace(extension, kernels="hf")


def rotation_refusal(model: nn.Module) -> Refused | None:
    """Return why no rotation of a model can be extended; None if one can."""
    encoding = find_encoding(model)
    if encoding is None:
        try:
            find_rotaries(model)
        except Refused as refusal:
            return refusal
        return None
    if encoding.name == "none" or isinstance(encoding, RotaryEncoding):
        return None
    return Refused(
        f"the encoding {encoding.name!r} cannot be extended: expected one of alibi, t5, learned, "
        "sinusoidal, integer, normalised, rope, rnope, xpos and none"
    )


_E = TypeVar("_E", bound=Encoding)
ENCODINGS: dict[str, type[Encoding]] = {}


def register_encoding(name: str) -> Callable[[type[_E]], type[_E]]:
    """Return a decorator that makes an encoding known by a name.

    Raises:
        ValueError: Another class has the name.
    """

    def decorate(cls: type[_E]) -> type[_E]:
        other = ENCODINGS.get(name)
        if other is not None and other.__qualname__ != cls.__qualname__:
            raise Refused(
                f"register_encoding: {name!r} is taken by {other.__qualname__}; give "
                f"{cls.__qualname__} another name"
            )
        cls.name = name
        ENCODINGS[name] = cls
        return cls

    return decorate
