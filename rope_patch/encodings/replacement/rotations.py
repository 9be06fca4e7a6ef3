"""Encodings that rotate: RoPE, partial RoPE, p-RoPE, RoPE in some layers only, and xPos."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.encodings.biases import xpos_factors
from rope_patch.encodings.replacement.encoding import (
    DecoderShape,
    RotaryEncoding,
    Span,
    register_encoding,
    require_count,
    require_positive,
    require_share,
)
from rope_patch.encodings.replacement.hooks import Slots
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import RotaryTraits
from rope_patch.patching.attention_interception import intercept
from rope_patch.patching.undo_log import ConfigOverride, UndoLog
from rope_patch.rope_config import by_layer_type
from rope_patch.transformers_api.forwards import hidden_states
from rope_patch.utils.errors import Refused


@register_encoding("rope")
class Rope(RotaryEncoding):
    """Rotation of queries and keys by their position (RoFormer, arXiv:2104.09864).

    Attributes:
        base: Theta; the config's unless given.
        partial: Share of the pairs that rotate, with frequencies from 1 to 1 / base (GPT-NeoX).
        p: Share of the pairs that rotate: the fastest, at the frequencies that they have in a full
            RoPE (p-RoPE, arXiv:2410.06205).
    """

    is_in_config: ClassVar[bool] = True

    def __init__(
        self,
        shape: DecoderShape,
        *,
        base: float | None = None,
        partial: float | None = None,
        p: float | None = None,
    ) -> None:
        super().__init__()
        if partial is not None and p is not None:
            raise Refused(f"expected one of partial and p, got partial={partial} and p={p}")
        if base is not None:
            require_positive("base", base)
        for name, share in (("partial", partial), ("p", p)):
            if share is not None:
                require_share(name, share)
        self.base, self.partial, self.p = base, partial, p

    def install(
        self, model: nn.Module, decoder: nn.Module, undo_log: UndoLog, config: ConfigOverride
    ) -> None:
        """Put a rotary module of other frequencies in, and say so in the config."""
        if (self.base, self.partial, self.p) == (None, None, None):
            return
        owner: Any = decoder
        own = by_layer_type(owner.config.rope_parameters)
        if None not in own or not hasattr(decoder, "rotary_emb"):
            raise Refused(
                f"{type(owner.config).__name__} has several rotations or keeps its own elsewhere: "
                "set them in its config, and use the encoding 'rope' without options"
            )
        theta = own[None]["rope_theta"] if self.base is None else float(self.base)
        share = self.p or self.partial or 1.0
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if share < 1:
            # Pair k of a partial rotation turns by base ** (-2k / (share D)).
            theta = theta if self.partial is None else theta ** (1 / share)
            parameters = {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": float(share),
            }
        config.apply(model, type(owner.config), {"rope_parameters": parameters})
        rotary = owner.rotary_emb
        try:
            other = type(rotary)(owner.config)
        except KeyError as error:
            raise Refused(
                "this release of transformers has no proportional rotation, which partial and p "
                "need: expected 5.5 or later"
            ) from error
        undo_log.set(decoder, "rotary_emb", other.to(rotary.inv_freq.device))

    def describe(self) -> str:
        text = "queries and keys rotate by their position"
        if self.base is not None:
            text += f", base {self.base:g}"
        if self.partial is not None:
            text += f", {self.partial:g} of each head"
        return text if self.p is None else f"{text}, the fastest {self.p:g} of the pairs"


@register_encoding("rnope")
class AlternateRope(RotaryEncoding):
    """RoPE in some layers and no positions in the others (RNoPE, arXiv:2501.18795).

    Attributes:
        every: Of so many layers the last has no positions.
    """

    def __init__(self, shape: DecoderShape, *, every: int = 2) -> None:
        super().__init__()
        require_count("every", every, least=2)
        self.every = every

    def rotates(self, layer: int) -> bool:
        return (layer + 1) % self.every > 0

    def describe(self) -> str:
        which = "second" if self.every == 2 else f"{self.every}th"
        return f"queries and keys rotate by their position, except in every {which} layer"


@register_encoding("xpos")
class Xpos(RotaryEncoding):
    """RoPE whose pairs also fade with distance (xPos, arXiv:2212.10554).

    Pair k of a logit is multiplied by zeta_k ** (distance / scale), with zeta_k from
    gamma / (1 + gamma) at the fastest pair to almost 1 at the slowest.

    Attributes:
        gamma: See above.
        scale: Tokens.
    """

    reads_slots: ClassVar[bool] = True

    def __init__(self, shape: DecoderShape, *, gamma: float = 0.4, scale: float = 512.0) -> None:
        super().__init__()
        require_positive("gamma", gamma)
        require_positive("scale", scale)
        self.gamma, self.scale = float(gamma), float(scale)

    def install(
        self, model: nn.Module, decoder: nn.Module, undo_log: UndoLog, config: ConfigOverride
    ) -> None:
        """Have every attention scale its rotated queries and keys."""
        owner: Any = decoder
        rotary, *others = find_rotaries(model)
        interleaved = RotaryTraits.of(model, rotary, owner.config).is_interleaved
        if others:
            raise Refused(f"{type(model).__name__} has several rotations: xpos needs one")
        for layer in owner.layers:
            attention = layer.self_attn
            scaling = FadingPairs(self.gamma, self.scale, interleaved)
            undo_log.hook(attention, before=scaling.note_span)
            intercept(attention, scaling, undo_log)

    def describe(self) -> str:
        return (
            "queries and keys rotate by their position; the fastest pair of a logit fades to "
            f"{self.gamma / (1 + self.gamma):.3g} within {self.scale:g} tokens"
        )


class FadingPairs:
    """Scales the queries and keys of one attention, after rotation; cached keys stay unscaled.

    Only distances count, so factors are taken around the middle query: none overflows early.

    Attributes:
        gamma: See `Xpos`.
        scale: See `Xpos`.
        interleaved: Whether pairs are neighbours, rather than half a head apart.
    """

    breaks_graphs = False

    def __init__(self, gamma: float, scale: float, interleaved: bool) -> None:
        self.gamma, self.scale, self.interleaved = gamma, scale, interleaved
        self._local = threading.local()

    def note_span(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the slots of a call, before its cache grows (pre-hook of the attention)."""
        hidden = hidden_states(attention, args, kwargs)
        self._local.span = Slots.of(attention, hidden, kwargs).span(hidden.device, None)

    def attend(
        self,
        function: Any,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call an attention function with scaled queries and keys."""
        span: Span = self._local.span
        if key.shape[2] != len(span.keys):
            raise Refused(
                f"{type(module).__name__} compares with {key.shape[2]} keys, and the cache was "
                f"expected to hold {len(span.keys)}: xpos needs the place of every key"
            )
        last = span.queries[-1]
        middle = (span.queries[0] + last) // 2
        # Keys ahead of all queries are masked, and might overflow.
        keys = torch.minimum(span.keys, last)
        query = self._scaled(query, middle - span.queries, -1.0)
        key = self._scaled(key, middle - keys, 1.0)
        return function(module, query, key, *args, **kwargs)

    def _scaled(self, states: torch.Tensor, behind: torch.Tensor, sign: float) -> torch.Tensor:
        """Return `[B, H, N, D]` with each pair scaled by how far a slot lies behind the middle."""
        factors = xpos_factors(sign * behind, states.shape[-1], self.gamma, self.scale)
        pairs = factors.repeat_interleave(2, dim=1) if self.interleaved else factors.repeat(1, 2)
        wide = torch.promote_types(states.dtype, torch.float32)
        return (states.to(wide) * pairs.to(states.device, wide)).to(states.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()
