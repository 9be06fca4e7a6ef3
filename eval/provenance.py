"""What was run, on what, with what: enough to run it again and to tell two runs apart."""

from __future__ import annotations

import hashlib
import platform
import sys
from datetime import datetime, timezone
from typing import Any

import torch

from rope_patch.versions import version

_SAMPLED = 256  # elements of each tensor that the fingerprint looks at


def fingerprint(model: Any) -> str:
    """Tells weights apart, in a second even for large models.

    Every tensor's name, shape, dtype and some of its elements, evenly spread; tensors that are
    offloaded to disk count by name and shape alone.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().flatten()
            step = max(1, flat.numel() // _SAMPLED)
            digest.update(flat[::step].double().cpu().numpy().tobytes())
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def versions() -> dict[str, str]:
    """Versions of what the results depend on."""
    found = {"python": platform.python_version()}
    for package in ("rope-patch", "transformers", "torch", "lm-eval"):
        found[package.replace("-", "_")] = version(package)
    return found


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def peak_memory() -> int:
    """The most memory that was held at once, in bytes: the GPU's if there is one, else ours."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
