"""Keep the reference's predictions in tests that verify many engines against one model."""

from contextlib import contextmanager
from pathlib import Path

import rope_patch
from helpers.wrong_engines import ASSETS, FACTOR
from rope_patch.verifying import Reference

_of_requests = {}


def verify(model_or_url, /, against=ASSETS / "tiny-llama", **arguments):
    """Verify an engine, asked for YaRN x4 by default, by the same predictions for one request."""
    request = {"method": "yarn", "factor": FACTOR, **arguments}
    # Other folders, and models, may change between two requests.
    is_asset = isinstance(against, Path) and against.parent == ASSETS
    kept = _of_requests.setdefault(repr((against, request)), {}) if is_asset else {}
    with kept_predictions(kept):
        return rope_patch.verify(model_or_url, against=against, progress=False, **request)


@contextmanager
def kept_predictions(kept=None):
    """Compute each prediction once, for all verifications of one request against one model.

    Args:
        kept: Predictions of earlier contexts, to which those of this one are added.
    """
    kept = {} if kept is None else kept
    compute = Reference.log_probs

    def log_probs(self, hypothesis, prompt):
        key = hypothesis.name, prompt
        if key not in kept:
            kept[key] = compute(self, hypothesis, prompt)
        return kept[key]

    Reference.log_probs = log_probs
    try:
        yield
    finally:
        Reference.log_probs = compute
