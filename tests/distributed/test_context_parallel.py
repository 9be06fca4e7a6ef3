"""Test context parallelism: processes with parts of a sequence rotate for its whole length.

Two CPU processes are started once and measure for all tests; see worker.py.
"""

import json

import pytest
import shims
from helpers.processes import launch, shared_folder

PROCESSES = 2  # they take 10 to 25 seconds
LENGTH_DEPENDENT = ["dynamic", "dynamic-yarn", "longrope"]
ROUNDING = 2e-5

pytestmark = pytest.mark.skipif(
    shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, "context_parallel") as folder:
        paths = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in paths):
            launch("worker.py", folder, processes=PROCESSES)
        return [json.loads(report.read_text()) for report in paths]


def test_one_process_has_both_ends_and_the_other_the_middle(reports):
    """So one part reaches beyond the trained length, and the other does not."""
    ends, middle = (report["positions"] for report in reports)
    assert ends == [*range(32), *range(96, 128)]
    assert middle == [*range(32, 96)]


@pytest.mark.parametrize("source", ["shared", "fixed"])
@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_split_logits_equal_those_of_one_process(reports, method, source):
    for report in reports:
        assert report["logits"][method][source]["apart"] < ROUNDING


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_logits_differ_if_each_process_uses_the_length_of_its_part(reports, method):
    for report in reports:
        assert report["logits"][method]["unknown"]["apart"] > 0.1


@pytest.mark.parametrize("method", LENGTH_DEPENDENT)
def test_a_shared_length_takes_one_reduction_and_a_fixed_one_none(reports, method):
    for report in reports:
        logits = report["logits"][method]
        assert {source: logits[source]["reductions"] for source in logits} == {
            "shared": 1,
            "fixed": 0,
            "unknown": 0,
        }


def test_static_methods_need_no_reduction(reports):
    for report in reports:
        for logits in report["logits"]["yarn"].values():
            assert logits["apart"] < ROUNDING
            assert logits["reductions"] == 0


@pytest.mark.parametrize("method", ["dynamic-yarn", "longrope"])
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


def test_data_parallel_processes_do_not_mix_their_frequencies(reports):
    assert [report["data parallel"] for report in reports] == [0, 0]


@pytest.mark.parametrize("where", ["torch", "accelerate"])
def test_missing_positions_are_refused(reports, where):
    for report in reports:
        error = report["complaint"] if where == "torch" else report["training"]["complaint"]
        assert error is not None
        assert "expected position_ids" in error
