"""Run tests of a changed copy of the project."""

import multiprocessing
import os
import shutil
import sys
import traceback

import pytest

from regressions.defect import PROJECT

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the fork server imports Triton
_COPIED = ("rope_patch", "tests", "eval", "recipes", "docs")
_IMPORTED = [
    "pytest",
    "torch",
    "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma3", "llama", "qwen3")),
    "lm_eval.api.model",
    "peft",
    "scipy.stats",
    "triton.language",
]
_NOT_STARTED = 99  # pytest's own codes end at 5
_OPTIONS = ("-o", "addopts=", "-p", "no:cacheprovider", "-x", "-q")


def copy_project(folder):
    """Copy what tests need, and return the folder."""
    for name in _COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "build", "out")
        shutil.copytree(PROJECT / name, folder / name, ignore=ignored)
    for path in PROJECT.iterdir():
        if path.is_file():
            shutil.copy2(path, folder)
    return folder


def run_tests(folder, arguments, patience):
    """Run tests of a copy in a process of its own; return pytest's exit code and output.

    The process is forked from one that has imported torch and transformers, but nothing of ours.
    The code is negative where it took longer than `patience` seconds.

    Raises:
        RuntimeError: The process did not come as far as pytest, which says nothing of the tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    process = context.Process(target=_run_in_child, args=(folder, arguments, output))
    process.start()
    process.join(patience)
    process.kill()
    process.join()
    text = output.read_text(encoding="utf-8") if output.exists() else ""
    if process.exitcode == _NOT_STARTED:
        raise RuntimeError(f"the tests could not be started:\n{text}")
    return process.exitcode, text


def _run_in_child(folder, arguments, output):
    code = _NOT_STARTED
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(folder)
        ours = [name for name in sys.modules if name.partition(".")[0] == "rope_patch"]
        assert not ours, f"imported before the copy's: {ours}"
        sys.path.insert(0, str(folder))
        os.environ |= {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
        code = pytest.main([*_OPTIONS, *arguments])
    except BaseException:
        traceback.print_exc()
    os._exit(code)
