"""Measure the CPU time of each file of tests, print the slowest, and fail above a budget.

A plugin of pytest, which conftest.py loads. CPU time counts the processes that a test starts and
waits for, those of a fork server among them. It depends less on what else the machine does than
time does, but two busy cores can double it. `--write-file-times` keeps the times in
file_times.json; by these, quick files run first, so that most failures are known in minutes.
`python tests/helpers/file_times.py` prints the table of docs/contributing.md from them.
"""

import json
import os
import statistics
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

BUDGET = 100.0  # CPU seconds a file, in `make test` on a machine as fast as the record's
RECORD = Path(__file__).with_suffix(".json")
SHARED = ("tests/extending/", "tests/training/")  # fixtures of the session hold a run for all files

_seconds: Counter[str] = Counter()
_mark = 0.0  # the process's CPU time when the last test ended


def pytest_addoption(parser):
    parser.addoption(
        "--slowest-files", type=int, default=10, metavar="N", help="how many files to print (10)"
    )
    parser.addoption("--write-file-times", action="store_true", help=f"write {RECORD.name}")


def pytest_collection_modifyitems(config, items):
    if config.getoption("until", None) is not None:
        return  # changed.py has an order of its own
    times: Counter[str] = Counter()
    for path, seconds in json.loads(RECORD.read_text(encoding="utf-8")).items():
        times[_unit(path)] += seconds
    units = dict.fromkeys(_unit(item.nodeid) for item in items)  # in one order for all workers
    quickest_first = sorted(units, key=lambda unit: times[unit])
    # Each of two workers begins with a half of the list.
    place = {unit: n for n, unit in enumerate(quickest_first[::2] + quickest_first[1::2])}
    items.sort(key=lambda item: place[_unit(item.nodeid)])


def _unit(node):
    """Return what one worker should run at a stretch: a file, or a folder of shared runs."""
    return next((folder for folder in SHARED if node.startswith(folder)), node.partition("::")[0])


def cpu_seconds():
    times = [os.times()]
    server = forkserver._forkserver._forkserver_pid  # which waits for its processes itself
    if server is not None:
        times.append(psutil.Process(server).cpu_times())
    return sum(
        each.user + each.system + each.children_user + each.children_system for each in times
    )


def pytest_collection_finish():
    global _mark
    _mark = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global _mark
    report = yield
    if report.when == "teardown":
        before, _mark = _mark, cpu_seconds()
        report.cpu_seconds = _mark - before  # pytest-xdist sends it with the report
    return report


def pytest_runtest_logreport(report):
    seconds = getattr(report, "cpu_seconds", 0.0)  # it is in the last of a test's reports
    _seconds[report.nodeid.partition("::")[0]] += seconds


def pytest_sessionfinish(session):
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and _above_budget(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    slowest = _seconds.most_common(config.getoption("slowest_files"))
    terminalreporter.section(f"slowest {len(slowest)} files, CPU seconds")
    for path, seconds in slowest:
        terminalreporter.write_line(f"{seconds:7.1f} {path}")
    terminalreporter.write_line(f"{_seconds.total():7.1f} all {len(_seconds)} files")
    if config.getoption("write_file_times"):
        record = {path: round(seconds, 1) for path, seconds in _seconds.most_common()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        terminalreporter.write_line(f"wrote {RECORD}")
    for path in _above_budget(config):
        terminalreporter.write_line(
            f"{path} took {_seconds[path]:.0f} CPU seconds: expected at most {_budget():.0f}. "
            "Share what its tests build, take smaller models, or mark what takes long as slow",
            red=True,
        )


def _above_budget(config):
    if "not slow" not in config.getoption("markexpr") or os.environ.get("ALL_ARCHITECTURES"):
        return []  # more than `make test` runs
    return [path for path, seconds in _seconds.most_common() if seconds > _budget()]


def _budget():
    """Return the budget on this machine: a slow one takes longer for all files."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    ratios = [seconds / record[p] for p, seconds in _seconds.items() if record.get(p, 0) >= 1]
    # Of few files, the ratio would be that of a file which became slow itself.
    return BUDGET * max(statistics.median(ratios), 1) if len(ratios) >= 50 else BUDGET


def table(rows=20):
    """Return the slowest files of the record, and all others in one row, as Markdown."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = ["| file | CPU seconds |", "|:--|--:|"]
    lines += [f"| {path} | {seconds:.0f} |" for path, seconds in [*record.items()][:rows]]
    rest = [*record.values()][rows:]
    lines.append(f"| {len(rest)} others, at most {max(rest):.0f} each | {sum(rest):,.0f} |")
    return "\n".join([*lines, f"| all {len(record)} | {sum(record.values()):,.0f} |"])


if __name__ == "__main__":
    print(table())
