"""Test patched models on two processes that share weights (FSDP2) or parts of a sequence.

Two CPU processes are started once and measure for all tests; see worker.py.
"""

import json

import pytest
import shims
from helpers.processes import launch, shared_folder

PROCESSES = 2
FOLLOWING = ["dynamic-yarn", "longrope"]  # methods that depend on a sequence's length
METHODS = ["yarn", *FOLLOWING]
ROUNDING = 2e-5

pytestmark = pytest.mark.skipif(
    shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, "shared_logits") as folder:
        paths = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in paths):
            launch("worker.py", folder, processes=PROCESSES)
        return [json.loads(report.read_text()) for report in paths]


# Parts of a sequence.


def test_one_process_has_both_ends_and_the_other_the_middle(reports):
    """So one part reaches beyond the trained length, and the other does not."""
    ends, middle = (report["positions"] for report in reports)
    assert ends == [*range(32), *range(96, 128)]
    assert middle == [*range(32, 96)]


@pytest.mark.parametrize("method", FOLLOWING)
def test_split_logits_equal_those_of_one_process_if_the_length_is_known(reports, method):
    for report in reports:
        logits = report["logits"][method]
        assert logits["shared"]["apart"] < ROUNDING
        assert logits["fixed"]["apart"] < ROUNDING
        assert logits["unknown"]["apart"] > 0.1
        reductions = {source: each["reductions"] for source, each in logits.items()}
        assert reductions == {"shared": 1, "fixed": 0, "unknown": 0}


def test_static_methods_need_no_reduction(reports):
    for report in reports:
        for logits in report["logits"]["yarn"].values():
            assert logits["apart"] < ROUNDING
            assert logits["reductions"] == 0


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_positions_are_required_only_while_a_group_is_set(reports, method):
    for report in reports:
        errors = report["missing"][method]
        assert (errors["unknown"], errors["ended"]) == (None, None)
        assert "expected position_ids" in errors["shared"]


@pytest.mark.parametrize("method", METHODS)
def test_accelerate_splits_sequences_whose_positions_are_given(reports, method):
    for report in reports:
        sequences = report["sequences"][method]
        assert sequences["apart"] < ROUNDING
        assert sequences["complaints"].keys() == {
            "nothing", "None", "by position", "decoder", "training"
        }  # fmt: skip
        for error in sequences["complaints"].values():
            assert error is not None
            assert "expected position_ids" in error
        assert sequences["accepted"] is None
        assert sequences["unpatched"] is None


@pytest.mark.parametrize("method", FOLLOWING)
def test_accelerate_shares_the_length_automatically(reports, method):
    for report in reports:
        whole, split, unknown = (
            report["training"][method][source] for source in ("whole", "split", "unknown")
        )
        assert split["loss"] == pytest.approx(whole["loss"], rel=0, abs=1e-4)
        assert split["norm"] == pytest.approx(whole["norm"], rel=0, abs=1e-4)
        assert (whole["reductions"], split["reductions"]) == (0, 1)
        # The comparison detects processes that use the length of their parts.
        assert abs(unknown["loss"] - whole["loss"]) > 1e-2


# Whole sequences.


def test_data_parallel_processes_do_not_mix_their_frequencies(reports):
    assert [report["data parallel"] for report in reports] == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_may_be_patched_before_or_after_sharding(reports, method):
    for report in reports:
        weights = report["weights"][method]
        assert weights["sharded"] > 0
        assert weights["same names"]
        assert weights["unpatched"] < ROUNDING
        for when in ("before", "after"):
            assert weights[when] < ROUNDING
            assert weights[f"{when}, undone"] < ROUNDING
    # The patch changes the compared logits.
    short, long = (report["weights"][method]["moved"] for report in reports)
    assert long > 0.1
    assert (short == 0) == (method == "dynamic-yarn")
