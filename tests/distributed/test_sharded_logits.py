"""Patched models on two processes that share weights (FSDP2) or sequences (context parallelism).

The processes are started once, on the CPU, and measure for all tests; see sharded_worker.py.
"""

import json

import pytest
import shims
from helpers.processes import launch, shared_folder

PROCESSES = 2
METHODS = ["linear", "yarn", "dynamic-yarn", "longrope"]
ROUNDING = 1e-5

pytestmark = pytest.mark.skipif(shims.why_not() is not None, reason=str(shims.why_not()))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, "sharded_logits") as folder:
        reports = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in reports):
            launch("sharded_worker.py", folder, processes=PROCESSES)
        return [json.loads(report.read_text()) for report in reports]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_a_sharded_model_is_patched_before_or_after_that(found, method, when):
    for report in found:
        weights = report["weights"][method]
        assert weights["sharded"] > 0
        assert weights["same names"]
        assert weights["unpatched"] < ROUNDING
        assert weights[when] < ROUNDING
        assert weights[f"{when}, undone"] < ROUNDING


@pytest.mark.parametrize("method", METHODS)
def test_the_patch_moves_what_is_compared(found, method):
    short, long = (report["weights"][method]["moved"] for report in found)
    assert long > 0.1
    assert (short == 0) == (method == "dynamic-yarn")


@pytest.mark.parametrize("method", METHODS)
def test_a_shared_sequence_gives_the_logits_of_one_process(found, method):
    for report in found:
        assert report["sequences"][method]["apart"] < ROUNDING


@pytest.mark.parametrize("way", ["nothing", "None", "by position", "decoder", "training"])
@pytest.mark.parametrize("method", METHODS)
def test_a_part_of_a_sequence_without_its_place_is_refused(found, method, way):
    for report in found:
        said = report["sequences"][method]["complaints"][way]
        assert said is not None
        assert "expected position_ids" in said


@pytest.mark.parametrize("method", METHODS)
def test_positions_may_come_by_name_or_not_and_an_unpatched_model_is_transformers_own(
    found, method
):
    for report in found:
        assert report["sequences"][method]["accepted"] is None
        assert report["sequences"][method]["unpatched"] is None


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_without_accelerate_it_takes_a_named_group(found, method):
    for report in found:
        said = report["torch"][method]
        assert (said["unknown"], said["ended"]) == (None, None)
        assert "expected position_ids" in said["shared"]
