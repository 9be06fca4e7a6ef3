"""Test that docs/lab.md and its report show what eval/results/lab holds."""

import importlib.util
from pathlib import Path

import pytest

from rope_patch.lab.report.writer import write_report
from rope_patch.lab.results import LabResults

SCRIPT = Path(__file__).parents[2] / "docs" / "generate" / "lab.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("lab_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(script):
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.build(page), (
        "docs/lab.md is not what eval/results/lab holds: run python docs/generate/lab.py and look "
        "at what changed"
    )


def test_published_report_is_rendered_from_its_own_json(script, tmp_path):
    results = LabResults.load(script.RESULTS / "report.json").results
    write_report(results, tmp_path)
    assert LabResults.load(tmp_path / "report.json").results == results
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == (
        script.RESULTS / "report.md"
    ).read_text(encoding="utf-8")
