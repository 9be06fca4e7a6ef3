"""Test the plan of context parallelism against the peaks of two processes that share a row.

For each group of cases, two CPU processes are started once and measure for all tests; see
memory_worker.py.
"""

import json
import os
from functools import cache
from pathlib import Path

import check_memory_plan
import memory_worker
import pytest
import shims
from helpers.processes import SPAWN, launch, shared_folder

from rope_patch.training import memory_need

PROCESSES = 2  # they take 30 CPU seconds for the few cases, 90 for the others
EXPERIMENTS = Path(check_memory_plan.__file__).parent
CASES = [(group, name) for group, cases in memory_worker.CASES.items() for name in cases]

pytestmark = [
    pytest.mark.slow,  # training/memory/test_device_layouts.py tests the formulas
    pytest.mark.skipif(
        shims.unsupported_reason() is not None, reason=str(shims.unsupported_reason())
    ),
]


def measure(group, tmp_path_factory):
    """Return each process's report by rank; the first xdist worker to ask starts them."""
    with shared_folder(tmp_path_factory, f"planned_memory_{group}") as folder:
        paths = [folder / f"{rank}.json" for rank in range(PROCESSES)]
        if not all(report.exists() for report in paths):
            search_path = [str(EXPERIMENTS), *filter(None, [os.environ.get("PYTHONPATH")])]
            search_path.append(str(Path(__file__).parents[1]))
            launch(
                "memory_worker.py",
                folder,
                group,
                processes=PROCESSES,
                context=SPAWN,
                PYTHONPATH=os.pathsep.join(search_path),
            )
        return [json.loads(report.read_text()) for report in paths]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the reports of a group."""
    return cache(lambda group: measure(group, tmp_path_factory))


@pytest.mark.parametrize(("group", "name"), CASES)
def test_the_loss_equals_that_of_one_process(reports, group, name):
    for report in reports(group):
        assert report[name]["loss"] == pytest.approx(report[name]["whole"], abs=1e-4)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_the_plan_is_near_the_measured_peak(reports, group, name):
    kind, length, sizes = memory_worker.CASES[group][name]
    config = check_memory_plan.llama(**memory_worker.CONFIG, **sizes)
    parts = {} if kind is None else {"context_parallel": PROCESSES, "context_kind": kind}
    need = memory_need(config, length=length, shards=PROCESSES, **parts)
    for report in reports(group):
        assert 0.9 <= need.total / report[name]["peak"] <= 1.25, (name, need, report[name])


def test_passing_keys_around_takes_less_than_gathering_them(reports):
    for report in reports("others"):
        gathered, passed = (report[f"{kind}, many key heads"] for kind in ("allgather", "ring"))
        assert passed["peak"] < gathered["peak"]
