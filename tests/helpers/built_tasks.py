"""Samples of the tasks, built as lm-eval builds them: by the function that a task's file names."""

from functools import cache

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
