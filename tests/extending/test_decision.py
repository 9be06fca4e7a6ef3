"""Test what is published of made-up answers: a rotation alone, or a model trained with it."""

import pytest

from rope_patch.evaluation.report.results.run_statistics import RunStatistics
from rope_patch.extending.proof import decide

LENGTH, TRAINED, TUNED = 2048, 1024, "yarn, fine-tuned"
TEXTS = 8


def rows(losses):
    return [
        {
            "id": str(text),
            "text": text,
            "length": LENGTH,
            "depth": 50,
            "score": 0.0,
            "log_likelihood": -4 * loss,
            "target_tokens": 4,
        }
        for text, loss in enumerate(losses)
    ]


def results(changes):
    """Return answers under which training changes the loss of each text by a number of nats."""
    losses = {"none": [3 + 0.1 * i for i in range(TEXTS)], "yarn": [1.0] * TEXTS}
    losses[TUNED] = [1.0 + change for change in changes]
    task = {
        "task": "rp_niah_multikey_1_ll",
        "lengths": [LENGTH],
        "depths": [50],
        "samples": {label: rows(values) for label, values in losses.items()},
    }
    methods = [{"label": label, "method": None if label == "none" else label} for label in losses]
    return {"run": {"trained_length": TRAINED}, "methods": methods, "retrieval": [task]}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ([-0.3 - 0.01 * i for i in range(TEXTS)], TUNED),
        ([-0.3, 0.2, -0.3, 0.2, -0.3, 0.2, -0.3, 0.2], "yarn"),  # better on average
        ([0.3 + 0.01 * i for i in range(TEXTS)], "yarn"),
    ],
)
def test_a_trained_model_is_chosen_where_it_is_shown_to_be_better(changes, chosen):
    record = results(changes)
    difference = RunStatistics(record).loss_difference(TUNED, "yarn", LENGTH)
    assert difference.mean.estimate == pytest.approx(sum(changes) / TEXTS)
    decision = decide(record, LENGTH, TUNED)
    assert decision.label == chosen
    assert ("training adds to yarn is not shown" in decision.sentences[-1]) == (chosen == "yarn")
