"""Record what a checkout does, or compare two records: `python -m behaviour --help`."""

import argparse
import sys
from pathlib import Path

# What takes a second to import; commands are forked from a process that has it.
PRELOADED = ("behaviour.recording", "matplotlib.figure", "matplotlib.backends.backend_svg")
PRELOADED += ("datasets", "lm_eval.evaluator", "peft", "scipy.stats", "transformers.trainer")

parser = argparse.ArgumentParser(prog="behaviour", description=__doc__)
commands = parser.add_subparsers(dest="command", required=True)
words = commands.add_parser("record", help="record the rope_patch that this Python imports")
words.add_argument("folder", type=Path, help="a new folder")
words.add_argument(
    "--continue",
    dest="interrupted",
    type=Path,
    metavar="RECORD",
    help="continue the interrupted runs of another record instead of own ones",
)
words.add_argument("--only", nargs="+", default=(), metavar="JOB", help="some jobs (all)")
words = commands.add_parser("compare", help="print every difference; the exit code is 1 if any")
words.add_argument("a", type=Path)
words.add_argument("b", type=Path)
words.add_argument("--tolerance", type=float, default=0.0, help="largest difference of tensors (0)")
words.add_argument("--lines", type=int, default=20, help="lines of each difference (20)")

if __name__ == "__main__":
    options = vars(parser.parse_args())
    if options.pop("command") == "record":
        from helpers.processes import FRESH

        import rope_patch
        from behaviour.recording import record

        if Path.cwd() == Path(rope_patch.__file__).parents[1]:
            parser.error("run this in the folder tests: Python imports this folder's rope_patch")
        FRESH.set_forkserver_preload([*PRELOADED])
        record(**options)
    else:
        from behaviour.comparing import compare

        sys.exit(compare(**options))
