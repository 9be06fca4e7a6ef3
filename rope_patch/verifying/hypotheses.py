"""The hypotheses about an engine: as asked, and the ways in which engines are known to fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from rope_patch.entry_points import patch_rotation
from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import Rotation
from rope_patch.methods.linear import Linear
from rope_patch.methods.ntk import NTK
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.yarn import YaRN
from rope_patch.patching import Patch
from rope_patch.patching.architecture.mla_scale import (
    SoftmaxScaled,
    config_mscale,
    find_mla_attentions,
)
from rope_patch.patching.architecture.rotary_modules import find_rotaries
from rope_patch.patching.architecture.rotary_traits import RotaryTraits, reference_frequencies
from rope_patch.patching.geometry_selection import base_geometries
from rope_patch.patching.method_wrappers import MethodWrapper, unwrap
from rope_patch.rope_config import by_layer_type, config_rope_type
from rope_patch.utils.errors import Refused

# Bases that engines fall back to, and those of common checkpoints.
_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_T = TypeVar("_T")
_METHODS: tuple[type[Method], ...] = (Linear, YaRN, NTK)
_UNASKED_FACTORS = (2.0, 4.0)  # factors that are tried where no extension was asked for


def make_hypotheses(asked: AskedRotation, longest: int) -> list[Hypothesis]:
    """Return the hypotheses, "as asked" first, without those that are the same rotation.

    Args:
        asked: What the engine was asked for.
        longest: Tokens of the longest prompt; hypotheses that need a longer one are left out.
    """
    candidates = [
        *_plain_rotations(asked),
        *_attention_factors(asked),
        *_tables(asked, longest),
        *_lengths(asked),
        *_thetas(asked),
        *_other_scalings(asked),
        *_layers(asked),
    ]
    as_asked = Hypothesis(
        AS_ASKED, f"rotates as asked ({asked.name})", asked.asked, asked.extension
    )
    lengths = sorted({1, asked.trained_length, asked.trained_length + 1, asked.target_length})
    hypotheses = [as_asked]
    for candidate in candidates:
        rivals = hypotheses[1:] if _acts_beyond_frequencies(asked) else hypotheses
        if not any(candidate.same_as(other, lengths) for other in rivals):
            hypotheses.append(candidate)
    return hypotheses


def _acts_beyond_frequencies(asked: AskedRotation) -> bool:
    """Return whether frequencies do not express the request: maps, temperatures, start tokens."""
    method = asked.method
    return method is not None and (
        isinstance(unwrap(method), PositionMap)
        or method.query_temperature is not None
        or bool(method.start_token_count)
    )


def _plain_rotations(asked: AskedRotation) -> list[Hypothesis]:
    unscaled, own = asked.unscaled(), asked.own_rotation()
    hypotheses = [
        Hypothesis("unscaled", "rotates by theta alone: no scaling acts", lambda n: unscaled),
        Hypothesis("checkpoint", "rotates by the checkpoint's config only", lambda n: own),
    ]
    if _acts_beyond_frequencies(asked):
        says = "has the frequencies asked for, without what the method does in attention"
        hypotheses.append(Hypothesis("frequencies-only", says, asked.asked))
    return hypotheses


def _attention_factors(asked: AskedRotation) -> list[Hypothesis]:
    def power(exponent: int) -> Callable[[int], Rotation]:
        def rotation(length: int) -> Rotation:
            rotation = asked.asked(length)
            return Rotation(
                {
                    layer_type: Frequencies(each.inv_freq, each.attention_factor**exponent)
                    for layer_type, each in rotation.frequencies.items()
                },
                rotation.softmax_mscale**exponent,
            )

        return rotation

    return [
        Hypothesis(
            "no-attention-factor",
            "has the frequencies asked for, but drops the attention factor (mscale)",
            power(0),
        ),
        Hypothesis(
            "attention-factor-twice", "applies the attention factor (mscale) twice", power(2)
        ),
    ]


def _tables(asked: AskedRotation, longest: int) -> list[Hypothesis]:
    rows = asked.trained_length
    if longest <= rows:
        return []
    return [
        Hypothesis(
            "table-wraps",
            f"rotates by position modulo {rows:,}, the trained length: its table wraps",
            asked.asked,
            table_rows=rows,
            table_end=WRAPS,
        ),
        Hypothesis(
            "table-clamps",
            f"rotates all positions beyond {rows:,} alike, by the last row of its table",
            asked.asked,
            table_rows=rows,
            table_end=CLAMPS,
        ),
    ]


def _thetas(asked: AskedRotation) -> list[Hypothesis]:
    own = {asked.geometries[layer_type].theta for layer_type in asked.changed}

    def with_theta(theta: float) -> Callable[[int], Rotation]:
        method = asked.method
        if method is None:
            rotation = asked.own_rotation(rope_theta=theta)
            return lambda length: rotation
        geometries = {
            each: _based_on(asked.geometries[each], theta)
            for each in asked.changed
            if asked.geometries[each].theta != theta
        }
        return lambda length: asked.by_method(method, length, geometries)

    return [
        Hypothesis(f"theta-{theta:.0f}", f"scales as asked, but with theta {theta:,.0f}", rotate)
        for theta in _THETAS
        if any(abs(theta / each - 1) > 0.01 for each in own)
        and (rotate := _if_possible(with_theta, theta)) is not None
    ]


def _based_on(geometry: Geometry, theta: float) -> Geometry:
    """Return a geometry with another theta, and its base rescaled by as much."""
    base = tuple(geometry.inv_freq(theta).tolist()) if geometry.base else ()
    return replace(geometry, theta=theta, base=base)


def _other_scalings(asked: AskedRotation) -> list[Hypothesis]:
    """Return other methods, other factors, and scaling twice."""
    hypotheses: list[Hypothesis] = []

    def add(name: str, says: str, method: Method) -> None:
        hypotheses.append(Hypothesis(name, says, lambda n: asked.by_method(method, n)))

    factors = (asked.factor,) if asked.factor > 1 else _UNASKED_FACTORS
    for kind in _METHODS:
        for factor in factors:
            name = f"{kind.name}-{factor:g}"
            if _is(asked.method, kind) and factor == asked.factor:
                continue
            other = asked.wrapped(kind(factor=factor))
            add(name, f"scales by {kind.name}, factor {factor:g}", other)
    if asked.factor > 1:
        hypotheses.append(Hypothesis("scaled-twice", "scales every pair twice", _twice(asked)))
    method = asked.method
    if method is None or asked.factor <= 1 or asked.is_length_dependent:
        return hypotheses
    for factor in (asked.factor / 2, asked.factor * 2, asked.factor**2):
        if factor > 1 and (changed := _if_possible(with_factor, method, factor)) is not None:
            add(f"factor-{factor:g}", f"scales as asked, but with factor {factor:g}", changed)
    longer = {
        each: replace(asked.geometries[each], trained_length=asked.target_length)
        for each in asked.changed
    }
    hypotheses.append(
        Hypothesis(
            "original-length-lost",
            f"takes {asked.target_length:,} tokens for the length of pretraining",
            lambda n: asked.by_method(method, n, longer),
        )
    )
    return hypotheses


def _is(method: Method | None, kind: type[Method]) -> bool:
    return method is not None and type(unwrap(method)) is kind


def _twice(asked: AskedRotation) -> Callable[[int], Rotation]:
    def rotation(length: int) -> Rotation:
        once, none = asked.asked(length), asked.unscaled()
        return Rotation(
            {
                layer_type: Frequencies(
                    each.inv_freq**2 / none.frequencies[layer_type].inv_freq,
                    each.attention_factor**2,
                )
                if (none.frequencies[layer_type].inv_freq > 0).all()
                else each
                for layer_type, each in once.frequencies.items()
            },
            once.softmax_mscale**2,
        )

    return rotation


def _layers(asked: AskedRotation) -> list[Hypothesis]:
    method = asked.method
    others = [each for each in asked.geometries if each not in asked.changed]
    if method is None or not others:
        return []
    return [
        Hypothesis(
            "all-layers",
            f"scales the {' and '.join(map(str, others))} layers, too",
            lambda n: asked.by_method(method, n, asked.geometries),
        )
    ]


def _lengths(asked: AskedRotation) -> list[Hypothesis]:
    """Return what engines do with a rotation that should follow the length."""
    if not asked.is_length_dependent or asked.handle is None:
        return []
    target = asked.target_length
    hypotheses = [
        Hypothesis(
            "fixed-at-target",
            f"rotates every text as one of {target:,} tokens",
            lambda n: asked.asked(target),
        )
    ]
    if not isinstance(unwrap(asked.handle.method), PositionMap):
        says = "keeps cached keys under the rotation of their time as a text grows (stale keys)"
        hypotheses.append(Hypothesis("stale-keys", says, asked.asked, keeps_stale_keys=True))
    return hypotheses


def _if_possible(make: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return what a function makes; None where it refuses the values."""
    try:
        return make(*arguments)
    except Refused:
        return None


@dataclass(frozen=True, eq=False)
class AskedRotation:
    """What an engine was asked for, on a model without a patch.

    Attributes:
        extension: The request; None to ask for the checkpoint's own rotation.
        handle: The patch that the request makes, undone; None without a request.
        config: The text config without a patch.
        traits: Facts about the rotary modules.
        geometries: The unextended rotation of every layer type.
        changed: The layer types that the request extends; without one, those that the config
            scales, or all.
    """

    extension: Extension | None
    handle: Patch | None
    config: Any
    traits: list[RotaryTraits]
    geometries: dict[str | None, Geometry]
    changed: tuple[str | None, ...]

    @classmethod
    def of(cls, model: nn.Module, extension: Extension | None) -> AskedRotation:
        """Return what is asked for of a model that is not patched.

        Args:
            model: The model.
            extension: The request; None for the checkpoint's own rotation.

        Raises:
            ValueError: The model does not rotate, or the request cannot be met.
        """
        rotaries = find_rotaries(model)
        handle = None
        if extension is not None:
            with patch_rotation(model, replace(extension, kernels="hf")) as handle:
                pass
            extension = replace(handle.extension, kernels="hf")
        config: Any = handle.original_config if handle else rotaries[0].module.config
        traits = [RotaryTraits.of(model, rotary, config) for rotary in rotaries]
        known = [name for name in by_layer_type(config.rope_parameters) if name is not None]
        trained = handle.trained_length if handle else None
        geometries = _geometries(config, rotaries, trained, known)
        if handle is not None:
            geometries |= handle.geometries
        scaled = [
            layer_type
            for layer_type, parameters in by_layer_type(config.rope_parameters).items()
            if layer_type in geometries and _is_scaled(parameters)
        ]
        changed = tuple(handle.geometries if handle else scaled or geometries)
        return cls(extension, handle, config, traits, geometries, changed)

    @property
    def method(self) -> Method | None:
        """Return the method with its options; None without a request."""
        return None if self.handle is None else self.handle.method

    @property
    def name(self) -> str:
        """Return what is asked for, for messages."""
        return "the checkpoint's own rotation" if self.handle is None else str(self.handle)

    @property
    def trained_length(self) -> int:
        """Return the tokens of pretraining."""
        return next(iter(self.geometries.values())).trained_length

    @property
    def target_length(self) -> int:
        """Return the tokens that the engine should read; twice the trained ones if unlimited."""
        if self.handle is not None:
            return self.handle.length or 2 * self.trained_length
        return max(self.trained_length, self.config.max_position_embeddings or 0)

    @property
    def factor(self) -> float:
        """Return target length / trained length."""
        return self.target_length / self.trained_length

    @property
    def is_length_dependent(self) -> bool:
        """Return whether the rotation asked for depends on the length of each sequence."""
        if self.handle is not None:
            return self.handle.is_length_dependent
        parameters = by_layer_type(self.config.rope_parameters).values()
        return any(config_rope_type(each) in ("dynamic", "longrope") for each in parameters)

    def own_rotation(self, **fields: Any) -> Rotation:
        """Return the rotation that transformers computes from the checkpoint's config.

        Args:
            **fields: Entries of `rope_parameters` that differ, in the layer types that change.
        """
        if not fields:
            return self._own_rotation
        config = copy.deepcopy(self.config)
        for layer_type, parameters in by_layer_type(config.rope_parameters).items():
            if layer_type in self.changed:
                parameters.update(fields)
        return self._rotation_of(config)

    @cached_property  # most hypotheses begin with it, and are compared with one another
    def _own_rotation(self) -> Rotation:
        return self._rotation_of(self.config)

    def _rotation_of(self, config: Any) -> Rotation:
        frequencies: dict[str | None, Frequencies] = {}
        for traits in self.traits:
            frequencies |= reference_frequencies(traits.rotary, config)
        return Rotation(frequencies, self._config_mscale(config))

    def unscaled(self) -> Rotation:
        """Return the rotation of every layer by its theta alone."""
        own = self.own_rotation().frequencies
        parameters = by_layer_type(self.config.rope_parameters)
        return Rotation(
            {
                layer_type: Frequencies(self.geometries[layer_type].unscaled_inv_freq())
                if layer_type in self.changed or _is_scaled(parameters[layer_type])
                else each
                for layer_type, each in own.items()
            }
        )

    def asked(self, length: int) -> Rotation:
        """Return the rotation asked for, of a sequence of `length` tokens."""
        own = self.own_rotation()
        if self.handle is None:
            return own
        frequencies = own.frequencies | self.handle.frequencies_at(length)
        return Rotation(frequencies, self._mscale(self.handle.method, length))

    def by_method(
        self,
        method: Method,
        length: int,
        geometries: dict[str | None, Geometry] | None = None,
    ) -> Rotation:
        """Return the rotation by another method, or from other geometries.

        Args:
            method: The method.
            length: Tokens in the sequence.
            geometries: The unextended rotation of the layer types to change; those that the
                request changes unless given.
        """
        geometries = geometries or {each: self.geometries[each] for each in self.changed}
        own = self.own_rotation()
        frequencies = own.frequencies | {
            layer_type: method.frequencies_at(geometry, length)
            for layer_type, geometry in geometries.items()
            if layer_type in own.frequencies
        }
        return Rotation(frequencies, self._mscale(method, length))

    def wrapped(self, method: Method) -> Method:
        """Return another method, wrapped for MLA models as the one asked for."""
        mine = self.method
        return replace(mine, inner=method) if isinstance(mine, SoftmaxScaled) else method

    def _mscale(self, method: Method, length: int) -> float:
        if not isinstance(method, SoftmaxScaled):
            return 1.0
        return method.softmax_mscale_at(self.geometries[self.changed[0]], length)

    def _config_mscale(self, config: Any) -> float:
        attentions = [each for t in self.traits for each in find_mla_attentions(t.owner)]
        return config_mscale(attentions[0], config) if attentions else 1.0


def with_factor(method: Method, factor: float) -> Method:
    """Return a method with another factor, below its wrappers."""
    if isinstance(method, MethodWrapper):
        return replace(method, inner=with_factor(method.inner, factor))
    return replace(method, factor=factor)


def _geometries(
    config: Any, rotaries: list[Any], trained: int | None, known: list[str]
) -> dict[str | None, Geometry]:
    """Return the unscaled geometries; the running ones where a config hides its original length."""
    layer_types = known or None
    try:
        return base_geometries(config, rotaries, trained, layer_types, "unscaled")
    except Refused:
        return base_geometries(config, rotaries, trained, layer_types, "running")


def _is_scaled(parameters: dict[str, Any]) -> bool:
    return config_rope_type(parameters) not in ("default", "proportional")


AS_ASKED = "as-asked"
WRAPS, CLAMPS = "wraps", "clamps"


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One rotation that an engine may have.

    Attributes:
        name: A short name, for JSON and tables.
        says: What the engine does if the hypothesis is true; a clause that follows "the engine".
        rotation: The rotation of a sequence of some tokens.
        request: The request that `patch` applies, for what frequencies alone do not express; None
            if frequencies are all.
        table_rows: Rows of the engine's table of cos and sin; None if it has enough.
        table_end: What happens to positions beyond the table: "wraps" or "clamps".
        keeps_stale_keys: Whether cached keys keep the rotation of their time as the text grows.
    """

    name: str
    says: str
    rotation: Callable[[int], Rotation]
    request: Extension | None = None
    table_rows: int | None = None
    table_end: str = WRAPS
    keeps_stale_keys: bool = False

    def same_as(self, other: Hypothesis, lengths: list[int]) -> bool:
        """Return whether two hypotheses without requests describe one rotation."""
        return (
            self.table_rows == other.table_rows
            and self.table_end == other.table_end
            and self.keeps_stale_keys == other.keeps_stale_keys
            and all(self.rotation(n).close_to(other.rotation(n)) for n in lengths)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return name and sentence, for JSON."""
        return {"name": self.name, "says": f"the engine {self.says}"}
