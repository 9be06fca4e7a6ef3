"""Compare texts with recorded ones, whose changes are reviewed as a diff."""

import os

VARIABLE = "RECORD_TEXTS"


def check_recorded(text, path):
    """Fail if a text is not the recorded one; with RECORD_TEXTS=1 in the environment, record it."""
    if os.environ.get(VARIABLE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"not the text of {path}: if it is better, run this test with {VARIABLE}=1 in the "
        "environment and look at the diff"
    )
