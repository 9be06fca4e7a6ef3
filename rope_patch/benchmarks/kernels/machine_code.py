"""Compile our kernels for a GPU and print what the machine code says about their speed.

No GPU is needed, and nothing is timed: `python -m rope_patch.benchmarks.kernels.machine_code`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

try:
    import triton
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("error: triton is not installed, which compiles the kernels: pip install triton")

from rope_patch.benchmarks.kernels.cross_compilation import (
    CACHE_KERNELS,
    NORM_KERNELS,
    TARGETS,
    Job,
)
from rope_patch.benchmarks.kernels.launch_code import Code, read_code
from rope_patch.benchmarks.kernels.rival_code import compare, format_comparison, missing

_QWEN: Any = {"head_dim": 128}
_GEMMA: Any = {"head_dim": 256, "heads": (16, 8), "offset": 1.0}
_OLMO: Any = {"head_dim": 128, "heads": (32, 32), "norm_all_heads": True}
_SMOL: Any = {"head_dim": 64, "heads": (9, 3)}

MODEL_JOBS = {
    "Llama 3 8B, rope": Job(kernel="rope", head_dim=128),
    "Gemma 3 12B, rope": Job(kernel="rope", **_GEMMA),
    "SmolLM2 135M, rope": Job(kernel="rope", **_SMOL),
    **{f"Qwen3 8B, {kernel}": Job(kernel=kernel, **_QWEN) for kernel in NORM_KERNELS},
    **{f"Gemma 3 12B, {kernel}": Job(kernel=kernel, **_GEMMA) for kernel in NORM_KERNELS[:2]},
    **{f"OLMo 2 7B, {kernel}": Job(kernel=kernel, **_OLMO) for kernel in NORM_KERNELS[:2]},
    "Llama 3 8B, rope, one token": Job(kernel="rope", head_dim=128, tokens=1),
    "SmolLM2 135M, rope, one token": Job(kernel="rope", **_SMOL, tokens=1),
    "Qwen3 8B, norm, one token": Job(kernel="norm", **_QWEN, tokens=1),
    "Gemma 3 12B, norm, one token": Job(kernel="norm", **_GEMMA, tokens=1),
}

COMPARED_JOBS = {
    name: MODEL_JOBS[name]
    for name in (
        "Llama 3 8B, rope",
        "Gemma 3 12B, rope",
        "SmolLM2 135M, rope",
        "Qwen3 8B, norm",
        "Gemma 3 12B, norm",
    )
}

VARIANT_JOBS = {
    **{
        f"{kernel}, {head_dim}, {'neighbours' if interleaved else 'halves'}": Job(
            kernel=kernel, head_dim=head_dim, interleaved=interleaved
        )
        for kernel in ("rope", *NORM_KERNELS)
        for head_dim in (64, 128, 256)
        for interleaved in (False, True)
    },
    "rope backwards": Job(kernel="rope backwards", head_dim=128),
    "re-rotation, one layer": Job(kernel="re-rotation", head_dim=128),
    "re-rotation, 36 layers": Job(kernel="re-rotation", head_dim=128, layers=36),
    "re-rotation, 30 narrow layers": Job(kernel="re-rotation", **_SMOL, layers=30),
    "rope, a part": Job(kernel="rope", head_dim=128, rotary_dim=32),
    **{
        f"{kernel}, {tokens}": Job(kernel=kernel, head_dim=128, tokens=tokens)
        for kernel in CACHE_KERNELS
        for tokens in (1, 8192)
    },
    "norm of all heads into a cache": Job(kernel="norm into a cache", **_OLMO, tokens=1),
    "sum of weights": Job(kernel="sum of weights", head_dim=128),
    "sum of weights of all heads": Job(kernel="sum of weights", head_dim=128, norm_all_heads=True),
}


def format_table(codes: dict[str, Code]) -> str:
    """Return a Markdown table of codes by name."""
    lines = [
        "| launch | registers | warps per SM | instructions a token | share of issue slots "
        "| one token, estimated |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, code in codes.items():
        instructions = "" if code.per_token is None else f"{code.per_token:,.0f}"
        is_filling = code.share is not None and code.microseconds is None
        share = f"{code.share:.0%}" if is_filling else ""
        time = "" if code.microseconds is None else f"{code.microseconds:.2f} µs"
        cells = (name, code.registers, code.warps_per_sm, instructions, share, time)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m rope_patch.benchmarks.kernels.machine_code", description=__doc__
    )
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="default: sm_90 (H200)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--variants", action="store_true", help="other sizes instead of models")
    sizes.add_argument(
        "--rivals",
        type=Path,
        metavar="FOLDER",
        help="compare with Liger, flash-attention and Unsloth; the folder is that of `rope-patch "
        "bench --rivals`, and what is not there is left out",
    )
    parser.add_argument("--json", action="store_true", help="print all that was read")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.exit(1, "Error: TRITON_INTERPRET is set, so Triton does not compile: unset it\n")
    if options.rivals is not None:
        _print_comparison(options.target, options.rivals, options.json)
        return
    jobs = VARIANT_JOBS if options.variants else MODEL_JOBS
    codes = {name: read_code(job, options.target) for name, job in jobs.items()}
    if options.json:
        json.dump({name: asdict(code) for name, code in codes.items()}, sys.stdout)
    else:
        print(format_table(codes))


def _print_comparison(target: str, folder: Path, as_json: bool) -> None:
    """Print our code and theirs, and on stderr what is not there."""
    comparisons = compare(COMPARED_JOBS, target, folder)
    if as_json:
        # A launch without code is a string, the reason.
        json.dump(comparisons, sys.stdout, default=asdict)
    else:
        print(format_comparison(comparisons))
    for line in missing(comparisons):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
