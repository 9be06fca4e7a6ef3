"""Measurement of a trained model at all test lengths, as trained and extended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rope_patch.lab.settings import LabSettings
from rope_patch.lab.task import Task
from rope_patch.patching.entry_points import patch

PLAIN = "plain"
LOG_N, SCALE = "log-n", "scale-1.2"
# Temperatures of a decoder without positions; log-n is 1 up to the trained length.
_TEMPERATURES: dict[str, float | str] = {LOG_N: "log-n", SCALE: 1.2}
# What `rope_patch.patch` does to a trained model of an encoding.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "none": (LOG_N, SCALE),
    "sinusoidal": ("ntk", "linear"),
    "learned": ("linear", "tile"),
    "t5": ("log-tail", "linear"),
    "alibi": ("ntk", "linear"),
    "rope": ("yarn", "linear"),
    "rnope": ("yarn",),
}


@dataclass(frozen=True)
class Variant:
    """A trained model at one test length.

    Attributes:
        method: A method of `rope_patch.patch`, or "plain".
        length: Tokens of the texts.
        target: The length that the method extends to; the trained one if plain.
    """

    method: str
    length: int
    target: int


def variants(encoding: str, settings: LabSettings) -> list[Variant]:
    """Return what is measured of an encoding.

    Each extension is measured at the lengths that it extends to, and the farthest one also within
    the trained length, which is its price. A learned table has no rows beyond that length.
    """
    trained, tests = settings.length, settings.tests
    plain = [Variant(PLAIN, n, trained) for n in tests if n == trained or encoding != "learned"]
    extended = []
    for method in EXTENSIONS.get(encoding, ()):
        if tests[-1] > trained and method != LOG_N:
            extended.append(Variant(method, trained, tests[-1]))
        extended += [Variant(method, n, n) for n in tests if n > trained]
    return plain + extended


def measure(
    model: Any,
    encoding: str,
    task: Task,
    settings: LabSettings,
    report: Callable[[int], object],
) -> list[dict[str, Any]]:
    """Return the scores of all variants of a trained model, which is as before afterwards.

    Args:
        model: The trained model, in eval mode.
        encoding: Its encoding.
        task: Its task.
        settings: Lengths.
        report: Called with the tokens that each variant has read.
    """
    records = []
    for variant in variants(encoding, settings):
        with _extended(model, variant, settings.length):
            scores = task.measure(model, variant.length)
        records.append(
            {
                "method": variant.method,
                "length": variant.length,
                "target": variant.target,
                **scores,
            }
        )
        report(task.test_tokens(variant.length))
    return records


@contextlib.contextmanager
def _extended(model: Any, variant: Variant, trained: int) -> Iterator[None]:
    """Apply a variant's method within the block."""
    method = variant.method
    if method == PLAIN:
        yield
        return
    if method in _TEMPERATURES:
        temperature = _TEMPERATURES[method]
        handle = patch(model, "nope", temperature=temperature, trained_length=trained)
    else:
        handle = patch(model, method, length=variant.target, trained_length=trained)
    try:
        yield
    finally:
        handle.undo()
