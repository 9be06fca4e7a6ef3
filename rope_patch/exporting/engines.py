"""The engines that a rotation can be exported to: our own, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rope_patch.exporting import axolotl, llama_cpp, llama_factory, mlx, sglang, transformers, vllm
from rope_patch.exporting.target import Export, Target
from rope_patch.utils.errors import Refused, did_you_mean
from rope_patch.utils.plugins import PluginGroup

_EXPORTERS: dict[str, Callable[[Target], Export]] = {
    "transformers": transformers.export,
    "transformers4": transformers.export_v4,
    "vllm": vllm.export,
    "sglang": sglang.export,
    "llama.cpp": llama_cpp.export,
    "mlx": mlx.export,
    "mlx-vlm": mlx.export_vlm,
}
ENGINES = tuple(_EXPORTERS)
_TRAINERS: dict[str, Callable[[Target], Export]] = {
    "axolotl": axolotl.export,
    "llama-factory": llama_factory.export,
}
TRAINERS = tuple(_TRAINERS)
_EXPORTERS |= _TRAINERS
_GROUP = PluginGroup("rope_patch.engines")


def require_engine(engine: str) -> None:
    """Raise ValueError unless it is in `ENGINES` or `TRAINERS`, or of an installed package."""
    if engine in _EXPORTERS or engine in _GROUP.names():
        return
    names = [*_EXPORTERS, *_GROUP.names()]
    hint = did_you_mean(engine, names, cutoff=0.5)
    raise Refused(f"unknown engine {engine!r}{hint}: expected {', '.join(names)}")


def serving_engines(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the engines that a request names, each once.

    Args:
        names: Engines that serve models; a text has them by commas.

    Raises:
        ValueError: A name is unknown, or a trainer's.
    """
    words = names.split(",") if isinstance(names, str) else names
    engines = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    for engine in engines:
        require_engine(engine)
        if engine in TRAINERS:
            expected = ", ".join([*ENGINES, *_GROUP.names()])
            raise Refused(f"{engine} trains models, and serves none: expected {expected}")
    return engines


def run_exporter(engine: str, target: Target) -> Export:
    """Return what an engine's exporter makes of a target.

    Raises:
        ValueError: The engine is unknown or has no form for the rotation; or its package is broken
            (names the package and the entry point).
    """
    require_engine(engine)
    if engine in _EXPORTERS:
        return _EXPORTERS[engine](target)
    outside: Any = _GROUP.load(engine)
    name, exporter = getattr(outside, "NAME", None), getattr(outside, "export", None)
    if name != engine or not callable(exporter):
        raise Refused(
            f"{_GROUP.describe(engine)}: expected a module or an object with NAME = {engine!r} and "
            f"a function export(target), got NAME = {name!r} and export = {exporter!r}"
        )
    result = exporter(target)
    if not isinstance(result, Export):
        raise Refused(
            f"{_GROUP.describe(engine)}: export(target) must return a "
            f"rope_patch.exporting.Export, got {type(result).__name__}"
        )
    return result
