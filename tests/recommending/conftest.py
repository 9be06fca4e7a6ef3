"""The tiny trained model that the tests of recommendations share."""

import pytest
from helpers.search_fixtures import load


@pytest.fixture(scope="module")
def model():
    return load()
