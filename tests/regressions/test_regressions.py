"""Bring mended defects back, one at a time, in a copy of the project: a test must fail then.

`make test-regress` runs them all. That each change still applies is a part of `make test`.
"""

import ast
import os
import shutil
import subprocess
import sys

import pytest

from regressions import CATALOGUE
from regressions.defect import PROJECT

_COPIED = ("rope_patch", "tests", "eval", "recipes", "docs")
_ENTRIES = pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.title)


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """Copy the project, and check that its copy is what tests import there."""
    folder = tmp_path_factory.mktemp("copy")
    for name in _COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "build", "out")
        shutil.copytree(PROJECT / name, folder / name, ignore=ignored)
    for path in PROJECT.iterdir():
        if path.is_file():
            shutil.copy2(path, folder)
    where = run(folder, "-c", "import rope_patch; print(rope_patch.__file__)").stdout.strip()
    assert where == str(folder / "rope_patch" / "__init__.py")
    return folder


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


@_ENTRIES
def test_the_change_applies_and_leaves_python(defect):
    ast.parse(defect.broken())
    for test in defect.tests:
        assert (PROJECT / test.partition("::")[0]).is_file(), test


def test_titles_are_unique():
    titles = [defect.title for defect in CATALOGUE]
    assert len(set(titles)) == len(titles)


@pytest.mark.regress
@_ENTRIES
def test_the_defect_is_caught(defect, copy):
    path, original = copy / defect.file, PROJECT / defect.file
    path.write_text(defect.broken(), encoding="utf-8")
    try:
        only = ("-o", "addopts=", "-m", "", "-p", "no:cacheprovider", "-x", "-q")
        result = run(copy, "-m", "pytest", *only, *defect.tests)
    finally:
        shutil.copyfile(original, path)
    # 1: tests ran and failed. Others: nothing ran, or not even the imports worked.
    assert result.returncode == 1, (
        f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}"
    )
