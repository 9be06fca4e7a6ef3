"""The commands eval, compare and report, as they are typed."""

import json

import pytest
from helpers.commands import here, typed
from helpers.evaluations import TINY
from transformers import LlamaForCausalLM

SMALL = [
    "--lengths",
    "352",
    "--samples",
    "2",
    "--tasks",
    "rp_niah_single_2_ll,perplexity,rp_short_cloze",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "out"
    arguments = ["--method", "yarn,none", "--factor", "2", *SMALL, "--profile", "quick"]
    return folder, typed("compare", TINY, *arguments, "--out", str(folder))


def test_compare_measures_the_plain_model_first_and_says_where_the_report_is(compared):
    folder, done = compared
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\n\n{folder / 'report.html'}\n")
    assert "Each method, with 95% intervals\n  method " in done.stdout
    results = json.loads((folder / "report.json").read_text())
    assert [m["label"] for m in results["methods"]] == ["none", "yarn ×2"]
    assert [entry["task"] for entry in results["control"]] == ["rp_niah_single_2_ll"]
    assert results["run"]["command"].startswith(f"rope-patch compare {TINY} --method yarn,none")
    assert "1 of 2 methods done" in done.stderr


def test_the_report_is_written_again_from_what_was_saved(compared, tmp_path):
    folder, _ = compared
    status, out, err = here("report", folder, "--out", tmp_path / "again")
    assert (status, err) == (0, "")
    again = tmp_path / "again"
    assert out.endswith(f"\n\n{again / 'report.html'}\n")
    assert "Each method, with 95% intervals\n  method " in out
    for name in ("report.json", "report.md"):
        assert (again / name).read_text() == (folder / name).read_text()


def test_several_runs_need_a_folder_of_their_own(compared):
    folder, _ = compared
    status, out, err = here("report", folder, folder)
    assert (status, out) == (1, "")
    assert "give --out FOLDER" in err


def test_changed_and_foreign_results_are_refused(compared, tmp_path):
    folder, _ = compared
    text = (folder / "report.json").read_text()
    for content, reason in [
        (text.replace('"seed": 42', '"seed": 43'), "was changed after it was written"),
        ("{}", "is not a report"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "report.json").write_text(content)
        status, out, err = here("report", tmp_path)
        assert (status, out) == (1, "")
        assert err.startswith("error: ")
        assert reason in err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --factor and --length, got neither"),
        (["--method", "yran", "--factor", "2"], "did you mean 'yarn'"),
        (["--factor", "2", "--option", "no_such=1"], "has the option 'no_such'"),
    ],
)
def test_methods_are_checked_before_anything_is_said_or_read(tmp_path, arguments, message):
    status, out, err = here("compare", TINY, *arguments, "--out", tmp_path / "new")
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_json_goes_to_stdout_and_nothing_else(tmp_path):
    arguments = ["--method", "none,none", "--lengths", "128", "--tasks", "perplexity", "--json"]
    arguments += ["--control-context", "100", "--out", tmp_path]
    status, out, _ = here("eval", TINY, *arguments)
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text())
    assert len(json.loads(out)["methods"]) == 1


def test_where_all_fails_the_status_says_so(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    arguments = ["--method", "none", "--lengths", "352", "--tasks", "rp_niah_single_2_ll"]
    status, out, err = here("eval", TINY, *arguments, "--out", tmp_path)
    assert (status, out) == (1, "")
    assert "error: not one of 3 samples could be answered: RuntimeError: boom" in err


def test_stopping_by_hand_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "forward", stop)
    arguments = ["--method", "none", "--lengths", "352", "--tasks", "rp_niah_single_2_ll"]
    status, out, err = here("eval", TINY, *arguments, "--out", tmp_path)
    assert (status, out) == (130, "")
    assert "the same command continues from here" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["eval", TINY, "--method", "none", "--lengths", "12,x"],
            "--lengths must be whole numbers",
        ),
        (["eval", TINY, "--method", "none", "--depths", "-1"], "--depths must be whole numbers"),
        (["eval", TINY, "--method", "none", "--tasks", ","], "at least one task"),
        (["eval", TINY, "--method", "none", "--option", "x"], "--option takes KEY=VALUE"),
        (["compare", TINY, "--factor", "2", "--profile", "fast"], "unknown profile 'fast'"),
        (["compare", TINY, "--methods", "yran", "--factor", "2", "--profile", "quick"], "'yarn'"),
        (["compare", "/no/such", "--factor", "2", "--profile", "quick"], "no such folder"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = here(*arguments)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert not list(tmp_path.iterdir())
