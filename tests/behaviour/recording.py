"""Record what the imported rope_patch does: outputs and files of commands, numbers, continued runs.

Leans on public names and commands alone, so that it records older and newer revisions, too. What is
recorded is kept as it is; `comparing` masks what no two runs have alike.
"""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

from filelock import FileLock
from helpers.commands import run_in_new_process
from helpers.processes import run_fresh

import rope_patch
from behaviour.cases import CASES, INTERRUPTED
from behaviour.numbers import MODELS, record_frequencies, record_model

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets"
WORK = Path("/tmp/rope-patch-behaviour")  # one for all records, because pages name and wrap it
VARIABLES = {
    "COLUMNS": "100",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",  # sums of several threads differ in the last bit
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "0",  # matplotlib's date
    "TZ": "UTC",
}


def record(folder, interrupted=None, only=()):
    """Record everything into a new folder, and say what each continued run did.

    Args:
        folder: The record.
        interrupted: Another record, whose interrupted runs are continued instead of own ones.
        only: Names of jobs; all if empty.
    """
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: expected a new folder")
    runs = (folder if interrupted is None else interrupted.absolute()) / "interrupted"
    jobs = {}  # those that take longest first
    for name in INTERRUPTED:
        jobs[f"continued-{name}"] = partial(continue_run, name, runs, folder, interrupted is None)
    for name in MODELS:
        jobs[f"numbers-{name}"] = partial(in_process, record_model, WORK / name, folder)
    jobs |= {name: partial(run_case, name, folder) for name in CASES}
    jobs["frequencies"] = partial(in_process, record_frequencies, folder)
    if unknown := set(only) - set(jobs):
        raise SystemExit(f"no job {', '.join(unknown)}: expected some of {', '.join(jobs)}")
    (folder / "numbers").mkdir(parents=True, exist_ok=True)
    variables = {**VARIABLES, "XDG_CACHE_HOME": str(WORK / "cache")}
    with mock.patch.dict(os.environ, variables), FileLock(f"{WORK}.lock"):
        shutil.rmtree(WORK, ignore_errors=True)
        fill_work()
        (folder / "about.json").write_text(json.dumps(about(), indent=1) + "\n")
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(timed, name, jobs[name]) for name in only or jobs]
        for each in running:
            each.result()
        shutil.rmtree(WORK)


def fill_work():
    """Make the folder in which commands run: models, inputs, and a method from outside."""
    for name in MODELS:
        shutil.copytree(ASSETS / name, WORK / name)
    samples = ("written_by_0_1/samples.jsonl", "written_by_0_1/documents.jsonl")
    for path in ("start-of-emma.txt", *samples):
        shutil.copy(ASSETS / path, WORK)
    page = (ROOT / "docs" / "contributing.md").read_text()
    plugin = re.search(r'```python title="my_method.py"\n(.*?)```', page, re.DOTALL)
    (WORK / "my_method.py").write_text(plugin[1])


def about():
    """Return what is recorded: the package's folder and revision, and versions."""
    package = Path(rope_patch.__file__).parent
    words = ["git", "-C", package, "describe", "--always", "--dirty"]
    revision = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"package": str(package), "revision": revision, **versions}


def in_process(function, *arguments):
    if status := run_fresh(function, *arguments):
        raise RuntimeError(f"{function.__name__} ended with exit code {status}")


def timed(name, job):
    start = time.monotonic()
    job()
    print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


# -- commands


def run_case(name, record):
    folder = WORK / name
    folder.mkdir()
    for number, words in enumerate(CASES[name], start=1):
        write_result(record / "cases" / name / f"{number:02}.txt", words, run(words, folder))
    keep_files(folder, record / "cases" / name / "files")


def run(words, folder, before=None):
    return run_in_new_process(*shlex.split(words), cwd=folder, before=before)


def write_result(path, words, result):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"$ rope-patch {words}\nexit code {result.returncode}\n"
        f"-- stdout\n{result.stdout}\n-- stderr\n{result.stderr}"
    )


def keep_files(folder, target):
    """Move a folder's files into the record, but for locks and pickles that two runs write unlike.

    Whether these pickles are right is seen where a run is continued.
    """
    pickles = ("optimizer.pt", "rng_state.pth", "training_args.bin")
    left_out = shutil.ignore_patterns("*.lock", *pickles)
    shutil.copytree(folder, target, ignore=left_out, dirs_exist_ok=True)
    shutil.rmtree(folder)


def continue_run(name, runs, record, is_own):
    """Continue a copy of an interrupted run, and record what is left of what it had measured."""
    words, pattern, lines = INTERRUPTED[name]
    if is_own:
        folder = WORK / f"interrupted-{name}"
        folder.mkdir()
        killed = run(words, folder, before=partial(kill_at, pattern, lines))
        write_result(runs / f"{name}.txt", words, killed)
        if killed.returncode != -signal.SIGKILL:
            raise SystemExit(
                f"{name} was not killed, exit code {killed.returncode}: {killed.stderr}"
            )
        shutil.move(folder, runs / name)
    folder = Path(shutil.copytree(runs / name, WORK / f"continued-{name}"))
    result = run(words, folder)
    target = record / "continued" / name
    write_result(target / "01.txt", words, result)
    (target / "kept.txt").write_text(kept_lines(runs / name, folder))
    keep_files(folder, target / "files")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    verdict = "is refused" if errors else "goes on"
    print(f"{name} {verdict}, exit code {result.returncode}", *errors, sep="\n  ", flush=True)


def kill_at(pattern, lines):
    """Kill this process before it opens another file once a pattern's files have so many lines.

    Files are counted instead of calls, because any layout of the package writes them.
    """
    counting = False

    def count(event, _):
        nonlocal counting
        if event == "open" and not counting:
            counting = True
            if sum(path.read_bytes().count(b"\n") for path in Path().glob(pattern)) >= lines:
                os.kill(os.getpid(), signal.SIGKILL)
            counting = False

    sys.addaudithook(count)


def kept_lines(before, after):
    """Say how many lines of each journal are still there; lines that are new have other times."""
    text = ""
    for path in sorted(before.rglob("*.jsonl")):
        name, lines = path.relative_to(before), path.read_bytes().splitlines()
        now = (after / name).read_bytes().splitlines() if (after / name).exists() else []
        text += f"{name}: {sum(line in now for line in lines)} of {len(lines)} lines kept\n"
    return text
