"""Compare every method with transformers, or with its formula if transformers has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import formulas
import hf_rotation
from formulas import Rotation
from helpers.method_names import position_maps
from published import Published

import rope_patch

FACTORS = (2.0, 4.0, 32.0)
LENGTHS = (0.5, 1.0, 1.5, 3.7)  # in trained lengths, for length-dependent methods


@dataclass(frozen=True)
class Pair:
    """One rotation, computed by us and by a reference."""

    ours: Rotation
    theirs: Rotation

    def difference(self) -> float:
        """Return the largest relative difference of a frequency or the attention factor."""
        return max(self.of_frequency(), self.of_attention())

    def of_frequency(self) -> float:
        return difference(self.ours[0], self.theirs[0])

    def of_attention(self) -> float:
        return difference([self.ours[1]], [self.theirs[1]])


def difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference relative to ours; 1 if ours is 0 and theirs is not."""
    if len(ours) != len(theirs):
        raise ValueError(f"expected {len(ours)} pairs, got {len(theirs)}")
    return max(
        (abs(b - a) / abs(a) if a else float(b != 0)) for a, b in zip(ours, theirs, strict=True)
    )


def ours(method: str, model: Published, **options: Any) -> Rotation:
    frequencies = rope_patch.frequencies(method, **model.numbers(), **options)
    return frequencies.inv_freq.tolist(), frequencies.attention_factor


def is_map(method: str) -> bool:
    """Return whether a method changes positions and leaves frequencies to the method below it."""
    return method in position_maps()


def stretches(model: Published, factor: float) -> list[float]:
    """Return per-pair factors from 1 for the fastest pair to `factor` for the slowest."""
    pairs = model.rotary_dim // 2
    return [factor ** (i / (pairs - 1)) for i in range(pairs)]


def source(method: str, model: Published) -> str:
    """Return the reference of a method: transformers, or its formula if transformers has none.

    The formula of "golden" is itself compared with vectors of its authors' code.
    """
    if method.endswith("ntk-by-parts-2023-06"):
        return "golden"
    if method.startswith("clipped"):
        return "formula"
    if method == "nope" or (method == "proportional" and model.rotary_dim < model.head_dim):
        return "formula"  # transformers' proportional rotates whole heads
    return "transformers"


@cache
def largest_difference(method: str, model: Published) -> float:
    """Return the largest difference of a method's pairs on a model, computed once.

    Raises:
        NotImplementedError: This version of transformers lacks the scaling.
    """
    return max(pair.difference() for pair in pairs(method, model))


def pairs(method: str, model: Published) -> Iterator[Pair]:
    """Yield pairs of our rotation and the reference's, for a method on a model.

    Raises:
        NotImplementedError: This version of transformers lacks the scaling.
    """
    plain = _theirs("default", model, 1.0)
    length = model.trained_length
    if method == "default":
        yield Pair(ours(method, model), plain)
        return
    if is_map(method):  # positions change, and frequencies are those of `on`
        options = {"groups": [2]} if method == "dpe" else {}
        yield Pair(ours(method, model, **options), plain)
        for factor in FACTORS:
            got = ours(method, model, on=f"yarn:{factor}", **options)
            yield Pair(got, _theirs("yarn", model, factor))
        return
    if method.startswith("dynamic"):
        inner = {"dynamic": "ntk"}.get(method, method.removeprefix("dynamic-"))
        for ratio in LENGTHS:
            tokens = int(ratio * length)
            got = ours(method, model, seq_len=tokens)
            yield Pair(got, _theirs(inner, model, tokens / length) if ratio > 1 else plain)
        if method == "dynamic":  # with transformers' factor
            got = ours(method, model, factor=2.0, seq_len=3 * length)
            yield Pair(got, hf_rotation.rotation(model, "dynamic", 3 * length, factor=2.0))
        return
    inner = method.removeprefix("mixed-")
    for factor in FACTORS:
        options = _options(inner, model, factor)
        yield Pair(ours(method, model, factor=factor, **options), _theirs(inner, model, factor))
        if inner != method:
            yield Pair(ours(method, model, factor=factor, seq_len=length, **options), plain)
    yield from _pairs_with_options(method, model)


def _options(method: str, model: Published, factor: float) -> dict[str, Any]:
    return {"long_factor": stretches(model, factor)} if method == "longrope" else {}


@cache  # mixed and dynamic methods, and maps, are held against the same
def _theirs(method: str, model: Published, factor: float) -> Rotation:
    """Return transformers' rotation for a static method at a factor."""
    length = model.trained_length
    if method == "default":
        return hf_rotation.rotation(model, "default")
    if method == "linear":
        return hf_rotation.rotation(model, "linear", factor=factor)
    if method == "ntk":  # dynamic scaling, at the length whose factor this is
        return hf_rotation.rotation(model, "dynamic", round(factor * length), factor=1.0)
    if method == "ntk-by-parts":
        return hf_rotation.rotation(model, "yarn", factor=factor, attention_factor=1.0)
    if method == "yarn":
        return hf_rotation.rotation(model, "yarn", factor=factor)
    if method == "llama3":
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return hf_rotation.rotation(model, "llama3", full=2**30, factor=factor, **more)
    if method == "abf":
        theta = formulas.critical_base(model, factor)
        return hf_rotation.rotation(model, "default", rope_theta=theta)
    if method == "longrope":
        both = {"long_factor": stretches(model, factor), "short_factor": [1.0] * _pairs(model)}
        return hf_rotation.rotation(model, "longrope", length + 1, factor=factor, **both)
    if method == "proportional":
        return _theirs_proportional(model, 0.75)
    if method == "nope":
        return formulas.proportional(model, 0.0)
    if method == "ntk-by-parts-2023-06":
        return formulas.by_parts_2023_06(model, factor)
    if method.startswith("clipped"):
        return formulas.clipped(_unclipped(method, model, factor), round(_pairs(model) * 20 / 64))
    raise ValueError(f"{method} is held against nothing: add it to comparison.py")


def _unclipped(method: str, model: Published, factor: float) -> Rotation:
    """Return the rotation that a clipped method clips."""
    if method == "clipped-abf":
        return formulas.default(model, formulas.critical_base(model, factor))
    return formulas.yarn(model, factor) if method == "clipped-yarn" else formulas.default(model)


def _pairs(model: Published) -> int:
    return model.rotary_dim // 2


def _theirs_proportional(model: Published, share: float) -> Rotation:
    if source("proportional", model) == "formula":
        return formulas.proportional(model, share)
    if not hf_rotation.has("proportional"):
        raise NotImplementedError("this version of transformers has no proportional scaling")
    return hf_rotation.rotation(model, "proportional", partial_rotary_factor=share)


def _pairs_with_options(method: str, model: Published) -> Iterator[Pair]:
    """Yield pairs of rotations with options other than the defaults."""
    length = model.trained_length
    if method == "yarn":
        for more in (
            {"beta_fast": 128.0, "beta_slow": 2.0},
            {"attention_factor": 1.25},
            {"mscale": 0.707, "mscale_all_dim": 1.0},
            {"mscale": 0.707},
        ):
            theirs = hf_rotation.rotation(model, "yarn", factor=4.0, **more)
            yield Pair(ours(method, model, factor=4.0, **more), theirs)
        # With several layer types, transformers ignores `truncate`: see the disagreements.
        theirs = formulas.yarn(model, 4.0, truncate=False)
        if model.layer_type is None:
            theirs = hf_rotation.rotation(model, "yarn", factor=4.0, truncate=False)
        yield Pair(ours(method, model, factor=4.0, truncate=False), theirs)
    elif method == "llama3":
        more = {"low_freq_factor": 2.0, "high_freq_factor": 8.0}
        theirs = hf_rotation.rotation(model, "llama3", full=2**30, factor=8.0, **more)
        yield Pair(ours(method, model, factor=8.0, **more), theirs)
    elif method == "longrope":
        both = {"long_factor": stretches(model, 8.0), "short_factor": stretches(model, 2.0)}
        for tokens in (length, length + 1):
            theirs = hf_rotation.rotation(model, "longrope", tokens, factor=8.0, **both)
            yield Pair(ours(method, model, factor=8.0, seq_len=tokens, **both), theirs)
    elif method == "proportional":
        theirs = _theirs_proportional(model, 0.25)
        yield Pair(ours(method, model, factor=4.0, partial_rotary_factor=0.25), theirs)
    elif method.startswith("clipped"):
        for count in (2, _pairs(model)):
            theirs = formulas.clipped(_unclipped(method, model, 4.0), count)
            yield Pair(ours(method, model, factor=4.0, clipped_pairs=count), theirs)
    elif method == "abf":
        theirs = hf_rotation.rotation(model, "default", rope_theta=8e6)
        yield Pair(ours(method, model, factor=4.0, new_theta=8e6), theirs)
