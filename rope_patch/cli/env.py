"""The command `env`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rope_patch.cli.options import Json


def env(as_json: Json = False) -> None:
    """Show versions and hardware, for a bug report.

    Also shows the cache folder, where the demo's weights are, and its size.

    \b
    Examples:
      rope-patch env
    """
    import platform

    from rope_patch.utils.provenance import hardware
    from rope_patch.utils.versions import own_version, version

    packages = ("transformers", "torch", "triton", "accelerate", "lm-eval", "datasets", "peft")
    machine = hardware()
    facts = {
        "rope-patch": own_version(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **{package: version(package) for package in packages},
        "cpu": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads",
        "gpu": ", ".join(machine["gpu"]) or "none",
        "cache": _cache_summary(),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


def _cache_summary() -> str:
    """Return the cache folder's path and size."""
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return "none (platformdirs is not installed)"
    folder = user_cache_path("rope_patch")
    size = sum(path.stat().st_size for path in _files(folder))
    return f"{folder} ({size / 1e6:,.0f} MB)"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
