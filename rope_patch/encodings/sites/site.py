"""Sites: the places in a model where positions enter, and which methods extend each.

`Site` is the base of tables, slopes and buckets, `Stretch` says how far one is extended, and
`SiteFacts` is what it tells other packages. The rest is what they are built from: what a probe
found, masks as positions, and marks of caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from rope_patch.patching.undo_log import UndoLog
from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import ForwardCall
from rope_patch.utils.errors import Refused


@dataclass(frozen=True)
class Stretch:
    """How far a site is extended.

    Attributes:
        method: The method's name.
        trained_length: Tokens of pretraining.
        length: Target length in tokens; None where the method follows the text.
        exact: Whether ALiBi's biases are built from distances; None where it helps.
    """

    method: str
    trained_length: int
    length: int | None
    exact: bool | None = None

    @property
    def factor(self) -> float:
        """Return target length / trained length; 1 without a target."""
        return 1.0 if self.length is None else self.length / self.trained_length

    @property
    def is_dynamic(self) -> bool:
        """Return whether the factor follows the text."""
        return self.method.startswith("dynamic-")

    @property
    def formula(self) -> str:
        """Return the method's name without `dynamic-`."""
        return self.method.removeprefix("dynamic-")

    def factor_at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the factor of a dynamic method for a text, at least 1, a tensor of one number.

        Args:
            tokens: The text's length, a tensor of one number, so that no device is waited for.
        """
        return (tokens.double() / self.trained_length).clamp(min=1)


@dataclass(frozen=True)
class SiteFacts:
    """What a site tells code that describes, stores, exports or measures its model.

    Attributes:
        name: Its module.
        part: "encoder" or "decoder".
        kind: "learned", "counted", "sinusoidal", "alibi" or "t5".
        trained_length: Tokens of pretraining; None if neither a table nor the config says them.
        methods: What extends it.
        table: The module's matrix of positions, which a stretch lengthens; None if it has none.
        fields: The config's fields that say how many rows the table has.
        number: The config's field that states a patch of the site, where one does; and its values
            before the patch and now. The live config keeps the first.
    """

    name: str
    part: str
    kind: str
    trained_length: int | None
    methods: tuple[str, ...]
    # Diagnoses show the first five alone.
    table: str | None = field(default=None, repr=False)
    fields: tuple[str, ...] = field(default=(), repr=False)
    number: tuple[str, int, int] | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Site(ABC):
    """A place in a model where positions enter.

    Attributes:
        name: Its module's name in the model.
        module: Its module.
    """

    kind: ClassVar[str]  # name of the encoding in summaries and messages
    methods: ClassVar[tuple[str, ...]]
    reads_slots: ClassVar[bool] = False  # whether distances are counted in slots of the cache

    name: str
    module: nn.Module

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that its methods have."""
        return ()

    @property
    def part(self) -> str:
        """Return "encoder" or "decoder"."""
        parts = self.name.split(".")
        return "encoder" if any(f"_{part}".endswith("_encoder") for part in parts) else "decoder"

    @abstractmethod
    def trained_length(self, config: Any) -> int | None:
        """Return the tokens of pretraining that the config states; None if it does not."""

    def longest_text(self, config: Any) -> int | None:
        """Return the tokens that the site tells apart as it is now; None if any number."""
        return None

    def facts(self, model: nn.Module, stretch: Stretch | None = None) -> SiteFacts:
        """Return the site's facts in its model as it is now, under a patch's stretch if any."""
        length = self.trained_length(model.config)
        return SiteFacts(self.name, self.part, self.kind, length, self.methods)

    def changes(self, stretch: Stretch) -> bool:
        """Return whether a stretch would change anything."""
        return stretch.is_dynamic or stretch.factor > 1

    def config_fields(self, config: Any, stretch: Stretch) -> dict[str, int]:
        """Return the fields of the config that the stretch sets, with their new values."""
        return {}

    @abstractmethod
    def describe(self, stretch: Stretch) -> str:
        """Return what the stretch does, in one line for the summary."""

    @abstractmethod
    def apply(self, model: nn.Module, stretch: Stretch, undo_log: UndoLog) -> None:
        """Change the model."""


@dataclass(frozen=True)
class DetectedTable:
    """A table of positions: a matrix of a module whose output was consecutive rows of it.

    Attributes:
        module: The module's name in the model.
        attribute: The matrix in it, a parameter or a buffer.
        first_row: The row of position 0.
        fields: The config's fields that decide how many rows there are.
        companions: Buffers that grow with the same fields, with `*` for the numbers of layers.
        initial: The matrix of the untrained copy.
    """

    module: str
    attribute: str
    first_row: int
    fields: tuple[str, ...]
    companions: tuple[str, ...]
    initial: torch.Tensor


@dataclass(frozen=True)
class DetectedBias:
    """A bias that is linear in the key's position, among the arguments of a module.

    Attributes:
        module: The module's name in the model; it is in the first layer.
        argument: The bias's name among its arguments.
        from_end: Whether the bias is 0 for the last key, not for the first.
    """

    module: str
    argument: str
    from_end: bool


@dataclass(frozen=True)
class DetectedBuckets:
    """Buckets of distances: a module that read a small table by a matrix of distances.

    Attributes:
        module: The module's name in the model.
        shape: Queries and keys.
    """

    module: str
    shape: torch.Size


@dataclass
class DetectedPositions:
    """What a probe found of how a model uses positions.

    Attributes:
        tables: Matrices of which consecutive rows were read.
        slopes: Biases that are linear in the key's position.
        buckets: Small tables that were read by a matrix of distances.
        unread: Tables that follow the length of those that were read, but showed no rows.
    """

    tables: list[DetectedTable] = field(default_factory=list)
    slopes: list[DetectedBias] = field(default_factory=list)
    buckets: list[DetectedBuckets] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


# Why an encoding cannot be extended, by an attribute that only its modules have.
_REASONS = {
    "rel_embeddings": (
        "its queries and keys meet learned vectors of distances (disentangled attention), each of "
        "which serves one distance or bucket"
    ),
    "distance_embedding": "its queries meet a learned vector for each distance",
    "r_r_bias": (
        "its attention computes sinusoids of distances for a text of any length, so it has no end "
        "to move"
    ),
    "pe_k": "its encoder's queries meet a learned vector for each distance",
    "gru_rel_pos_linear": "its biases by distance are gated by what each query holds",
    "relative_pos_embeddings": (
        "it adds a table of positions and biases by distance that are computed from hidden states, "
        "and the one cannot be stretched without the other"
    ),
    "rel_pos_bias": "its biases by distance are columns of a linear map, one for each bucket",
    "position_bias": "its buckets depend on the segments of the prompt as well as on distances",
    "axial_pos_shape": "its positions are places on a grid of fixed shape, which holds all of them",
    "rel_logits_proj": (
        "its biases are computed from the tokens, up to a fixed distance, and are zero beyond it"
    ),
    "relative_position_bias": (  # the same under another name, from transformers 5.24 on
        "its biases are computed from the tokens, up to a fixed distance, and are zero beyond it"
    ),
    "latents": "it reads a text into a fixed number of vectors, and writes a fixed length",
    "char_position_embeddings": (
        "its table of positions has a row for each hash bucket, whatever the length of texts"
    ),
    "rotary_value": ("it rotates queries and keys by a fixed table, which no method reaches"),
    "rotary_dim": (
        "it rotates queries and keys by a table in each attention, which no method reaches"
    ),
    "time_decay": "it tells order by recurrence alone, and reads any length",
    "mlstm_layer": "it tells order by recurrence alone, and reads any length",
    "max_scale": "it computes sinusoids for a text of any length, so there is no table to stretch",
}


def refusal_reason(model: nn.Module) -> str | None:
    """Return why a model's positions cannot be extended; None if its parts do not tell."""
    for attribute, reason in _REASONS.items():
        for name, module in model.named_modules():
            if getattr(module, attribute, None) is not None:
                return f"{reason} ({f'{name}.' if name else ''}{attribute})"
    return None


@dataclass(frozen=True)
class KeyMask:
    """A mask of four dimensions as truth values, and what it says about positions.

    A query counts the tokens that it sees, itself included. So positions follow left and right
    padding, and every cache, without asking it.

    Attributes:
        visible: True where a query sees a key, `[B, heads or 1, Q, K]`.
    """

    visible: torch.Tensor

    @classmethod
    def of(cls, mask: Any) -> KeyMask | None:
        """Return the key mask of an attention mask; None if it is of another form.

        Args:
            mask: `[B, heads or 1, Q, K]`: floats with the lowest one where a key is hidden, a bias
                elsewhere; or truth values, which are True where a key is hidden (MPT).
        """
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            return None
        if mask.dtype == torch.bool:
            return cls(~mask)
        return cls(mask > torch.finfo(mask.dtype).min) if mask.is_floating_point() else None

    @property
    def keys(self) -> int:
        """Return K."""
        return self.visible.shape[-1]

    @property
    def tokens(self) -> torch.Tensor:
        """Return how many tokens the longest row has so far, a tensor of one number."""
        return self.visible[:, 0, -1].sum(-1).max()

    def exact_bias(self, slopes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ALiBi's -slope * (i - j), `[B, heads, Q, K]`; 0 where a key is hidden.

        Args:
            slopes: `[heads]` float32.
            dtype: The bias's; each number is computed in float32 and rounded once.
        """
        visible = self.visible[:, :1]
        queries = visible.sum(-1, keepdim=True, dtype=torch.int32)
        keys = visible[:, :, -1:].cumsum(-1, dtype=torch.int32)
        distance = (keys - queries).float().mul_(visible)
        shape = (len(visible), len(slopes), *distance.shape[2:])
        bias = torch.empty(shape, dtype=dtype, device=distance.device)
        return torch.mul(distance, slopes[None, :, None, None], out=bias)


class CacheGuard:
    """Hooks around a decoder that mark its caches, and refuse those of other tables.

    A cached key cannot be moved to another row, because the row was added before all layers.

    Attributes:
        table: Says which rows the decoder reads.
    """

    def __init__(self, table: str) -> None:
        self.table = table

    def check(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Mark an empty cache, and refuse one that was filled under another table (pre-hook).

        Raises:
            ValueError: The cache holds tokens of another table. It stays unchanged.
        """
        cache = ForwardCall(decoder, args, kwargs).cache
        if cache is None or torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length"):
            return
        if getattr(cache, "position_table", None) == self.table:
            return  # without asking for its length, which a static cache counts on its device
        tokens = int(cache.get_seq_length())
        if tokens > 0:
            raise Refused(
                f"the cache holds {tokens} tokens that were read with another table of positions, "
                "and cached keys cannot be moved to its rows: expected an empty cache, or one that "
                "this patch filled; read the text again into a new cache"
            )
        cache.position_table = self.table

    def mark(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Mark a cache that the decoder made (hook)."""
        cache = ForwardCall(decoder, args, kwargs).cache
        cache = cache_in_output(output) if cache is None else cache
        if cache is not None:
            cache.position_table = self.table


def copy_table_mark(source: Any, target: Any) -> None:
    """Mark a cache with the table that another cache is marked with, if it is."""
    if hasattr(source, "position_table"):
        target.position_table = source.position_table
