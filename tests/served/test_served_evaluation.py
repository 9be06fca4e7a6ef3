"""Test evaluations of a server: equal numbers, resuming, and what the report says of the server."""

import json
from dataclasses import replace
from functools import partial

import pytest
from helpers.commands import run_in_this_process
from helpers.engine_server import EngineServer
from helpers.evaluations import (
    ASSETS,
    TEXT,
    TINY,
    answer_lines,
    measured_numbers,
    request,
    run_until_killed,
)
from helpers.kept_predictions import kept_predictions
from helpers.schema import problems
from helpers.undrawn import leave_undrawn
from helpers.user_tasks import write_tasks
from served_parts import PARTS
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation import RunRecord
from rope_patch.served import ServedRequest, run
from rope_patch.verifying import CannotReach

NATS = 1e-3  # two float32 passes over the same tokens, one in parts, differ by far less


def served_run(url, folder, changes=None, **served):
    """Evaluate a server as in this process, without finding out how it rotates."""
    options = {"tokenizer": TINY, "verify": False, "concurrency": 2, **served}
    asked = request(folder, **{**PARTS, "model": url, "methods": ("none",), "factor": None})
    return run(asked if changes is None else changes(asked), ServedRequest(**options))


def relabelled(results):
    """Return the numbers of a run of one column, by no label."""
    (label,) = (method["label"] for method in results["methods"])
    rows = [entry["samples"][label] for entry in results["retrieval"]]
    return (
        [row for each in rows for row in each],
        results["perplexity"]["losses"][label],
        [entry["samples"][label] for entry in results["short"]],
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"log_probs": "vllm", "owner": "vllm", "max_model_len": 1024},
        pytest.param({"least_tokens": 1, "max_model_len": 449}, marks=pytest.mark.slow),
    ],
    ids=["echo", "prompt_logprobs", "writes one token at least"],
)
def test_a_server_scores_as_its_model_does_in_this_process(
    make_server, in_process, tmp_path, settings
):
    with make_server(**settings).running() as url:
        results = served_run(url, tmp_path, lambda asked: replace(asked, controls=True))
    rows, losses, short = relabelled(results)
    expected_rows, expected_losses, expected_short = relabelled(in_process)
    assert [row["id"] for row in rows] == [row["id"] for row in expected_rows]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in expected_rows]
    assert [row["score"] for row in rows] == [row["score"] for row in expected_rows]
    assert {row["score"] for row in rows} == {0.0, 1.0}
    assert [row["log_likelihood"] for row in rows] == pytest.approx(
        [row["log_likelihood"] for row in expected_rows], abs=NATS
    )
    assert losses == [pytest.approx(expected, abs=NATS) for expected in expected_losses]
    assert short == expected_short
    (control,) = results["perplexity"]["control"]["losses"]
    assert len(control) > 0
    for kind in ("no answer", "closed book"):
        asked = [entry["task"] for entry in results["control"] if entry["kind"] == kind]
        assert asked == [entry["task"] for entry in results["retrieval"]]
    assert list(problems(results, RunRecord)) == []


def close(value, other):
    """Return whether two results are equal, their numbers up to the rounding of float32."""
    if isinstance(value, dict):
        pairs = ((value[key], other.get(key)) for key in value)
        return value.keys() == other.keys() and all(close(a, b) for a, b in pairs)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(close, value, other))
    return value == (pytest.approx(other, rel=1e-3, abs=NATS) if type(value) is float else other)


def test_users_tasks_key_tokens_and_windows_are_those_of_this_process(tmp_path, make_server):
    asked = {
        "tasks": ["my_lists", "my_sums", "my_pages", "key_tokens", "sliding"],
        "include_paths": [str(write_tasks(tmp_path / "tasks"))],
        **{"lengths": [128, 448], "stride": 32, "windows": 2, "texts": [TEXT]},
    }
    local = rope_patch.evaluate(TINY, ["none"], out=tmp_path / "local", **asked).results
    with make_server(model=AutoModelForCausalLM.from_pretrained(TINY)).running() as url:
        served = rope_patch.evaluate_server(
            url, TINY, out=tmp_path / "served", verify=False, **asked
        ).results
    assert served["run"]["not_run"] == served["run"]["failed"] == []
    for part in ("retrieval", "harness", "perplexity"):
        expected = json.loads(json.dumps(local[part]).replace('"none"', '"served"'))
        if part == "perplexity":
            expected["key_tokens"]["evaluator"] = "the served model"
        assert close(json.loads(json.dumps(served[part])), expected), part


# -- resuming --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(served_model, tokenizer, tmp_path_factory):
    """Return the folder and the results of a run that was not interrupted, and its prompts."""
    folder = tmp_path_factory.mktemp("finished")
    server = EngineServer(served_model, tokenizer=tokenizer)
    with pytest.MonkeyPatch.context() as monkeypatch, server.running() as url:
        leave_undrawn(monkeypatch)
        return folder, served_run(url, folder), server.prompts


def test_the_same_model_at_another_address_is_asked_nothing_again(make_server, finished, caplog):
    folder, results, _ = finished
    server = make_server()
    before = answer_lines(folder)
    with server.running() as url, caplog.at_level("INFO"):
        again = served_run(url, folder)
    assert measured_numbers(again) == measured_numbers(results)
    assert answer_lines(folder) == before
    assert len(server.prompts) == 3  # what it can do, and whether it is the same
    assert "the same model is served here, so they are kept" in caplog.text
    assert again["run"]["continued"]


def test_a_run_that_is_killed_three_times_goes_on_where_it_was(make_server, finished, tmp_path):
    _, expected, prompts = finished
    folder, server = tmp_path / "out", make_server()
    with server.running() as url:
        asked = request(folder, **{**PARTS, "model": url, "methods": ("none",), "factor": None})
        served = ServedRequest(tokenizer=TINY, verify=False, concurrency=2)
        for kills in (1, 2, 3):
            run_until_killed(asked, answers=2, run=partial(run, served=served))
            assert len(answer_lines(folder)) == 2 * kills
        results = run(asked, served)
    assert measured_numbers(results) == measured_numbers(expected)
    # Each start asks three prompts of its own. Of what was asked when a kill came, the answers were
    # lost: one a request at once.
    own, lost = 3 * 3, 3 * 2 * 2
    assert len(prompts) + own <= len(server.prompts) <= len(prompts) + own + lost


def test_a_server_that_dies_loses_nothing(make_server, finished, tmp_path):
    _, expected, _ = finished
    with (
        make_server(dies_after=20).running() as url,
        pytest.raises(CannotReach, match=r"no server answers .* after 2 tries; what was answered"),
    ):
        served_run(url, tmp_path, tries=2)
    kept = answer_lines(tmp_path)
    assert kept
    with make_server().running() as url:
        results = served_run(url, tmp_path)
    assert answer_lines(tmp_path)[: len(kept)] == kept
    assert measured_numbers(results) == measured_numbers(expected)


def test_answers_of_another_rotation_are_not_mixed(make_server, finished):
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    folder, _, _ = finished
    with (
        make_server(model=plain).running() as url,
        pytest.raises(ValueError, match=r"other weights or another rotation; give another --out"),
    ):
        served_run(url, folder)


def test_it_is_said_where_nothing_can_tell_the_model_of_earlier_answers(
    make_server, tmp_path, caplog
):
    """Without log-probabilities, another rotation under the same name would go unnoticed."""

    def written(asked):
        return replace(asked, tasks=("rp_recall",), lengths=(200,), depths=(20, 50, 80))

    message = "it is not checked whether it holds the model of the earlier answers"
    for continues in (False, True):
        with make_server(log_probs="none").running() as url:
            served_run(url, tmp_path, written)
        assert (message in caplog.text) == continues
    assert "so they are kept" not in caplog.text


# -- a server that is busy, slow, or asked for too much at once ------------------------------------


def one_task(asked):
    return replace(asked, tasks=("rp_recall_ll",), lengths=(200,), depths=(20, 50, 80))


def test_a_busy_server_is_asked_again(make_server, tmp_path, caplog):
    with make_server().running() as url:
        results = served_run(url, tmp_path / "first", one_task)
    with make_server(statuses={2: 429, 4: 503, 5: 500, 7: 429}).running() as url:
        again = served_run(url, tmp_path / "second", one_task)
    assert measured_numbers(again) == measured_numbers(results)
    assert "answered 429: not now: trying again" in caplog.text


def test_requests_run_at_once_as_many_as_are_allowed(make_server, tmp_path):
    server = make_server(seconds=0.05)
    with server.running() as url:
        served_run(url, tmp_path, concurrency=3)
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"statuses": dict.fromkeys(range(4, 99), 429)}, "answered 429: not now"),
        ({"seconds": 3.0, "fast": 4}, r"took more than 1 s for .* tokens \(--timeout\)"),
    ],
    ids=["busy", "slow"],
)
def test_a_server_that_stays_busy_or_slow_ends_the_run(make_server, tmp_path, settings, fact):
    with make_server(**settings).running() as url, pytest.raises(CannotReach, match=fact):
        served_run(url, tmp_path, one_task, tries=2, timeout=1)


def test_a_prompt_that_the_server_refuses_is_a_failed_sample(make_server, tmp_path):
    with make_server(statuses={4: 400, 5: 500, 7: 500}).running() as url:
        results = served_run(url, tmp_path, one_task, tries=1, concurrency=1)
    with make_server().running() as url:
        again = served_run(url, tmp_path, one_task)
    rows = results["retrieval"][0]["samples"]["served"]
    failed = [row for row in rows if row["score"] is None]
    assert len(failed) == 2
    assert "answered 400: not now" in failed[0]["error"]
    assert all(row["score"] is not None for row in again["retrieval"][0]["samples"]["served"])


# -- the report ------------------------------------------------------------------------------------


def test_the_report_says_what_was_measured_and_how_it_rotates(make_server, tmp_path):
    with make_server(max_model_len=1024).running() as url, kept_predictions():
        output = run_in_this_process(
            *("eval", url, "--tokenizer", TINY, "--lengths", "200,448", "--out", tmp_path),
            *("--tasks", "rp_recall_ll", "--concurrency", "2", "--json"),
        )
    assert output.returncode == 0, output.stderr
    results = json.loads((tmp_path / "report.json").read_text())
    server = results["run"]["server"]
    assert server["rotates_as_asked"] is False
    assert "scales by yarn, factor 4" in server["rotation"]
    assert server["verification"]["explains"] == ["yarn-4"]
    assert (server["served_model"], server["max_length"]) == ("tiny", 1024)
    page = (tmp_path / "report.md").read_text()
    assert "Served model: " in page
    assert "plain model" not in page.partition("How to read this")[0]
    assert f"How the server rotates: {server['rotation']}".replace("_", "\\_") in page
    assert "| Prompts | token ids |" in page


def test_a_server_that_rotates_as_asked_is_said_to(tmp_path, make_server):
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    with make_server(model=plain).running() as url, kept_predictions():
        evaluation = rope_patch.evaluate_server(
            url, TINY, out=tmp_path, tasks=["rp_recall_ll"], lengths=[200], texts=[TEXT]
        )
    server = evaluation.results["run"]["server"]
    assert server["rotates_as_asked"]
    assert "rotates as asked" in server["rotation"]
    assert "How the server rotates" not in evaluation.overview
    assert evaluation.verdict.startswith("Served model: ")


def test_without_weights_the_report_says_why_it_is_not_verified(make_server, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ASSETS / "tiny-llama" / name).read_bytes())
    with make_server().running() as url:
        results = served_run(url, tmp_path / "out", one_task, tokenizer=str(folder), verify=True)
    server = results["run"]["server"]
    assert server["rotates_as_asked"] is None
    assert server["rotation"].startswith("not verified: no weights are at hand in")
    assert "--against MODEL" in server["rotation"]
