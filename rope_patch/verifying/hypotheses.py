"""The hypotheses about an engine: as asked, and the ways in which engines are known to fail.

Where an engine is known for a failure, its issue is named beside the hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rope_patch.extension import Extension
from rope_patch.geometry import Geometry
from rope_patch.methods import Frequencies, Method
from rope_patch.methods.base import Rotation
from rope_patch.methods.linear import Linear
from rope_patch.methods.ntk import NTK
from rope_patch.methods.ntk_by_parts import NTKByParts, yarn_mscale
from rope_patch.methods.position_map import PositionMap
from rope_patch.methods.yarn import YaRN
from rope_patch.patching.method_wrappers import unwrap
from rope_patch.rope_config import ORIGINAL_LENGTH, by_layer_type
from rope_patch.utils.errors import Refused
from rope_patch.verifying.asked_rotation import AskedRotation, is_scaled, with_options

# Bases that engines fall back to, and those of common checkpoints.
_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_FIXED_FACTOR = 8.0  # Megatron-LM #6305 scales by it whatever the config says
_T = TypeVar("_T")
_METHODS: tuple[type[Method], ...] = (Linear, YaRN, NTK)
_UNASKED_FACTORS = (2.0, 4.0)  # factors that are tried where no extension was asked for
Rotate = Callable[[int], Rotation]  # from the tokens in a sequence


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
        *_lengths(asked, longest),
        *_thetas(asked),
        *_other_scalings(asked),
        *_constants(asked),
        *_layers(asked),
        *_positions_and_pairs(asked),
    ]
    says = f"rotates as asked ({asked.name})"
    as_asked = Hypothesis(AS_ASKED, says, asked.asked, asked.extension)
    if (
        asked.handle is not None
        and asked.is_length_dependent
        and not _acts_beyond_frequencies(asked)
    ):
        says += ", each request from its first token on by the length that its answer may reach"
        by_request = Hypothesis(BY_REQUEST, says, asked.asked, is_by_request=True)
        if asked.handle.method.fixed_at_admission:
            as_asked = replace(by_request, name=AS_ASKED)
        else:
            candidates.insert(0, by_request)
    lengths = sorted({1, asked.trained_length, asked.trained_length + 1, asked.target_length})
    hypotheses: list[Hypothesis] = [as_asked]
    rotations = [[as_asked.rotation(n) for n in lengths]]
    # Frequencies do not say all that maps and temperatures do, so nothing is the same as these.
    first = 1 if _acts_beyond_frequencies(asked) else 0
    for candidate in candidates:
        own = [candidate.rotation(n) for n in lengths]
        same = (
            index
            for index in range(first, len(hypotheses))
            if candidate.deviations == hypotheses[index].deviations
            and all(a.close_to(b) for a, b in zip(own, rotations[index], strict=True))
        )
        if (index := next(same, None)) is None:
            hypotheses.append(candidate)
            rotations.append(own)
        else:
            other = hypotheses[index]
            hypotheses[index] = replace(other, aliases=(*other.aliases, candidate.name))
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
        Hypothesis("unscaled", "rotates by theta alone: no scaling acts", lambda n: unscaled)
    ]
    if asked.handle is not None:
        says = "rotates by the checkpoint's config only"
        hypotheses.append(Hypothesis("checkpoint", says, lambda n: own))
    if _acts_beyond_frequencies(asked):
        says = "has the frequencies asked for, without what the method does in attention"
        hypotheses.append(Hypothesis("frequencies-only", says, asked.asked))
    return hypotheses


def _attention_factors(asked: AskedRotation) -> list[Hypothesis]:
    def power(exponent: int) -> Rotate:
        def rotation(length: int) -> Rotation:
            rotation = asked.asked(length)
            return Rotation(
                {
                    layer_type: replace(each, attention_factor=each.attention_factor**exponent)
                    for layer_type, each in rotation.frequencies.items()
                },
                rotation.softmax_mscale**exponent,
            )

        return rotation

    factors = {
        layer_type: yarn_mscale(yarn.factor)
        for layer_type in asked.changed
        if (yarn := asked.yarn(layer_type)) is not None
    }

    def by_formula(length: int) -> Rotation:
        frequencies = dict(asked.asked(length).frequencies)
        for layer_type, factor in factors.items():
            frequencies[layer_type] = replace(frequencies[layer_type], attention_factor=factor)
        return Rotation(frequencies)

    hypotheses = [
        Hypothesis(
            "no-attention-factor",  # vLLM #46280
            "has the frequencies asked for, but drops the attention factor (mscale)",
            power(0),
        ),
        Hypothesis(
            "attention-factor-twice", "applies the attention factor (mscale) twice", power(2)
        ),
    ]
    if factors:
        says = "takes YaRN's usual attention factor, 0.1 ln(factor) + 1, for the one asked for"
        # exllamav3 #259, SGLang #31232, vLLM #48621: mscale and mscale_all_dim are not read.
        hypotheses.append(Hypothesis("usual-attention-factor", says, by_formula))
    return hypotheses


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


def _positions_and_pairs(asked: AskedRotation) -> list[Hypothesis]:
    def doubled(length: int) -> Rotation:
        rotation = asked.asked(length)
        return replace(
            rotation,
            frequencies={
                layer_type: replace(each, inv_freq=2 * each.inv_freq)
                for layer_type, each in rotation.frequencies.items()
            },
        )

    hypotheses = [
        Hypothesis("doubled-positions", "counts every position twice", doubled)  # mlxcel #1389
    ]
    if asked.has_two_pairings:
        other = "half a head apart" if asked.rotation_sites[0].interleaved else "of neighbours"
        hypotheses.append(
            Hypothesis(
                "other-pairs",
                f"rotates pairs {other}, which the model was not trained on",
                asked.asked,
                has_other_pairs=True,
            )
        )
    return hypotheses


def _thetas(asked: AskedRotation) -> list[Hypothesis]:
    own = {each: asked.geometries[each] for each in asked.changed}

    def with_thetas(thetas: Mapping[str | None, float]) -> Rotate:
        method = asked.method
        if method is None:
            rotation = asked.own_rotation({k: {"rope_theta": v} for k, v in thetas.items()})
            return lambda length: rotation
        geometries = {
            layer_type: _based_on(own[layer_type], theta)
            for layer_type, theta in thetas.items()
            if own[layer_type].theta != theta
        }
        return lambda length: asked.by_method(method, length, geometries)

    hypotheses = [
        Hypothesis(f"theta-{theta:.0f}", f"scales as asked, but with theta {theta:,.0f}", rotate)
        for theta in _THETAS
        if any(abs(theta / each.theta - 1) > 0.01 for each in own.values())
        and (rotate := _if_possible(with_thetas, dict.fromkeys(own, theta))) is not None
    ]
    # theta^(-2i / D) is the frequency of the base theta^(R / D) where R of D elements rotate.
    over_heads = {k: each.theta ** (each.rotary_dim / each.head_dim) for k, each in own.items()}
    rotate = _if_possible(with_thetas, over_heads)
    if any(each.rotary_dim < each.head_dim for each in own.values()) and rotate is not None:
        says = "computes frequencies over the whole head, of which a part rotates"
        hypotheses.append(Hypothesis("head-width", says, rotate))  # pie #603
    return hypotheses


def _based_on(geometry: Geometry, theta: float) -> Geometry:
    """Return a geometry with another theta, and its base rescaled by as much."""
    base = tuple(geometry.inv_freq(theta).tolist()) if geometry.base else ()
    return replace(geometry, theta=theta, base=base)


def _other_scalings(asked: AskedRotation) -> list[Hypothesis]:
    """Return other methods, and scaling twice."""
    hypotheses: list[Hypothesis] = []
    factors = (asked.factor,) if asked.factor > 1 else _UNASKED_FACTORS
    for kind in _METHODS:
        for factor in factors:
            if _is(asked.method, kind) and factor == asked.factor:
                continue
            rotate = _by_method(asked, asked.wrapped(kind(factor=factor)))
            says = f"scales by {kind.name}, factor {factor:g}"
            hypotheses.append(Hypothesis(f"{kind.name}-{factor:g}", says, rotate))
    if asked.factor > 1:
        hypotheses.append(Hypothesis("scaled-twice", "scales every pair twice", _twice(asked)))
    on_top = [each for each in asked.changed if asked.geometries[each].base]
    if asked.method is not None and on_top:
        says = "scales once more what the checkpoint's own scaling has scaled"
        rotate = _on_top(asked, unwrap(asked.method), on_top)
        hypotheses.append(Hypothesis("scaled-on-top", says, rotate))
    return hypotheses


def _constants(asked: AskedRotation) -> list[Hypothesis]:
    """Return the scaling asked for with another factor, original length or ramp."""
    hypotheses: list[Hypothesis] = []

    def add(name: str, says: str, rotate: Rotate | None) -> None:
        if rotate is not None:
            hypotheses.append(Hypothesis(name, says, rotate))

    def changed(name: str, value: Any) -> Rotate | None:
        if asked.method is None:
            return _if_possible(_own_with, asked, name, value)
        method = _if_possible(with_options, asked.method, **{name: value})
        return None if method is None else _by_method(asked, method)

    if asked.factor > 1 and not asked.is_length_dependent:
        own = asked.factor
        for factor in sorted({own / 2, own * 2, own**2, _FIXED_FACTOR} - {own}):
            if factor > 1:
                says = f"scales as asked, but with factor {factor:g}"
                add(f"factor-{factor:g}", says, changed("factor", factor))
        lengths = {"original-length-lost": asked.target_length}
        if (claimed := getattr(asked.config, "max_position_embeddings", None)) is not None:
            lengths[f"original-{claimed}"] = claimed
        for name, length in lengths.items():
            says = f"takes {length:,} tokens for the length of pretraining"
            add(name, says, _from_length(asked, length))
    ramp = unwrap(asked.method) if asked.method is not None else asked.yarn(asked.changed[0])
    if isinstance(ramp, NTKByParts):  # keras-hub #2981
        ends = "between pairs" if ramp.truncate else "at whole pairs"
        says = f"begins and ends YaRN's ramp {ends} (truncate={not ramp.truncate})"
        add("truncate", says, changed("truncate", not ramp.truncate))
    return hypotheses


def _by_method(asked: AskedRotation, method: Method) -> Rotate:
    return lambda length: asked.by_method(method, length)


def _own_with(asked: AskedRotation, name: str, value: Any) -> Rotate | None:
    """Return the config's own scaling with another constant; None if it has no such constant."""
    parameters = by_layer_type(asked.config.rope_parameters)
    scaled = [each for each in asked.changed if is_scaled(parameters[each])]
    if name != "truncate" and not any(name in parameters[each] for each in scaled):
        return None
    rotation = asked.own_rotation({each: {name: value} for each in scaled})
    return lambda length: rotation


def _from_length(asked: AskedRotation, length: int) -> Rotate | None:
    """Return the scaling asked for from another length of pretraining."""
    if asked.method is None:
        return _own_with(asked, ORIGINAL_LENGTH, length)
    method = asked.method
    geometries = {
        each: replace(asked.geometries[each], trained_length=length) for each in asked.changed
    }
    return lambda n: asked.by_method(method, n, geometries)


def _on_top(asked: AskedRotation, method: Method, layer_types: list[str | None]) -> Rotate:
    """Return the checkpoint's scaling, with each pair stretched once more by a method."""
    parameters = by_layer_type(asked.config.rope_parameters)

    def rotation(length: int) -> Rotation:
        rotation = asked.asked(length)
        frequencies = dict(rotation.frequencies)
        for layer_type in layer_types:
            scaled = asked.geometries[layer_type]
            original = parameters[layer_type].get(ORIGINAL_LENGTH, scaled.trained_length)
            start = replace(scaled, base=(), attention_factor=1.0, trained_length=int(original))
            once = method.frequencies_at(start, length)
            frequencies[layer_type] = Frequencies(
                scaled.inv_freq() * once.inv_freq / start.inv_freq(),
                scaled.attention_factor * once.attention_factor,
            )
        return replace(rotation, frequencies=frequencies)

    return rotation


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
    parameters = by_layer_type(asked.config.rope_parameters)
    others = [each for each in parameters if each is not None and each not in asked.changed]
    if not others:
        return []

    def all_layers(rotate: Rotate) -> list[Hypothesis]:  # SGLang #30920
        says = f"scales the {' and '.join(map(str, others))} layers, too"
        return [Hypothesis("all-layers", says, rotate)]

    if (method := asked.method) is not None:
        return all_layers(lambda length: asked.by_method(method, length, asked.geometries))
    if not asked.is_own_scaled:
        return []
    scaling = {k: v for k, v in parameters[asked.changed[0]].items() if k != "rope_theta"}
    rotation = asked.own_rotation(dict.fromkeys(others, scaling))
    return all_layers(lambda length: rotation)


def _lengths(asked: AskedRotation, longest: int) -> list[Hypothesis]:
    """Return what engines do with a rotation that should follow the length."""
    if not asked.is_length_dependent:
        return []
    target, trained = asked.target_length, asked.trained_length
    hypotheses = [
        Hypothesis(
            "fixed-at-target",  # llama.cpp #24823: LongRoPE's long factors at short lengths
            f"rotates every text as one of {target:,} tokens",
            lambda n: asked.asked(target),
        )
    ]
    if longest > trained:
        says = f"rotates every text as one of {trained:,} tokens, the trained length"
        hypotheses.append(Hypothesis("fixed-at-trained", says, lambda n: asked.asked(trained)))
    if asked.handle is not None and not isinstance(unwrap(asked.handle.method), PositionMap):
        says = "keeps cached keys under the rotation of their time as a text grows (stale keys)"
        hypotheses.append(Hypothesis("stale-keys", says, asked.asked, keeps_stale_keys=True))
    return hypotheses


def _if_possible(make: Callable[..., _T], *arguments: Any, **options: Any) -> _T | None:
    """Return what a function makes; None where it refuses the values."""
    try:
        return make(*arguments, **options)
    except Refused:
        return None


AS_ASKED = "as-asked"
BY_REQUEST = "by-request"  # as rope_patch's plugin for vLLM, and growth="admission"
RIGHT = (AS_ASKED, BY_REQUEST)  # the names of what a right engine does
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
        has_other_pairs: Whether it rotates neighbours where the model was trained on pairs half a
            head apart, or the other way round.
        is_by_request: Whether a request's rotation is that of its final length from the start.
        aliases: Names of hypotheses that are this same rotation for this request.
    """

    name: str
    says: str
    rotation: Callable[[int], Rotation]
    request: Extension | None = None
    table_rows: int | None = None
    table_end: str = WRAPS
    keeps_stale_keys: bool = False
    has_other_pairs: bool = False
    is_by_request: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def deviations(self) -> tuple[Any, ...]:
        """Return what it does beside its frequencies; equal for hypotheses that do the same."""
        return (
            *(self.table_rows, self.table_end),
            *(self.keeps_stale_keys, self.has_other_pairs, self.is_by_request),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return name, sentence and aliases, for JSON."""
        aliases = list(self.aliases)
        return {"name": self.name, "says": f"the engine {self.says}", "same_as": aliases}
