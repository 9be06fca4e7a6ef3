"""Bring mended defects back, one at a time, in a copy of the project: a test must fail then.

`make test-regress` runs them all. That each change still applies is a part of `make test`.
"""

import ast
import shutil
from functools import cache

import pytest

from regressions import CATALOGUE
from regressions.copies import copy_project, run_tests
from regressions.defect import PROJECT

_ENTRIES = pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.title)
_PATIENCE = 600  # seconds
_PATIENCE_WITH_ALL = 3600


@pytest.fixture(scope="session")
def copy(tmp_path_factory):
    """Copy the project."""
    return copy_project(tmp_path_factory.mktemp("copy"))


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
@pytest.mark.timeout(_PATIENCE_WITH_ALL + 60)
def test_without_a_defect_all_pass(copy):
    """Run the tests of all entries, because one that always fails would catch everything."""
    tests = sorted({test for defect in CATALOGUE for test in defect.tests})
    code, output = run_tests(copy, ["-m", "", *tests], _PATIENCE_WITH_ALL)
    assert code == 0, f"pytest ended with {code}:\n{output[-3000:]}"


@pytest.mark.regress
@pytest.mark.timeout(_PATIENCE + 60)
@_ENTRIES
def test_the_defect_is_caught(defect, copy):
    path, original = copy / defect.file, PROJECT / defect.file
    path.write_text(defect.broken(), encoding="utf-8")
    try:
        code, output = run_tests(copy, ["-m", "", *defect.tests], _PATIENCE)
    finally:
        shutil.copyfile(original, path)
    # 1: tests ran and failed. Others: nothing ran, or not even the imports worked.
    assert code == 1, f"pytest ended with {code}:\n{output[-3000:]}"
