"""Comparison of plain data with a TypedDict."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def problems(value, kind, place="results"):
    """Yield where a value is not of a type: missing and unknown keys, and other types."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        by_member = [list(problems(value, member, place)) for member in get_args(kind)]
        if all(by_member):
            yield from min(by_member, key=len)
    elif is_typeddict(kind):
        yield from key_problems(value, kind, place)
    elif origin in (Mapping, dict):
        key_kind, item_kind = get_args(kind)
        if isinstance(value, dict):
            for key, item in value.items():
                yield from problems(key, key_kind, f"{place}, key {key!r}")
                yield from problems(item, item_kind, f"{place}[{key!r}]")
        else:
            yield f"{place} is a {type(value).__name__}, expected a dict"
    elif origin in (Sequence, list):
        if isinstance(value, list):
            for number, item in enumerate(value):
                yield from problems(item, get_args(kind)[0], f"{place}[{number}]")
        else:
            yield f"{place} is a {type(value).__name__}, expected a list"
    elif origin is Literal:
        if value not in get_args(kind):
            yield f"{place} is {value!r}, expected one of {get_args(kind)}"
    elif kind is float:
        if type(value) not in (int, float):
            yield f"{place} is a {type(value).__name__}, expected a float"
    elif kind not in (object, Any) and type(value) is not kind:
        yield f"{place} is a {type(value).__name__}, expected {kind}"


def key_problems(value, kind, place):
    if not isinstance(value, dict):
        yield f"{place} is a {type(value).__name__}, expected a dict"
        return
    hints = get_type_hints(kind)
    yield from (f"{place} lacks {key!r}" for key in kind.__required_keys__ - value.keys())
    yield from (f"{place} has an unknown {key!r}" for key in value.keys() - hints.keys())
    for key in value.keys() & hints.keys():
        yield from problems(value[key], hints[key], f"{place}[{key!r}]")
