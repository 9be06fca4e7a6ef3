"""Test patched models on two processes with sharded weights (FSDP2) or split sequences.

Two CPU processes are started once and measure for all tests; see sharded_worker.py.
"""

import json

import pytest
import shims
from helpers.processes import launch, shared_folder

PROCESSES = 2
METHODS = ["linear", "yarn", "dynamic-yarn", "longrope"]
ROUNDING = 1e-5

pytestmark = pytest.mark.skipif(
    shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, "sharded_logits") as folder:
        paths = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in paths):
            launch("sharded_worker.py", folder, processes=PROCESSES)
        return [json.loads(report.read_text()) for report in paths]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_may_be_patched_before_or_after_sharding(reports, method, when):
    for report in reports:
        weights = report["weights"][method]
        assert weights["sharded"] > 0
        assert weights["same names"]
        assert weights["unpatched"] < ROUNDING
        assert weights[when] < ROUNDING
        assert weights[f"{when}, undone"] < ROUNDING


@pytest.mark.parametrize("method", METHODS)
def test_the_patch_changes_the_compared_logits(reports, method):
    short, long = (report["weights"][method]["moved"] for report in reports)
    assert long > 0.1
    assert (short == 0) == (method == "dynamic-yarn")


@pytest.mark.parametrize("method", METHODS)
def test_a_split_sequence_has_the_logits_of_one_process(reports, method):
    for report in reports:
        assert report["sequences"][method]["apart"] < ROUNDING


@pytest.mark.parametrize("call", ["nothing", "None", "by position", "decoder", "training"])
@pytest.mark.parametrize("method", METHODS)
def test_a_part_of_a_sequence_without_positions_is_refused(reports, method, call):
    for report in reports:
        error = report["sequences"][method]["complaints"][call]
        assert error is not None
        assert "expected position_ids" in error


@pytest.mark.parametrize("method", METHODS)
def test_positional_position_ids_and_unpatched_models_are_accepted(reports, method):
    for report in reports:
        assert report["sequences"][method]["accepted"] is None
        assert report["sequences"][method]["unpatched"] is None


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_positions_are_required_only_while_a_group_is_set(reports, method):
    for report in reports:
        errors = report["torch"][method]
        assert (errors["unknown"], errors["ended"]) == (None, None)
        assert "expected position_ids" in errors["shared"]
