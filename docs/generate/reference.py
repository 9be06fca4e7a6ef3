"""Render the API reference: one mkdocstrings block for each public name, where it is defined."""

from __future__ import annotations

import inspect
from types import ModuleType

import rope_patch
import rope_patch.ops

_HEAD = """# Reference

The public names of rope_patch, from their docstrings. `rope_patch.__all__` lists them.
"""

_OPS = """## Operations

What the kernels of `rope_patch.ops` do, for attention of your own.
"""

_BLOCK = """::: {path}
    options:
      heading: {heading}
      toc_label: {name}
      heading_level: {level}
"""


def render() -> str:
    """Return the page's Markdown."""
    return "\n".join(
        [_HEAD, *_blocks(rope_patch, level=2), _OPS, *_blocks(rope_patch.ops, level=3)]
    )


def _blocks(package: ModuleType, level: int) -> list[str]:
    """Return a block for each public function, then for each public class, of a package.

    The modules that define them are resolved at build time, because a package imports its public
    names lazily, where a static reader does not find them.
    """
    public = {name: getattr(package, name) for name in package.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    return [
        _BLOCK.format(
            path=f"{value.__module__}.{value.__qualname__}",
            heading=f"{package.__name__}.{name}",
            name=name,
            level=level,
        )
        for name, value in {**functions, **classes}.items()
    ]
