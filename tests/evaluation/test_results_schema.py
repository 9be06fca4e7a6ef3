"""The schema of results is true of what an evaluation writes, and of every committed report."""

import copy
import json
from pathlib import Path

import pytest
from helpers.evaluations import TASKS, request
from helpers.schema import problems

from rope_patch.evaluation.pipeline import evaluate
from rope_patch.evaluation.results_schema import RunRecord, RunsRecord
from rope_patch.lab.results import LabResults
from rope_patch.lab.results_schema import FORMAT as LAB_FORMAT
from rope_patch.lab.results_schema import LabRecord
from rope_patch.utils.checksums import verify_checksum

ROOT = Path(__file__).parents[2]
REPORTS = sorted((ROOT / "eval" / "results").rglob("report.json"))
BEFORE_FORMATS = {"before", "mixed-after", "yarn-after"}  # folders of reports without a format


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run with every part that works offline, and its file."""
    folder = tmp_path_factory.mktemp("out")
    tasks = (*TASKS, "rp_json_kv_mc", "key_tokens", "sliding", "speed")
    measured = evaluate(request(folder, tasks=tasks, stride=64, controls=True))
    return measured, verify_checksum((folder / "report.json").read_bytes(), "report.json")


def test_an_evaluation_returns_and_writes_what_the_schema_says(results):
    returned, written = results
    assert list(problems(returned, RunRecord)) == []
    assert list(problems(written, RunRecord)) == []
    # Each part is there, so that the schema was tried on it.
    for part in RunRecord.__required_keys__ - {"harness"}:
        assert written[part], part
    for part in ("control", "short_control", "key_tokens", "sliding"):
        assert written["perplexity"][part], part
    assert any(
        "chance" in row
        for entry in written["retrieval"]
        for rows in entry["samples"].values()
        for row in rows
    )


@pytest.mark.parametrize("path", REPORTS, ids=[path.parent.name for path in REPORTS])
def test_every_report_of_the_project_is_what_the_schema_says(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") == LAB_FORMAT:
        assert list(problems(LabResults.load(path).results, LabRecord)) == []
        return
    if path.parent.name in BEFORE_FORMATS:
        with pytest.raises(ValueError, match="of before formats were named"):
            verify_checksum(content, str(path))
        return
    kind = RunsRecord if "runs" in content else RunRecord
    assert list(problems(verify_checksum(content, str(path)), kind)) == []


def test_reports_were_found():
    assert len(REPORTS) > len(BEFORE_FORMATS)
    assert {path.parent.name for path in REPORTS} > BEFORE_FORMATS


def lose_a_key(run):
    del run["perplexity"]["control"]["context"]


def add_a_key(run):
    run["retrieval"][0]["samples"]["none"][0]["hits"] = 1


def write_a_number_as_text(run):
    run["cost"]["none"]["peak_bytes"] = "12"


def write_a_float_for_a_count(run):
    run["short"][0]["n"] = 3.0


def write_truth_for_a_number(run):
    run["run"]["geometry"]["all"]["theta"] = True


def write_a_text_that_is_no_number(run):
    run["perplexity"]["losses"]["none"][0][0] = "inf"


def forget_the_frequencies(run):
    run["methods"][1]["frequencies"]["all"]["inv_freq"] = None


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lose_a_key, "results['perplexity']['control'] lacks 'context'"),
        (add_a_key, "results['retrieval'][0]['samples']['none'][0] has an unknown 'hits'"),
        (write_a_number_as_text, "results['cost']['none']['peak_bytes'] is a str"),
        (write_a_float_for_a_count, "results['short'][0]['n'] is a float"),
        (write_truth_for_a_number, "results['run']['geometry']['all']['theta'] is a bool"),
        (write_a_text_that_is_no_number, "results['perplexity']['losses']['none'][0][0] is"),
        (forget_the_frequencies, "results['methods'][1]['frequencies']['all']['inv_freq'] is a"),
    ],
)
def test_other_results_are_not_what_the_schema_says(results, damage, problem):
    _, written = results
    damaged = copy.deepcopy(written)
    damage(damaged)
    (line,) = problems(damaged, RunRecord)
    assert line.startswith(problem)


def test_infinities_are_texts_in_files_and_numbers_before(results):
    returned, _ = results
    for value in ("Infinity", "-Infinity", "NaN", float("inf"), 1.5):
        damaged = copy.deepcopy(returned)
        damaged["perplexity"]["losses"]["none"][0][0] = value
        assert list(problems(damaged, RunRecord)) == []
