"""The tiny trained model, and the stand-in strategy of small searches."""

import pytest
from helpers.search_fixtures import load, make_walk

from rope_patch.searching import STRATEGIES


@pytest.fixture(scope="session")
def model():
    return load()


@pytest.fixture
def walk_strategy(monkeypatch):
    """Let searches know the stand-in strategy as "walk"."""
    monkeypatch.setitem(STRATEGIES, "walk", make_walk())
