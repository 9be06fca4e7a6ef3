"""Register methods by name, and find them: our own, and those of others' files and packages."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from rope_patch.methods.base import Method
from rope_patch.utils.errors import Refused, did_you_mean
from rope_patch.utils.plugins import PluginGroup, import_passed_on

_REGISTRY: dict[str, type[Method]] = {}
_UNLISTED = ("recorded",)  # methods that a saved folder names, and no user
_GROUP = PluginGroup("rope_patch.methods")
_M = TypeVar("_M", bound=type[Method])

_NAME = re.compile(r"[A-Za-z]([\w.-]*\w)?", re.ASCII)
_RESERVED_NAMES = ("none",)  # what evaluations and recipes call the plain model
# What `rope_patch.patch` takes besides a method's options.
_PATCH_ARGUMENTS = (
    *("method", "length", "trained_length", "layer_types", "start", "kernels", "anyway", "options"),
)


def register_method(name: str, *, paper: str, training: str) -> Callable[[_M], _M]:
    """Return a class decorator that registers a method under `name`.

    The class is a frozen dataclass that derives from `rope_patch.methods.Method`. Everything then
    takes the name: `patch`, `load`, `frequencies`, the commands, evaluations and exports. A class
    may be registered again when its file is imported again.

    Args:
        name: The name that users write: letters, digits, `-`, `_` and `.`.
        paper: Source of the formula.
        training: Whether the method needs fine-tuning to work well.

    Returns:
        The decorator. It returns the class, with the three as class attributes.

    Raises:
        ValueError: The name has other characters or is another class's, or the class is no frozen
            dataclass, computes no frequencies, or has an option without a help text.
        TypeError: An argument is no text, or the decorated object is no subclass of `Method`.
    """
    for argument, value in (("name", name), ("paper", paper), ("training", training)):
        if not isinstance(value, str) or not value.strip():
            raise TypeError(f"register_method: {argument} must be a text, got {value!r}")
    if not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
        reason = "is reserved" if name in _RESERVED_NAMES else "has other characters"
        raise Refused(
            f"register_method: the name {name!r} {reason}; expected a letter, then letters, "
            "digits, '-', '_' or '.', such as 'my-method'"
        )

    def decorate(cls: _M) -> _M:
        _require_method_class(name, cls)
        other = _REGISTRY.get(name)
        if other is not None and not _same_class(other, cls):
            raise Refused(
                f"register_method: {name!r} is taken by {_describe(other)}; give "
                f"{_describe(cls)} another name"
            )
        cls.name, cls.paper, cls.training = name, paper, training
        _REGISTRY[name] = cls
        return cls

    return decorate


def registered_methods() -> dict[str, type[Method]]:
    """Return all methods by name, in order of registration; imports installed plugins."""
    import_passed_on()
    _GROUP.load_all()
    return {name: cls for name, cls in _REGISTRY.items() if name not in _UNLISTED}


def find_method(name: str) -> type[Method] | None:
    """Return the method class of that name, or None; imports plugins only for unknown names.

    Raises:
        ValueError: An installed package says that it has the method, and fails.
    """
    if name not in _REGISTRY:
        import_passed_on()
    if name not in _REGISTRY and name in _GROUP.names():
        _GROUP.load(name)
        if name not in _REGISTRY:
            raise Refused(
                f"{_GROUP.describe(name)} registered no method {name!r}; expected a class there "
                f"with @rope_patch.register_method({name!r}, ...)"
            )
    if name not in _REGISTRY:
        _GROUP.load_all()
    return _REGISTRY.get(name)


def outside_methods() -> dict[str, type[Method]]:
    """Return the methods that are not ours, of those that this process has imported."""
    import_passed_on()
    return {name: cls for name, cls in _REGISTRY.items() if is_outside(cls)}


def is_outside(method_class: type[Method]) -> bool:
    """Return whether a method is not one of ours."""
    return not method_class.__module__.startswith("rope_patch.")


def get_method(name: str) -> type[Method]:
    """Return the method class of that name.

    Raises:
        ValueError: The name is unknown; names the closest one.
        TypeError: The name is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a method is given by its name, got {name!r}")
    method_class = find_method(name)
    if method_class is None and name in ENCODING_METHODS:
        raise Refused(
            f"{name!r} extends {ENCODING_METHODS[name][0]}, and is no method for models that "
            f"rotate ({PAGE}); `rope-patch methods` lists those"
            f"{did_you_mean(name, registered_methods())}"
        )
    if method_class is None:
        names = [*registered_methods(), *ENCODING_METHODS]
        raise Refused(
            f"unknown method {name!r}{did_you_mean(name, names, 0.5)}; "
            "rope_patch.list_methods() and `rope-patch methods` list all"
        )
    return method_class


# Of `patch` and its like, beside a method's options: what a slip may have meant, too.
_ARGUMENTS = ("factor", "length", "trained_length", "layer_types", "kernels", "start", "anyway")


def build(name: str, **options: Any) -> Method:
    """Build a method from its name and options.

    Raises:
        ValueError: The name or an option is unknown (names the closest match), or one is missing.
        TypeError: A value has the wrong type.
    """
    cls = get_method(name)
    option_fields = {f.name: f for f in fields(cls)}
    for key in options:
        if key not in option_fields:
            hint = did_you_mean(key, [*option_fields, *_ARGUMENTS], 0.5)
            raise Refused(
                f"method {name!r} has no option {key!r}{hint}; "
                f"its options are: {', '.join(option_fields)}"
            )
    for key, f in option_fields.items():
        if f.default is MISSING and key not in options:
            raise Refused(f"method {name!r} needs the option {key!r}: {f.metadata['help']}")
    return cls(**options)


def _require_method_class(name: str, cls: Any) -> None:
    """Raise unless a class is what `register_method` takes."""
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise TypeError(
            f"register_method({name!r}): expected a class that derives from "
            f"rope_patch.methods.Method, got {cls!r}"
        )
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        got = "no dataclass" if parameters is None else "a dataclass that can be changed"
        raise Refused(
            f"register_method({name!r}): {cls.__qualname__} is {got}; write "
            "@dataclass(frozen=True, kw_only=True) between @register_method and the class"
        )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise Refused(
            f"register_method({name!r}): {cls.__qualname__} lacks {missing}; expected "
            "frequencies(self, geometry, seq_len=None), which returns Frequencies"
        )
    if taken := [f.name for f in fields(cls) if f.name in _PATCH_ARGUMENTS]:
        raise Refused(
            f"register_method({name!r}): the option {taken[0]!r} has the name of an argument of "
            "rope_patch.patch; give it another one"
        )
    if bare := [f.name for f in fields(cls) if "help" not in f.metadata]:
        raise Refused(
            f"register_method({name!r}): the option {bare[0]!r} has no help text; write "
            f'{bare[0]}: ... = option("what it does", default=...), of rope_patch.methods'
        )
    registered = [key for key, other in _REGISTRY.items() if other is cls and key != name]
    if registered:
        raise Refused(
            f"register_method({name!r}): {cls.__qualname__} is registered as {registered[0]!r} "
            "already; derive a second class for a second name"
        )


def _same_class(first: type, second: type) -> bool:
    """Return whether two classes are one, defined by the same lines that were executed twice."""
    if first.__qualname__ != second.__qualname__:
        return False
    files = [getattr(sys.modules.get(c.__module__), "__file__", None) for c in (first, second)]
    return files[0] == files[1] if all(files) else first.__module__ == second.__module__


def _describe(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


PAGE = "docs/other-encodings.md"

# Methods of encodings that do not rotate: what each extends, and what it does. They are formulas of
# `rope_patch.encodings.sites` and no classes, and stand here for lists and errors. Names that
# rotary methods have, too (`linear`, `ntk`, `dynamic-linear`), are left out.
ENCODING_METHODS = {
    "cubic": ("learned tables of positions", "Bicubic interpolation between trained rows."),
    "tile": ("learned tables of positions", "Trained rows, repeated."),
    "dynamic-ntk": ("ALiBi's slopes", "ntk by a factor that follows the text."),
    "log-tail": (
        "T5's buckets of distances",
        "Near distances keep their buckets; longer ones are squeezed into trained buckets.",
    ),
    "max-distance": ("T5's buckets of distances", "The last bucket begins later."),
    "dynamic-log-tail": (
        "T5's buckets of distances",
        "log-tail by a factor that follows the text.",
    ),
}
