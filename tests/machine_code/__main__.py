"""Compile our kernels for a GPU and print what the machine code says about their speed.

No GPU is needed, and nothing is timed: `PYTHONPATH=tests python -m machine_code`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

try:
    import triton
except ModuleNotFoundError:
    sys.exit("error: triton is not installed, which compiles the kernels: pip install triton")

from machine_code.cross_compilation import (
    ATTENTION_JOBS,
    COMPARED_JOBS,
    MODEL_JOBS,
    TARGETS,
    VARIANT_JOBS,
)
from machine_code.launch_code import format_attention_table, format_table, read_code
from machine_code.rival_code import compare, format_comparison, missing


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m machine_code", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="default: sm_90 (H200)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--variants", action="store_true", help="other sizes instead of models")
    sizes.add_argument(
        "--attention", action="store_true", help="attention at mapped positions instead"
    )
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
    jobs = MODEL_JOBS
    if options.variants or options.attention:
        jobs = VARIANT_JOBS if options.variants else ATTENTION_JOBS
    codes = {name: read_code(job, options.target) for name, job in jobs.items()}
    if options.json:
        json.dump({name: asdict(code) for name, code in codes.items()}, sys.stdout)
    elif options.attention:
        print(format_attention_table({name: {options.target: x} for name, x in codes.items()}))
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
