"""Tokenizers for tests of tasks: one of the tiny models', one of words, and SmolLM2's."""

import re
from functools import lru_cache
from pathlib import Path

import pytest
from platformdirs import user_cache_path
from transformers import AutoTokenizer

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
KINDS = ("tiny", "words", "smollm2")


class Words:
    """A token for each run of letters or digits and for each other character, none for a blank."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return type("Encoding", (), {"input_ids": re.findall(r"\w+|[^\w ]", text)})


@lru_cache
def load(kind):
    if kind == "words":
        return Words()
    folder = TINY if kind == "tiny" else user_cache_path("rope_patch") / "SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("SmolLM2 was not expanded on this machine (`rope-patch` does for `demo`)")
    return AutoTokenizer.from_pretrained(folder)
