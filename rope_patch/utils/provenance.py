"""Provenance of a run: weights, versions, hardware and time, to repeat it and tell runs apart."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

import torch

from rope_patch.utils.installation import version


class Hardware(TypedDict):
    """The machine.

    Attributes:
        cpu: The processor's name.
        cores: Cores that this process may use.
        threads: Threads of torch.
        memory: Bytes; None if the system does not tell.
        gpu: The names of the GPUs.
    """

    cpu: str
    cores: int
    threads: int
    memory: int | None
    gpu: list[str]


_SAMPLED_ELEMENTS = 256  # elements of each tensor that the fingerprint looks at


def fingerprint(model: Any) -> str:
    """Return a digest that tells weights apart, in a second even for large models.

    Every tensor's name, shape, dtype and some of its elements, evenly spread; tensors that are
    offloaded to disk count by name and shape alone.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().flatten()
            step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
            digest.update(flat[::step].double().cpu().numpy().tobytes())
    return f"sampled-sha256:{digest.hexdigest()[:32]}"


def config_fingerprint(config: Any) -> str:
    """Return a digest of what a config says of the model, wherever it was read from.

    Weights do not tell how they are used: another base of the rotation, scaling, window or softcap
    changes no tensor that is saved.
    """
    values = config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def versions() -> dict[str, str]:
    """Return the versions of what the results depend on."""
    result = {"python": platform.python_version()}
    for package in ("rope-patch", "transformers", "torch", "lm-eval"):
        result[package.replace("-", "_")] = version(package)
    return result


def git_revision() -> str | None:
    """Return the commit of this package's source in a checkout, with `+` if changed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "pyproject.toml").is_file():
        return None
    git = ["git", "-C", str(folder)]
    try:
        outputs = [
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=10, check=True)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return outputs[0].stdout.strip() + ("+" if outputs[1].stdout.strip() else "")


def hardware() -> Hardware:
    """Return the processor, the cores this process may use, memory in bytes, and the GPUs."""
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "cpu": _cpu_name() or platform.processor() or platform.machine(),
        "cores": len(cores),
        "threads": torch.get_num_threads(),
        "memory": memory,
        "gpu": [torch.cuda.get_device_name(i) for i in gpus],
    }


def _cpu_name() -> str:
    """Return the processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def now() -> str:
    """Return the time, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def peak_memory() -> int:
    """Return the peak memory in bytes: the GPU's if there is one, else this process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
