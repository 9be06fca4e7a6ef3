"""The tiny trained model that the tests of recommendations share."""

import pytest
from helpers.search_fixtures import load


@pytest.fixture(scope="session")
def model():
    return load()
