"""What a method's formula must keep to, checked without a model: numbers, lengths, positions.

`check_method` asks for these rules first, because they name a length, a query or a key, where
logits of a tiny model only differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from rope_patch.geometry import Geometry
from rope_patch.methods.base import Frequencies, Method
from rope_patch.methods.position_map import PositionMap
from rope_patch.patching.proof.checks import OK, WRONG, Check
from rope_patch.utils.errors import describe_error

FINITE = "frequencies and attention factors are finite"

_TIMES = 4  # lengths up to so many times the trained one are looked at
_CHUNK = 23  # queries that are mapped together


class _Broken(Exception):
    """A rule is broken: what was expected, and what came."""


def check_rules(method: Method, geometry: Geometry) -> Iterator[Check]:
    """Yield the checks of a method's own rules.

    Args:
        method: The method with its options.
        geometry: A small rotation to apply it to.
    """
    rules: dict[str, Callable[[Method, Geometry], None]] = {
        FINITE: _require_finite,
        "valid_until covers its length and never falls": _require_valid_until,
        "frequencies stay the same up to valid_until": _require_steps,
    }
    if method.is_dynamic and method.is_length_dependent(geometry.trained_length):
        rules["lengths up to the trained one are not stretched"] = _require_plain_start
    if isinstance(method, PositionMap):
        rules["a query meets keys up to its own, each at most once"] = _require_past
        rules["a query meets keys at positions within reach"] = _require_reach
        rules["a query is mapped alike in every chunk"] = _require_no_chunks
    for name, rule in rules.items():
        try:
            rule(method, geometry)
        except _Broken as broken:
            yield Check(name, WRONG, problem=str(broken))
        except Exception as error:  # code from anywhere can raise anything
            yield Check(name, WRONG, problem=f"the method raises {describe_error(error)}")
        else:
            yield Check(name, OK)


def _lengths(geometry: Geometry) -> range:
    return range(1, _TIMES * geometry.trained_length + 1)


def _require_finite(method: Method, geometry: Geometry) -> None:
    for length in _lengths(geometry):
        frequencies = method.frequencies_at(geometry, length)
        numbers, factor = frequencies.inv_freq, float(frequencies.attention_factor)
        at = f"at {length:,} tokens"
        if numbers.shape != (geometry.rotary_dim // 2,):
            raise _Broken(
                f"expected {geometry.rotary_dim // 2} frequencies {at}, got a tensor of shape "
                f"{tuple(numbers.shape)}"
            )
        for pair, number in enumerate(numbers.tolist()):
            if not (math.isfinite(number) and number >= 0):
                raise _Broken(
                    f"expected radians a token, finite and not negative, got {number} for pair "
                    f"{pair} {at}"
                )
        if not (math.isfinite(factor) and factor > 0):
            raise _Broken(f"expected an attention factor above 0 and finite, got {factor} {at}")


def _require_valid_until(method: Method, geometry: Geometry) -> None:
    before = 0.0
    for length in _lengths(geometry):
        until = method.valid_until(length, geometry.trained_length)
        if not until >= length:
            raise _Broken(f"expected valid_until({length}) to be at least {length}, got {until}")
        if until < before:
            raise _Broken(
                f"expected valid_until({length}) to be at least valid_until({length - 1}), "
                f"{before:g}, got {until:g}"
            )
        before = until


def _require_steps(method: Method, geometry: Geometry) -> None:
    until, first, expected = -math.inf, 0, Frequencies(geometry.inv_freq())
    for length in _lengths(geometry):
        got = method.frequencies_at(geometry, length)
        if length > until:
            until, first = method.valid_until(length, geometry.trained_length), length
            expected = got
        elif not got.close_to(expected):
            raise _Broken(
                f"valid_until({first}) is {until:g}: expected the same frequencies from {first:,} "
                f"tokens to {until:,.0f}, got others at {length:,}"
            )


def _require_plain_start(method: Method, geometry: Geometry) -> None:
    plain = Frequencies(geometry.inv_freq())
    for length in range(1, geometry.trained_length + 1):
        if not method.frequencies_at(geometry, length).close_to(plain):
            raise _Broken(
                "expected the checkpoint's own frequencies and an attention factor of 1 up to "
                f"{geometry.trained_length:,} tokens, got others at {length:,}"
            )


# -- position maps ---------------------------------------------------------------------------------


def _mapped(
    position_map: PositionMap, geometry: Geometry, start: int = 0, stop: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how often queries from `start` meet each key, and the least and largest positions."""
    reach = position_map.reach(geometry.trained_length)
    longest = min(position_map.longest_text(reach), _TIMES * reach)
    stop = int(longest) if stop is None else min(stop, int(longest))
    queries, keys = torch.arange(start, stop), torch.arange(int(longest))
    count = torch.zeros(len(queries), len(keys), dtype=torch.int)
    least = torch.full(count.shape, math.inf, dtype=torch.float64)
    largest = -least
    for region in position_map.regions(queries, keys, reach, stop - 1):
        is_met = (keys >= region.start[:, None]) & (keys < region.stop[:, None])
        query, key = queries.double()[:, None], keys.double()[:, None]
        if region.query_shift is not None:
            query = query + region.query_shift.reshape(len(queries), -1)
        if region.key_shift is not None:
            key = key + region.key_shift.reshape(len(keys), -1)
        distances = query[:, None] - key[None]  # [Q, K, parts]
        count += is_met
        least = torch.where(is_met, torch.minimum(least, distances.amin(-1)), least)
        largest = torch.where(is_met, torch.maximum(largest, distances.amax(-1)), largest)
    return count, least, largest


def _require_past(method: Method, geometry: Geometry) -> None:
    assert isinstance(method, PositionMap)
    count, _, _ = _mapped(method, geometry)
    if len(later := count.triu(1).nonzero()):
        query, key = later[0].tolist()
        raise _Broken(
            f"expected query {query} to meet keys up to {query}, got key {key}, which is later"
        )
    if len(twice := (count > 1).nonzero()):
        query, key = twice[0].tolist()
        raise _Broken(
            f"expected query {query} to meet key {key} once, got it in {count[query, key]} regions"
        )
    if len(alone := (count.diagonal() == 0).nonzero()):
        raise _Broken(f"expected query {alone[0, 0]} to meet its own key, got no region with it")


def _require_reach(method: Method, geometry: Geometry) -> None:
    assert isinstance(method, PositionMap)
    reach = method.reach(geometry.trained_length)
    # Some parts of the pairs may leave the reach (`dpe`), but not all.
    count, least, _ = _mapped(method, geometry)
    is_past = (count > 0).tril()  # later keys have a rule of their own
    if len(far := (is_past & ((least < 0) | (least >= reach))).nonzero()):
        query, key = far[0].tolist()
        raise _Broken(
            f"expected positions from 0 to below {reach:,}, which the frequencies reach, got "
            f"{least[query, key]:g} between query {query} and key {key}"
        )


def _require_no_chunks(method: Method, geometry: Geometry) -> None:
    assert isinstance(method, PositionMap)
    whole = _mapped(method, geometry)
    for start in range(0, len(whole[0]), _CHUNK):
        chunk = _mapped(method, geometry, start, start + _CHUNK)
        for part, one_pass in zip(chunk, whole, strict=True):
            differs = part != one_pass[start : start + _CHUNK]
            if len(others := differs.nonzero()):
                query, key = others[0].tolist()
                raise _Broken(
                    f"expected query {start + query} to meet key {key} as in one pass, got it "
                    f"otherwise in a chunk of the queries from {start} to {start + _CHUNK - 1}"
                )
