"""Bring mended defects back, one at a time, in a copy of the project: a test must fail then.

`make test-regress` runs them all. That each change still applies is a part of `make test`.
"""

import ast
import multiprocessing
import os
import shutil
import sys
from functools import cache

import pytest

from regressions import CATALOGUE
from regressions.defect import PROJECT

_COPIED = ("rope_patch", "tests", "eval", "recipes", "docs")
_ONLY = ("-o", "addopts=", "-m", "", "-p", "no:cacheprovider", "-x", "-q")
_ENTRIES = pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.title)
_PATIENCE = 600  # seconds


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """Copy the project."""
    folder = tmp_path_factory.mktemp("copy")
    for name in _COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "build", "out")
        shutil.copytree(PROJECT / name, folder / name, ignore=ignored)
    for path in PROJECT.iterdir():
        if path.is_file():
            shutil.copy2(path, folder)
    return folder


def run_tests(folder, tests):
    """Run tests of a copy in a process of its own; return pytest's exit code and output.

    The process is forked from one that has imported torch and transformers, but nothing of ours.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers"])
    output = folder / "output.txt"
    process = context.Process(target=_run_in_child, args=(folder, tests, output))
    process.start()
    process.join(_PATIENCE)
    process.kill()
    process.join()
    return process.exitcode, output.read_text(encoding="utf-8")


def _run_in_child(folder, tests, output):
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    import rope_patch

    assert rope_patch.__file__ == str(folder / "rope_patch" / "__init__.py")
    os._exit(pytest.main([*_ONLY, *tests]))


@cache
def functions_in(path):
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((PROJECT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@_ENTRIES
def test_the_change_applies_and_leaves_python(defect):
    ast.parse(defect.broken())
    for test in defect.tests:
        path, *names = test.partition("[")[0].split("::")
        assert functions_in(path).issuperset(names[-1:]), test


def test_titles_are_unique():
    titles = [defect.title for defect in CATALOGUE]
    assert len(set(titles)) == len(titles)


@pytest.mark.regress
@pytest.mark.timeout(_PATIENCE + 60)
@_ENTRIES
def test_the_defect_is_caught(defect, copy):
    path, original = copy / defect.file, PROJECT / defect.file
    path.write_text(defect.broken(), encoding="utf-8")
    try:
        code, output = run_tests(copy, defect.tests)
    finally:
        shutil.copyfile(original, path)
    # 1: tests ran and failed. Others: nothing ran, or not even the imports worked.
    assert code == 1, f"pytest ended with {code}:\n{output[-3000:]}"
