"""The tiny trained model, and the stand-in strategy of small searches."""

import pytest
from helpers.search_fixtures import load, strategies_with_walk

from rope_patch.searching import pipeline


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture
def walk_strategy(monkeypatch):
    """Let searches know the stand-in strategy as "walk"."""
    monkeypatch.setattr(pipeline, "STRATEGIES", strategies_with_walk())
