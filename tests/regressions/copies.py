"""Run tests of a changed copy of the project."""

import multiprocessing
import os
import shutil
import sys

import pytest

from regressions.defect import PROJECT

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
    return process.exitcode, text


def _run_in_child(folder, arguments, output):
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    import rope_patch

    assert rope_patch.__file__ == str(folder / "rope_patch" / "__init__.py")
    os._exit(pytest.main([*_OPTIONS, *arguments]))
