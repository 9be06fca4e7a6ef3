"""Samples of the tasks, built as lm-eval builds them: by the function that a task's file names."""

import importlib
import sys
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest

from helpers.tokenizers import load
from rope_patch import tasks

read_config = cache(tasks.config)


def build_rows(name, tokenizer="tiny", **metadata):
    """Return the samples of a task.

    Args:
        name: The task's.
        tokenizer: One of `helpers.tokenizers.KINDS`.
        **metadata: What lm-eval passes on, beside what the task's file says.
    """
    config = read_config(name)
    given = {**config.get("metadata", {}), "tokenizer": load(tokenizer), **metadata}
    return config["custom_dataset"](**given)["test"].to_list()


rows = cache(build_rows)  # for tests that change nothing of the samples


def score_of(name, doc, written):
    """Return a task's score of what a model wrote."""
    return read_config(name)["process_results"](doc, [written])["score"]


@contextmanager
def ruler_modules(nouns=("dog",), adjectives=("big",)):
    """Import lm-eval's RULER without downloads and without six million keys.

    Later imports have all of them.

    Yields:
        Its modules by name.
    """
    words = SimpleNamespace(_categories={"nouns": nouns, "adjectives": adjectives, "verbs": []})
    names = ("prepare_niah", "niah_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.importorskip("nltk"), "download", lambda *_, **__: True)
        patch.setattr(pytest.importorskip("wonderwords"), "RandomWord", lambda: words)
        try:
            modules = [importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names]
        except ImportError as error:
            pytest.skip(f"lm-eval's RULER does not import: {error}")
    yield SimpleNamespace(**dict(zip(names, modules, strict=True)))
    for name in names:
        sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)
