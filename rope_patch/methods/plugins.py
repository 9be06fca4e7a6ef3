"""Loading of methods from a user's file or module."""

from __future__ import annotations

from rope_patch.methods.registry import outside_methods
from rope_patch.utils.errors import Refused
from rope_patch.utils.plugins import import_plugin, pass_on


def load_plugin(source: str) -> list[str]:
    """Import a file or a module that registers methods.

    Processes that are started from now on know its methods, too.

    Args:
        source: A Python file, or a module's dotted name.

    Returns:
        The names of the methods in it, also of those that it imports from elsewhere.

    Raises:
        ValueError: There is no such file or module, an exception in it (names file and line), or
            no method.
    """
    before = outside_methods()
    module = import_plugin(source)
    names = [
        name
        for name, method_class in outside_methods().items()
        if before.get(name) is not method_class or method_class in vars(module).values()
    ]
    if not names:
        raise Refused(
            f"plugin {source}: it registers no method; expected a class with "
            '@rope_patch.register_method("my-method", paper=..., training=...)'
        )
    pass_on(source)
    return names
