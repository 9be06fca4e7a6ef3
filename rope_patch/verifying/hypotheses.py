"""The hypotheses about an engine: as asked, and the ways in which engines are known to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import Rotation
from rope_patch.methods.linear import Linear
from rope_patch.methods.ntk import NTK
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.yarn import YaRN
from rope_patch.patching.method_wrappers import unwrap
from rope_patch.utils.errors import Refused
from rope_patch.verifying.asked_rotation import AskedRotation, with_factor
from rope_patch.verifying.hypothesis import AS_ASKED, CLAMPS, WRAPS, Hypothesis

# Bases that engines fall back to, and those of common checkpoints.
_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_T = TypeVar("_T")
_METHODS: tuple[type[Method], ...] = (Linear, YaRN, NTK)
_UNASKED_FACTORS = (2.0, 4.0)  # of scalings that nobody asked for


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
