"""What a recommendation chooses from: methods, and by which rotations they have to be measured.

A method that follows the length is no other rotation: at the target length it is a static method's,
and within the trained length the model's own. So nothing is measured for it but what neither has.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rope_patch.exporting import ENGINES, export
from rope_patch.methods import build, registered_methods
from rope_patch.patching import check, patch
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies import base

PLAIN = "plain"
# In the order in which they are measured, should the budget end before all are.
STATIC_METHODS = ("yarn", "ntk-by-parts", "ntk", "llama3", "linear")
_PREFERRED_ENGINES = ("vllm", "llama.cpp", "transformers")
_DYNAMIC_NAMES = {"ntk": "dynamic"}  # the others: dynamic- and their name


@dataclass(frozen=True)
class VariantRotation:
    """One rotation of sequences of some length.

    Attributes:
        candidate: The static method that rotates so; None for the model as it is.
        factor: That method's.
    """

    candidate: Candidate | None = None
    factor: float = 1.0

    @property
    def key(self) -> str:
        """Tells rotations apart."""
        if self.candidate is None:
            return PLAIN
        said = [self.candidate.method, self.candidate.options, self.factor]
        return json.dumps(said, sort_keys=True)


UNPATCHED = VariantRotation()


@dataclass(frozen=True)
class Variant:
    """A method to choose from.

    Attributes:
        name: What it is called in tables.
        method: As `rope_patch.patch` takes it; None for the model as it is.
        options: Its options, without factor and length.
        long_rotation: How it rotates sequences of the target length.
        short_rotation: How it rotates those within the trained length.
        dynamic: Whether these differ.
        from_search: Whether it was found by a search.
    """

    name: str
    method: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    long_rotation: VariantRotation = UNPATCHED
    short_rotation: VariantRotation = UNPATCHED
    dynamic: bool = False
    from_search: bool = False

    @property
    def option_count(self) -> int:
        """How many numbers it needs besides the length; -1 for the plain model."""
        if self.method is None:
            return -1
        values = self.options.values()
        return sum(len(value) if isinstance(value, list | tuple) else 1 for value in values)


def standard_variants(space: SearchSpace) -> list[Variant]:
    """The plain model, the static methods, and these following the length."""
    found = [Variant(PLAIN)]
    statics = [name for name in STATIC_METHODS if name != "ntk" or space.pairs > 1]
    for name in statics:
        rotation = VariantRotation(Candidate(name, name), space.factor)
        found.append(Variant(name, name, {}, rotation, rotation))
    return found + [_dynamic_variant(space, name, {}) for name in statics]


def search_variants(space: SearchSpace, strategy: str, candidate: Candidate) -> list[Variant]:
    """The forms that a candidate of a search can be used in.

    For all lengths alike; for sequences beyond the trained length only, where within it nothing but
    the attention factor is changed; and following the length, if its method can.
    """
    options = dict(candidate.options)
    if candidate.method == "longrope":
        options["short_factor"] = options["long_factor"]
    name = f"searched ({strategy})"
    static = Candidate(candidate.origin, candidate.method, options)
    everywhere = VariantRotation(static, space.factor)
    kept = {
        "long_factor": candidate.stretch(space),
        "attention_factor": candidate.attention_factor(space),
    }
    if start := candidate.options.get("start_tokens"):
        kept["start_tokens"] = start
    leaves = kept["attention_factor"] == 1 and not start
    beyond = VariantRotation(Candidate(candidate.origin, "longrope", kept), space.factor)
    found = [
        Variant(name, candidate.method, options, everywhere, everywhere, from_search=True),
        # Of the same rotation beyond the trained length, so measured there by the first.
        Variant(
            f"{name}, short kept",
            "longrope",
            kept,
            everywhere,
            UNPATCHED if leaves else beyond,
            dynamic=True,
            from_search=True,
        ),
    ]
    if candidate.method == "yarn":
        found.append(_dynamic_variant(space, "yarn", options, f"{name}, dynamic", searched=True))
    return found


def rotation_key(space: SearchSpace, rotation: VariantRotation) -> tuple[object, ...]:
    """What a model would tell rotations apart by, but for rounding."""
    if rotation.candidate is None:
        return ()
    return base.rotation_key(replace(space, factor=rotation.factor), rotation.candidate)


def refusal_reason(
    model: Any, entry: Variant, space: SearchSpace, asked: Mapping[str, Any]
) -> str | None:
    """Why a model cannot have a method, or None."""
    if entry.method is None:
        return None
    try:
        check(model, entry.method, length=space.length, **asked, **entry.options)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def native_engines(
    model: Any, entry: Variant, space: SearchSpace, asked: Mapping[str, Any]
) -> tuple[str, ...]:
    """Which engines rotate as a method does, without this package."""
    if entry.method is None:
        return _exporting_engines(model)
    arguments = {**asked, **entry.options}
    with patch(model, entry.method, length=space.length, kernels="hf", **arguments):
        return _exporting_engines(model)


def patch_call(
    entry: Variant, space: SearchSpace, asked: Mapping[str, Any], folder: str | None
) -> str:
    """The line that applies it."""
    if entry.method is None:
        return ""
    if entry.method == "longrope" and entry.dynamic and folder is not None:
        return f"rope_patch.patch(model, 'longrope', **rope_patch.SearchResult.load({folder!r}))"
    said = {"length": space.length, **_explicit_arguments(asked), **entry.options}
    written = "".join(f", {name}={value!r}" for name, value in said.items())
    return f"rope_patch.patch(model, {entry.method!r}{written})"


def export_command(
    entry: Variant,
    space: SearchSpace,
    asked: Mapping[str, Any],
    model: str,
    runs: tuple[str, ...],
) -> str:
    """The command that says what an engine is to be given; empty where none is needed or fits.

    Args:
        entry: What is to be applied.
        space: How far.
        asked: `trained_length`, `layer_types` and `start` of `rope_patch.patch`.
        model: The model's name.
        runs: The engines that run it; the command is for the first that people serve with.
    """
    engine = next((name for name in _PREFERRED_ENGINES if name in runs), None)
    if entry.method is None or engine is None:
        return ""
    words = ["rope-patch", "export", model, "--engine", engine, "--method", entry.method]
    words += ["--length", str(space.length)]
    for name, value in _explicit_arguments(asked).items():
        if name == "layer_types":
            return ""  # the command has no such option
        words += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in entry.options.items():
        words += ["--option", f"{name}={json.dumps(value)}"]
    return shlex.join(words)


def _dynamic_variant(
    space: SearchSpace, name: str, options: dict[str, Any], called: str = "", searched: bool = False
) -> Variant:
    method = _DYNAMIC_NAMES.get(name, f"dynamic-{name}")
    assert method in registered_methods(), method
    trained = space.geometry.trained_length
    factor = build(method).valid_until(space.length, trained) / trained
    if abs(factor / space.factor - 1) < 1e-3:
        factor = space.factor  # a step that ends at the target, but for rounding it to tokens
    rotation = VariantRotation(Candidate(name, name, options), factor)
    return Variant(
        called or method, method, options, rotation, UNPATCHED, dynamic=True, from_search=searched
    )


def _exporting_engines(model: Any) -> tuple[str, ...]:
    found = []
    for engine in ENGINES:
        try:
            export(model, engine)
        except ValueError:
            continue
        found.append(engine)
    return tuple(found)


def _explicit_arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for and is not what `patch` takes by itself."""
    return {k: v for k, v in asked.items() if v is not None and (k, v) != ("start", "auto")}
