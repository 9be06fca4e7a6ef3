"""Context parallelism: processes that hold parts of a sequence rotate by the length of the whole.

Two processes are started once, on the CPU, and their measurements serve all tests; see worker.py.
"""

import json

import pytest
import shims
from helpers.processes import launch, shared_folder

PROCESSES = 2  # it takes them 10 to 25 seconds
FOLLOWING = ["dynamic", "dynamic-yarn", "longrope"]
ROUNDING = 2e-5

pytestmark = pytest.mark.skipif(shims.why_not() is not None, reason=str(shims.why_not()))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, "context_parallel") as folder:
        reports = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in reports):
            launch("worker.py", folder, processes=PROCESSES)
        return [json.loads(report.read_text()) for report in reports]


def test_a_process_sees_both_ends_or_the_middle(found):
    """What makes the parts differ: one is longer than the trained length, the other is not."""
    ends, middle = (report["positions"] for report in found)
    assert ends == [*range(32), *range(96, 128)]
    assert middle == [*range(32, 96)]


@pytest.mark.parametrize("how", ["shared", "fixed"])
@pytest.mark.parametrize("method", FOLLOWING)
def test_split_logits_are_those_of_one_process(found, method, how):
    for report in found:
        assert report["logits"][method][how]["apart"] < ROUNDING


@pytest.mark.parametrize("method", FOLLOWING)
def test_they_would_not_be_if_each_process_went_by_its_part(found, method):
    for report in found:
        assert report["logits"][method]["unknown"]["apart"] > 0.1


@pytest.mark.parametrize("method", FOLLOWING)
def test_a_shared_length_takes_one_reduction_and_a_fixed_one_none(found, method):
    for report in found:
        logits = report["logits"][method]
        assert {how: logits[how]["reductions"] for how in logits} == {
            "shared": 1,
            "fixed": 0,
            "unknown": 0,
        }


def test_methods_that_know_no_length_need_nothing(found):
    for report in found:
        for measured in report["logits"]["yarn"].values():
            assert measured["apart"] < ROUNDING
            assert measured["reductions"] == 0


@pytest.mark.parametrize("method", ["dynamic-yarn", "longrope"])
def test_under_accelerate_the_length_is_shared_unasked(found, method):
    for report in found:
        whole, split, unknown = (
            report["training"][method][how] for how in ("whole", "split", "unknown")
        )
        assert split["loss"] == pytest.approx(whole["loss"], rel=0, abs=1e-4)
        assert split["norm"] == pytest.approx(whole["norm"], rel=0, abs=1e-4)
        assert (whole["reductions"], split["reductions"]) == (0, 1)
        # Where each process goes by its part, the same comparison shows it.
        assert abs(unknown["loss"] - whole["loss"]) > 1e-2


def test_data_parallel_processes_do_not_mix_their_frequencies(found):
    assert [report["data parallel"] for report in found] == [0, 0]


@pytest.mark.parametrize("where", ["torch", "accelerate"])
def test_missing_positions_are_refused(found, where):
    for report in found:
        said = report["complaint"] if where == "torch" else report["training"]["complaint"]
        assert said is not None
        assert "expected position_ids" in said
