"""Test that docs/compatibility.md says what was run, and that what is declared was run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rope_patch.transformers_api import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "generate" / "compatibility.py"
# Two of the extras have commands of their own: `make test-triton` and `make test-engines`. The
# bound of python-dateutil is that of pandas, which datasets requires: not run yet; nor is that of
# gguf, whose writer and reader keep the byte order of files from 0.18 on.
APART = ("triton", "vllm", "trl", "python-dateutil", "gguf")

TESTS = """
import pytest
import tqdm

def test_passes(): pass

def test_fails(): assert False

def test_skips(): pytest.skip()

@pytest.fixture
def broken(): raise ValueError

def test_has_an_error(broken): pass
"""


def load_script():
    spec = importlib.util.spec_from_file_location("compatibility_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for types
    spec.loader.exec_module(module)
    return module


page = load_script()
RUNS = page.load_runs()
ALLOWED = page.allowed()


def versions(package):
    return page.versions_run(package, RUNS, ALLOWED[package])


def test_page_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.build(), (
        "docs/compatibility.md is not what the records say: run "
        "python docs/generate/compatibility.py and look at what changed"
    )


@pytest.mark.parametrize("path", sorted(page.RUNS.glob("*.json")), ids=lambda path: path.stem)
def test_runs_passed(path):
    record = json.loads(path.read_text())
    assert (record["failed"], record["exit_status"]) == (0, 0)
    assert record["passed"] > 0


@pytest.mark.parametrize("package", [name for name in ALLOWED if name not in APART])
def test_lower_bounds_were_run(package):
    (bound,) = [Version(each.version) for each in ALLOWED[package] if each.operator == ">="]
    assert versions(package)[0].release[: len(bound.release)] == bound.release


def test_pinned_versions_were_run():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert len(pins) >= 4
    for pin in pins:
        run = versions(canonicalize_name(pin.name))
        assert any(pin.specifier.contains(version) for version in run), pin


def test_newer_releases_than_the_newest_run_prove_themselves():
    assert str(versions("transformers")[-1]) == NEWEST_TESTED


def test_readme_and_support_name_the_releases_that_were_run():
    run = versions("transformers")
    oldest, newest = (f"{version.major}.{version.minor}" for version in (run[0], run[-1]))
    readme = (ROOT / "README.md").read_text()
    assert f"The newest transformers that was run is {run[-1]};" in readme
    text = (ROOT / "docs" / "support.md").read_text()
    assert f"| {oldest} to {newest}, and torch" in text
    torch = [f"{version.major}.{version.minor}" for version in versions("torch")]
    assert f", and torch {torch[0]} to {torch[-1]}:" in text


@pytest.mark.parametrize("workers", ["0", "2"])
def test_record_of_a_run(tmp_path, workers):
    (tmp_path / "test_four.py").write_text(TESTS)
    path = tmp_path / "record.json"
    # This run's own options may be those of plugins that the other one lacks.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    options = ["-p", "recording", "--record", path, "-p", "no:cacheprovider", "-n", workers]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_four.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT / "tests" / "compatibility")},
    )
    assert result.returncode == 1, result.stdout + result.stderr
    record = json.loads(path.read_text())
    counts = {key: record[key] for key in ("passed", "failed", "skipped", "exit_status")}
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "exit_status": 1}
    assert record["tests"] == ["test_four.py"]
    assert record["versions"]["tqdm"] == metadata.version("tqdm")
    assert "torch" not in record["versions"]  # which is installed, but was not run
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
