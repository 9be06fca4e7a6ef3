"""The check of each kernel at its first use on a device, so that wrong numbers go nowhere unseen.

The first call of an op with a new kind of tensors runs the kernels that the call needs, backward
included, on a few tokens, and compares them with float64; see `kernel_trial.py`. The compiled
kernels are those of the call itself, so the check costs milliseconds beside their compilation.
If a kernel is wrong or does not run, one warning says what to report, and the op computes such
tensors in plain torch until the process ends, forward and backward.

The trial runs in a thread of its own. There, no mode of the caller is active (gradients, inference,
autocast, dispatch modes, saved-tensor hooks, torch.compile), and its stream is none of the user's.
A stream that captures a CUDA graph allows no trial: the kernel runs unchecked, and the next call
outside of a capture checks it.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from rope_patch.ops.kernel_trial import Comparison, run_trial
from rope_patch.ops.kernel_variant import KernelVariant
from rope_patch.ops.modes import is_interpreted
from rope_patch.utils.errors import describe_error
from rope_patch.utils.versions import own_version, version

logger = logging.getLogger("rope_patch")

VARIABLE = "ROPE_PATCH_SELF_CHECK"

# Keys of calls whose kernels are right, or are not to be checked. Ops look their key up here first.
passed: set[Hashable] = set()

# Why the kernels of other keys are not used.
_problems: dict[Hashable, str] = {}

# What users are told of kernels that are not used, by op, device and dtype.
_reports: dict[Hashable, str] = {}

_lock = threading.Lock()

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def passes(key: Hashable, kernels: str, variant: KernelVariant) -> bool:
    """Return whether to use the kernels for calls with a key; check them at the first one.

    Args:
        key: Everything that the kernels of a call are compiled for.
        kernels: See `rope_patch.ops.rope`.
        variant: The kernels of this call.

    Raises:
        RuntimeError: The kernels do not work, and `kernels` is "triton".
        ValueError: The environment variable has an unknown value.
    """
    with _lock:
        if key in passed:  # checked by another thread, which this one waited for
            return True
        if key not in _problems:
            if not _is_enabled():
                passed.add(key)
                return True
            try:
                problem = _find_problem(variant)
            except _CannotCheckNow:
                return True
            if problem is None:
                passed.add(key)
                return True
            _problems[key] = problem
        elif kernels != "triton":
            return False
        _report(_problems[key], kernels, variant)
        return False


def may_trace(op: str, device: torch.device, dtype: torch.dtype, kernels: str) -> bool:
    """Return whether torch.compile may put an op's kernels into a graph; runs nothing.

    Graphs are traced with tensors that have no numbers, so only earlier calls outside of graphs
    tell: one wrong kernel of the op, in this dtype and on this device, is enough against it.

    Args:
        op: See `KernelVariant`.
        device: Of queries.
        dtype: Of queries.
        kernels: See `passes`.

    Raises:
        RuntimeError: Kernels of this op do not work, and `kernels` is "triton".
    """
    report = _reports.get((op, device, dtype))
    if report is not None and kernels == "triton":
        raise RuntimeError(report)
    return report is None


class _CannotCheckNow(Exception):
    """The device cannot run a trial at the moment."""


def _is_enabled() -> bool:
    """Return whether to check: by the variable, else everywhere but in Triton's interpreter."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} must be 1 (check kernels at their first use) or 0 (do not), got {value!r}"
        )
    if not value:
        return not is_interpreted()
    return value == "1"


def _find_problem(variant: KernelVariant) -> str | None:
    """Run a trial in a thread of its own; return what is wrong with the kernels, or None."""
    if variant.device.type == "cuda" and (
        not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()
    ):
        raise _CannotCheckNow
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rope_patch-self-check") as pool:
        return pool.submit(_try_kernels, variant).result()


def _try_kernels(variant: KernelVariant) -> str | None:
    with ExitStack() as stack:
        if variant.device.type == "cuda":
            stack.enter_context(torch.cuda.device(variant.device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(variant.device)))
        try:
            return _describe_wrong(run_trial(variant))
        except torch.OutOfMemoryError as error:
            raise _CannotCheckNow from error
        except Exception as error:  # a compiler or a driver can raise anything
            return f"does not run on {variant.device} ({describe_error(error)})"


def _describe_wrong(comparisons: list[Comparison]) -> str | None:
    """Return what is wrong with a kernel's results, or None."""
    worst = max(comparisons, key=lambda comparison: comparison.error / comparison.limit)
    if worst.is_right:
        return None
    return (
        f"is wrong: {worst.name} is off by {worst.error:.3g} units of rounding, not {worst.limit:g}"
    )


# -- reports ---------------------------------------------------------------------------------------


def _report(problem: str, kernels: str, variant: KernelVariant) -> None:
    what = f"rope_patch's kernel {variant.op} {problem}"
    details = (
        f"Please report this with the output of `rope-patch bench --self-test`: {variant}; "
        f"{describe_device(variant.device)}; {describe_versions()}."
    )
    refusal = (
        f'kernels="triton" was asked for, but {what}. Leave kernels at "auto", which then '
        f"computes in plain torch. {details}"
    )
    is_new = _reports.setdefault((variant.op, variant.device, variant.dtype), refusal) is refusal
    if kernels == "triton":
        raise RuntimeError(refusal)
    logger.log(
        logging.WARNING if is_new else logging.DEBUG,
        "%s. Tensors like these are computed in plain torch from now on. %s %s=0 skips the check.",
        what,
        details,
        VARIABLE,
    )


def describe_device(device: torch.device) -> str:
    """Return a device's name, compute capability and driver."""
    if device.type != "cuda":
        return f"{device}, {platform.machine()}, Triton's interpreter"
    properties = torch.cuda.get_device_properties(device)
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return (
        f"{device}, {properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{runtime}, driver {_driver_version()}"
    )


def _driver_version() -> str:
    """Return the version of NVIDIA's or AMD's driver, where Linux tells it."""
    for path in _DRIVER_FILES:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(r"\d+(\.\d+)+", text):
            return match[0]
    return "unknown"


def describe_versions() -> str:
    """Return the versions of Python and of all packages that a kernel depends on."""
    packages = {
        "rope_patch": own_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }
    return ", ".join(f"{name} {v}" for name, v in packages.items()) + (
        f", Python {platform.python_version()}, {platform.system()}"
    )
