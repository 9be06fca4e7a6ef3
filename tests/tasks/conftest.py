"""The tiny tokenizer that the tests of tasks share."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)
