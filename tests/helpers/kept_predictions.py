"""Keep the reference's predictions in tests that verify many engines against one model."""

from contextlib import contextmanager

from rope_patch.verifying import Reference


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
