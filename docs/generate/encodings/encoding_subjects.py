"""Encodings behind one interface, so that the same test measures all of them.

An encoding has a code (a vector for each position), or adds a term to the logit of each query and
key, or both. All of it is float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rope_patch.encodings.biases import (
    alibi_bias,
    alibi_slopes,
    fire_progress,
    kerple_log,
    sandwich,
    t5_bucket,
    xpos_factors,
)
from rope_patch.encodings.tables import (
    digit_count,
    digit_table,
    integer_table,
    normalised_table,
    sinusoidal_frequencies,
    sinusoidal_table,
)
from rope_patch.utils.errors import Refused, did_you_mean

_EMBEDDING_STD = 0.02  # of learned tables before training, as in GPT-2
_FIRE_HIDDEN = 32
_FIRE_RATE = 0.1


@dataclass(frozen=True)
class Setting:
    """What encodings are made for.

    Attributes:
        length: N, tokens of a text in training.
        reach: Longest text to look at, in multiples of the length.
        width: Components of a code, and of a head's queries and keys.
        heads: Heads with a bias of their own.
        base: Theta of sinusoids and rotations.
        seed: Of everything that is learned; it stands for the values before training.
    """

    length: int = 512
    reach: int = 8
    width: int = 64
    heads: int = 8
    base: float = 10000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 4 or self.width % 4 or self.length < 4 * self.width or self.reach < 2:
            raise Refused(
                "expected a width that 4 divides, a length of at least 4 times the width and a "
                f"reach of at least 2, got {self.width}, {self.length} and {self.reach}"
            )

    def generator(self) -> torch.Generator:
        """Return a new source of random numbers."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Content:
    """What a query's and a key's token bring to their logit, beside positions.

    Attributes:
        query: The query's token vector, `[W]`.
        key: The key's.
        query_weight: Projection of the token vector (with its code, if codes are added), `[W, W]`.
        key_weight: The key's.
    """

    query: torch.Tensor
    key: torch.Tensor
    query_weight: torch.Tensor
    key_weight: torch.Tensor

    @classmethod
    def draw(cls, width: int, seed: int) -> Content:
        """Return random vectors and projections that keep their variance."""
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(2, width, dtype=torch.float64, generator=generator)
        weights = torch.randn(2, width, width, dtype=torch.float64, generator=generator)
        return cls(*vectors, *(weights / width**0.5))


class Subject(ABC):
    """An encoding to measure.

    Attributes:
        name: Of the encoding.
        setting: What it is made for.
        rows: Positions that have a code, if they end.
        causal: Whether it is meant for keys at or before their query alone.
        maker: Makes it anew for another setting, if it can be.
    """

    rows: int | None = None
    causal = False
    maker: Callable[[Setting], Subject] | None = None

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.setting = setting

    @abstractmethod
    def term(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        """Return what positions change in the logits of queries and keys, `[N, heads]`.

        It is the logit with positions less the logit without. Logits are products of projected
        vectors, not divided by the square root of their width.

        Args:
            queries: Positions of queries, `[N]`.
            keys: Positions of the key of each query, `[N]`.
            content: What both tokens are; the same for all N.
        """

    @abstractmethod
    def similarity(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return what positions say by themselves, `[N, heads]`: products of codes, or the bias."""

    @abstractmethod
    def inputs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the numbers that the rest of the model has to be used to, `[N, units, numbers]`.

        Components of an added code; angles, up to a full turn, of a rotation's pairs, and xPos's
        factors; the factors exp(bias) of attention weights for each head.
        """


class CodeSubject(Subject):
    """An encoding that has a vector for each position."""

    @abstractmethod
    def code(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the vectors of positions, `[N, W]`."""

    def key_code(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what keys have instead of `code`, where that differs."""
        return self.code(positions)

    def similarity(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (self.code(queries) * self.key_code(keys)).sum(1, keepdim=True)

    @abstractmethod
    def product(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        """Return the product that holds both positions, after random projections, `[N]`.

        Of codes that are added it is the part p W p' of the logit, without token vectors; of a
        rotation it is the logit.
        """


class Table(CodeSubject):
    """A code that is added to token vectors."""

    def __init__(
        self,
        name: str,
        setting: Setting,
        table: Callable[[torch.Tensor], torch.Tensor],
        rows: int | None = None,
    ) -> None:
        super().__init__(name, setting)
        self.rows = rows
        self._table = table

    def code(self, positions: torch.Tensor) -> torch.Tensor:
        return self._table(positions)

    def term(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        at_query = (content.query + self._table(queries)) @ content.query_weight
        at_key = (content.key + self._table(keys)) @ content.key_weight
        without = (content.query @ content.query_weight) @ (content.key @ content.key_weight)
        return ((at_query * at_key).sum(1) - without)[:, None]

    def product(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        at_query = self._table(queries) @ content.query_weight
        return (at_query * (self._table(keys) @ content.key_weight)).sum(1)

    def inputs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self._table(queries)[:, :, None]


class Rotation(CodeSubject):
    """A rotation of queries and keys; xPos stretches them, too.

    Its code is the cosine and sine of each pair's angle, which are all that enters.
    """

    def __init__(self, name: str, setting: Setting, stretched: bool = False) -> None:
        super().__init__(name, setting)
        self.causal = self.stretched = stretched
        self._frequencies = sinusoidal_frequencies(setting.width, setting.base)

    def code(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self._turn(positions, positions)).flatten(1)

    def key_code(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self._turn(positions, -positions)).flatten(1)

    def term(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        without = (content.query @ content.query_weight) @ (content.key @ content.key_weight)
        return (self.product(queries, keys, content) - without)[:, None]

    def product(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        query, key = (
            torch.view_as_complex((vector @ weight).view(-1, 2))
            for vector, weight in (
                (content.query, content.query_weight),
                (content.key, content.key_weight),
            )
        )
        turned = (query * self._turn(queries, queries)) * (key * self._turn(keys, -keys)).conj()
        return turned.real.sum(1)

    def inputs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distances = queries - keys
        # After a full turn every angle was seen.
        angles = (distances.double()[:, None] * self._frequencies).clamp(max=2 * torch.pi)
        return torch.stack([angles, self._turn(distances, distances).abs()], 2)

    def _turn(self, positions: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """Return what each pair is multiplied by, as complex numbers, `[N, W / 2]`."""
        angles = positions.double()[:, None] * self._frequencies
        size = torch.ones_like(angles)
        if self.stretched:
            size = xpos_factors(exponents, self.setting.width)
        return torch.polar(size, angles)


class Bias(Subject):
    """A number that is added to each logit."""

    causal = True

    def __init__(
        self,
        name: str,
        setting: Setting,
        bias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(name, setting)
        self._bias = bias

    def similarity(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self._bias(queries, keys)

    def term(self, queries: torch.Tensor, keys: torch.Tensor, content: Content) -> torch.Tensor:
        return self._bias(queries, keys)

    def inputs(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self._bias(queries, keys).exp()[:, :, None]


def _none(setting: Setting) -> Subject:
    return Bias("none", setting, lambda q, k: torch.zeros(len(q), 1, dtype=torch.float64))


def _integer(setting: Setting) -> Subject:
    return Table("integer", setting, lambda t: integer_table(t, setting.width))


def _normalised(setting: Setting) -> Subject:
    return Table(
        "normalised", setting, lambda t: normalised_table(t, setting.width, setting.length)
    )


def _binary(setting: Setting) -> Subject:
    count = digit_count(setting.length * setting.reach)
    return Table("binary", setting, lambda t: digit_table(t, setting.width, count=count))


def _sinusoidal(setting: Setting) -> Subject:
    return Table(
        "sinusoidal", setting, lambda t: sinusoidal_table(t, setting.width, base=setting.base)
    )


def _learned(setting: Setting) -> Subject:
    size = (setting.length, setting.width)
    weight = torch.randn(size, dtype=torch.float64, generator=setting.generator())
    weight *= _EMBEDDING_STD
    return Table("learned", setting, lambda t: weight[t], rows=setting.length)


def _rope(setting: Setting) -> Subject:
    return Rotation("rope", setting)


def _xpos(setting: Setting) -> Subject:
    return Rotation("xpos", setting, stretched=True)


def _alibi(setting: Setting) -> Subject:
    slopes = alibi_slopes(setting.heads)
    return Bias("alibi", setting, lambda q, k: alibi_bias(slopes, q - k).T)


def _t5(setting: Setting) -> Subject:
    size = (32, setting.heads)
    weight = torch.randn(size, dtype=torch.float64, generator=setting.generator())
    return Bias("t5", setting, lambda q, k: weight[t5_bucket(k - q)])


def _kerple(setting: Setting) -> Subject:
    # The paper's initial values: weights in (0, 2), rates in (0, 1).
    drawn = torch.rand(2, setting.heads, dtype=torch.float64, generator=setting.generator())
    weights, rates = 2 * drawn[0].clamp(min=0.01), drawn[1].clamp(min=0.01)

    def bias(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        columns = [
            kerple_log(queries - keys, float(weight), float(rate))
            for weight, rate in zip(weights, rates, strict=True)
        ]
        return torch.stack(columns, 1)

    return Bias("kerple", setting, bias)


def _fire(setting: Setting) -> Subject:
    generator = setting.generator()

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    inward, shift = draw(1, _FIRE_HIDDEN), draw(_FIRE_HIDDEN)
    outward = draw(_FIRE_HIDDEN, setting.heads) / _FIRE_HIDDEN**0.5

    def bias(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        progress = fire_progress(queries, keys, _FIRE_RATE, setting.length)
        return (progress[:, None] @ inward + shift).relu() @ outward

    return Bias("fire", setting, bias)


def _sandwich(setting: Setting) -> Subject:
    return Bias("sandwich", setting, lambda q, k: sandwich(q - k, setting.heads).T)


_MAKERS: dict[str, Callable[[Setting], Subject]] = {
    "none": _none,
    "integer": _integer,
    "normalised": _normalised,
    "binary": _binary,
    "sinusoidal": _sinusoidal,
    "learned": _learned,
    "rope": _rope,
    "xpos": _xpos,
    "alibi": _alibi,
    "t5": _t5,
    "kerple": _kerple,
    "fire": _fire,
    "sandwich": _sandwich,
}
SUBJECTS = tuple(_MAKERS)


def make_subject(name: str, setting: Setting | None = None) -> Subject:
    """Return an encoding to measure.

    Args:
        name: One of `SUBJECTS`.
        setting: What it is made for.

    Raises:
        ValueError: There is no such encoding.
    """
    if name not in _MAKERS:
        raise Refused(f"there is no encoding {name!r}{did_you_mean(name, SUBJECTS)}")
    subject = _MAKERS[name](setting or Setting())
    subject.maker = _MAKERS[name]
    return subject


def make_axis(subject: Subject, axis: int) -> Subject:
    """Return the same encoding for another axis: what is learned is drawn anew."""
    if subject.maker is None:
        return subject
    return subject.maker(replace(subject.setting, seed=subject.setting.seed + axis))
