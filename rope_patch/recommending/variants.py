"""The variants that a recommendation chooses from, and the rotations to measure for each.

A length-dependent method has no rotation of its own: at the target length it rotates as a static
method, and within the trained length as the unpatched model. So it shares their measurements. A
position map, too, is the unpatched model within the trained length.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from rope_patch.entry_points import check, patch
from rope_patch.exporting import engine_refusals
from rope_patch.extension import Extension
from rope_patch.methods import build, registered_methods
from rope_patch.methods.origin import plugin_file
from rope_patch.methods.registry import get_method, outside_methods
from rope_patch.searching.candidates import Candidate, SearchSpace
from rope_patch.searching.strategies.base import KEY_DIGITS
from rope_patch.utils.errors import Refused

PLAIN = "plain"
# In the order of measuring, since the budget may end before all are measured.
STATIC_METHODS = ("yarn", "ntk-by-parts", "ntk", "llama3", "linear")
MAPS = ("self-extend", "jet-long", "rerope")
_PREFERRED_ENGINES = ("vllm", "llama.cpp", "transformers")
_DYNAMIC_NAMES = {"ntk": "dynamic"}  # dynamic forms by method; all others are dynamic-NAME


@dataclass(frozen=True)
class VariantRotation:
    """The rotation of sequences of some length.

    Attributes:
        candidate: The static method with this rotation; None for the unpatched model.
        factor: The method's factor.
        numbers: The frequencies of a method that is not ours: its file may change.
    """

    candidate: Candidate | None = None
    factor: float = 1.0
    numbers: tuple[object, ...] = ()

    @property
    def key(self) -> str:
        """Return the rotation's key in the journal: its method, options and factor.

        The request, not `Frequencies.key`: journals of earlier releases have it.
        """
        if self.candidate is None:
            return PLAIN
        request = [self.candidate.method, self.candidate.options, self.factor]
        request += [self.numbers] if self.numbers else []
        return json.dumps(request, sort_keys=True)


UNPATCHED = VariantRotation()


@dataclass(frozen=True)
class Variant:
    """A method with options, to choose from.

    Attributes:
        name: The name in tables.
        method: As `rope_patch.patch` takes it; None for the unpatched model.
        options: The method's options, without factor and length.
        long_rotation: The rotation of sequences of the target length.
        short_rotation: The rotation of sequences within the trained length.
        dynamic: Whether the two rotations differ.
        from_search: Whether it is the result of a search.
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
        """Return how many numbers it needs besides the length; -1 for the plain model."""
        if self.method is None:
            return -1
        values = self.options.values()
        return sum(len(value) if isinstance(value, list | tuple) else 1 for value in values)


def standard_variants(space: SearchSpace) -> list[Variant]:
    """Return the plain model, static methods, position maps, and dynamic forms of the static."""
    names = [name for name in STATIC_METHODS if name != "ntk" or space.pairs > 1]
    rotations = {
        name: VariantRotation(Candidate(name, name), space.factor) for name in (*names, *MAPS)
    }
    static = [Variant(name, name, {}, rotations[name], rotations[name]) for name in names]
    maps = [Variant(name, name, {}, rotations[name], dynamic=True) for name in MAPS]
    dynamic = [_dynamic_variant(space, name, {}) for name in names]
    first, *others = static
    return [Variant(PLAIN), first, *maps, *others, *_outside_variants(space), *dynamic]


def _outside_variants(space: SearchSpace) -> list[Variant]:
    """Return the imported methods that are not ours, as far as they are static by themselves."""
    variants = []
    for name, method_class in outside_methods().items():
        needs_options = any(option.default is MISSING for option in fields(method_class))
        if needs_options or method_class.is_dynamic:
            continue
        method = build(name, factor=space.factor)
        if method.is_length_dependent(space.geometry.trained_length):
            continue
        candidate = Candidate(name, name)
        rotation = VariantRotation(
            candidate, space.factor, candidate.rotation_key(space, KEY_DIGITS)
        )
        variants.append(Variant(name, name, {}, rotation, rotation))
    return variants


def search_variants(space: SearchSpace, strategy: str, candidate: Candidate) -> list[Variant]:
    """Return the variants of a search's best candidate.

    The first variant applies to all lengths alike. The second applies beyond the trained length;
    within it, only the attention factor changes. A dynamic variant is added if the candidate is
    YaRN.

    Args:
        space: The space of the search.
        strategy: The strategy that proposed the candidate.
        candidate: The candidate.
    """
    options = dict(candidate.options)
    if candidate.method == "longrope":
        options["short_factor"] = options["long_factor"]
    name = f"searched ({strategy})"
    static = Candidate(candidate.origin, candidate.method, options)
    all_lengths = VariantRotation(static, space.factor)
    long_only = {
        "long_factor": candidate.stretch(space),
        "attention_factor": candidate.attention_factor(space),
    }
    if start := candidate.options.get("start_tokens"):
        long_only["start_tokens"] = start
    leaves_short = long_only["attention_factor"] == 1 and not start
    beyond_trained = VariantRotation(
        Candidate(candidate.origin, "longrope", long_only), space.factor
    )
    variants = [
        Variant(name, candidate.method, options, all_lengths, all_lengths, from_search=True),
        # Beyond the trained length it rotates as the first variant, and is measured with it.
        Variant(
            f"{name}, short kept",
            "longrope",
            long_only,
            all_lengths,
            UNPATCHED if leaves_short else beyond_trained,
            dynamic=True,
            from_search=True,
        ),
    ]
    if candidate.method == "yarn":
        variants.append(_dynamic_variant(space, "yarn", options, f"{name}, dynamic", searched=True))
    return variants


def rotation_key(space: SearchSpace, rotation: VariantRotation) -> tuple[object, ...]:
    """Return a key that is equal for rotations that differ by rounding only."""
    if rotation.candidate is None:
        return ()
    return rotation.candidate.rotation_key(replace(space, factor=rotation.factor), KEY_DIGITS)


def refusal_reason(model: Any, variant: Variant, extension: Extension) -> str | None:
    """Return why a model cannot be patched with a variant, or None."""
    if variant.method is None:
        return None
    try:
        check(model, replace(extension, method=variant.method, options=variant.options))
    except Refused as error:
        return str(error)
    return None


def export_refusals(
    model: Any, variant: Variant, extension: Extension, engines: Sequence[str]
) -> dict[str, str]:
    """Return why engines cannot run a variant without this package, by engine.

    Args:
        model: The unpatched model, with or without weights.
        variant: The variant.
        extension: The request, without the variant's method and options.
        engines: The engines to ask.
    """
    if variant.method is None:
        return engine_refusals(model, engines)
    request = replace(extension, method=variant.method, options=variant.options, kernels="hf")
    with patch(model, request):
        return engine_refusals(model, engines)


def require_servable(
    model: Any, space: SearchSpace, extension: Extension, engines: Sequence[str]
) -> None:
    """Raise unless one of the standard variants runs in all engines.

    Args:
        model: See `export_refusals`.
        space: The rotation that is extended, and the target.
        extension: See `export_refusals`.
        engines: The engines that a request names.

    Raises:
        ValueError: Names the engines, and why the first method does not run there.
    """
    first: dict[str, str] = {}
    for variant in standard_variants(space):
        if variant.method is None or refusal_reason(model, variant, extension) is not None:
            continue
        refusals = export_refusals(model, variant, extension, engines)
        if not refusals:
            return
        first = first or refusals
    reasons = "; ".join(first.values())
    raise Refused(
        f"no method that is measured here runs in {' and '.join(engines)}"
        + (f": {reasons}" if reasons else "")
        + ". Name other engines, or none"
    )


def patch_call(variant: Variant, extension: Extension, folder: str | None) -> str:
    """Return the Python line that applies a variant; empty for the plain model."""
    if variant.method is None:
        return ""
    if variant.method == "longrope" and variant.dynamic and folder is not None:
        return f"rope_patch.patch(model, 'longrope', **rope_patch.SearchResult.load({folder!r}))"
    arguments = extension.arguments() | variant.options
    written = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return f"rope_patch.patch(model, {variant.method!r}{written})"


def export_command(
    variant: Variant,
    extension: Extension,
    model: str,
    engines: tuple[str, ...],
) -> str:
    """Return the export command for an engine; empty if there is none that fits.

    Args:
        variant: The variant to apply.
        extension: The request, without the variant's method and options.
        model: The model's name.
        engines: The engines that run it; the command is for the first that people serve with.
    """
    engine = next((name for name in (*_PREFERRED_ENGINES, *engines) if name in engines), None)
    if variant.method is None or engine is None:
        return ""
    words = ["rope-patch", "export", model, "--engine", engine, "--method", variant.method]
    for name, value in extension.arguments().items():
        if name == "layer_types":
            return ""  # the command has no such option
        word = f"--{name.replace('_', '-')}"
        words += [word] if value is True else [word, str(value)]
    for name, value in variant.options.items():
        words += ["--option", f"{name}={json.dumps(value)}"]
    if plugin := plugin_file(get_method(variant.method)):
        words += ["--plugin", plugin]
    return shlex.join(words)


def _dynamic_variant(
    space: SearchSpace,
    name: str,
    options: dict[str, Any],
    display_name: str = "",
    searched: bool = False,
) -> Variant:
    method = _DYNAMIC_NAMES.get(name, f"dynamic-{name}")
    assert method in registered_methods(), method
    trained = space.geometry.trained_length
    factor = build(method).valid_until(space.length, trained) / trained
    if abs(factor / space.factor - 1) < 1e-3:
        factor = space.factor  # the step ends at the target, up to rounding to tokens
    rotation = VariantRotation(Candidate(name, name, options), factor)
    return Variant(
        display_name or method,
        method,
        options,
        rotation,
        UNPATCHED,
        dynamic=True,
        from_search=searched,
    )
