"""Choose architectures for quick tests: one of each kind, which differ in their names alone."""

import os

import pytest
from architectures_page import general

LARGE = {"hrm_text"}  # whose smallest models are still large


def kinds(rows):
    """Return the first architecture of each rotation with the same results and refusals.

    Args:
        rows: Rows of the page, by architecture.
    """
    first = {}
    for name, row in sorted(rows.items()):
        first.setdefault(tuple(general(str(value)) for value in row.values()), name)
    return {*first.values()} - LARGE


def slow_unless(names, quick):
    """Return parameters, of which all but the quick ones are slow tests.

    A release of transformers is tried with all of them: `make test-newest` sets ALL_ARCHITECTURES.
    """
    if os.environ.get("ALL_ARCHITECTURES"):
        return list(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
