"""Test the commands eval, compare and report: output, exit status and files."""

import json

import pytest
import torch
from helpers.commands import run_in_new_process, run_in_this_process
from helpers.evaluations import TINY
from transformers import AutoTokenizer, LlamaForCausalLM

import rope_patch

SMALL_OPTIONS = [
    "--lengths",
    "352",
    "--samples",
    "2",
    "--tasks",
    "rp_niah_single_2_ll,perplexity,rp_short_cloze",
]


@pytest.fixture(scope="module")
def compare_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "out"
    arguments = ["--method", "yarn,none", "--factor", "2", *SMALL_OPTIONS, "--profile", "quick"]
    return folder, run_in_new_process("compare", TINY, *arguments, "--out", str(folder))


def test_compare_measures_the_plain_model_first_and_prints_the_report_path(compare_run):
    folder, result = compare_run
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"\n\n{folder / 'report.html'}\n")
    assert "Methods, best first by " in result.stdout
    results = json.loads((folder / "report.json").read_text())
    assert [m["label"] for m in results["methods"]] == ["none", "yarn ×2"]
    assert [entry["task"] for entry in results["control"]] == ["rp_niah_single_2_ll"]
    assert results["run"]["command"].startswith(f"rope-patch compare {TINY} --method yarn,none")
    assert "1 of 2 methods done" in result.stderr
    first = result.stderr.splitlines()[0]
    assert first.startswith("plan: this run cannot decide which method is better: it has 2 texts")


def test_report_is_rebuilt_from_stored_results(compare_run, tmp_path):
    folder, _ = compare_run
    status, out, err = run_in_this_process("report", folder, "--out", tmp_path / "again")
    assert (status, err) == (0, "")
    report_folder = tmp_path / "again"
    assert out.endswith(f"\n\n{report_folder / 'report.html'}\n")
    assert "Methods, best first by " in out
    for name in ("report.json", "report.md"):
        assert (report_folder / name).read_text() == (folder / name).read_text()


def test_report_of_several_runs_needs_an_output_folder(compare_run):
    folder, _ = compare_run
    status, out, err = run_in_this_process("report", folder, folder)
    assert (status, out) == (2, "")
    assert "give --out FOLDER" in err


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """Evaluate an extended model whose weights moved a little, as training moves them."""
    folder = tmp_path_factory.mktemp("trained")
    model = rope_patch.load(TINY, method="yarn", factor=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")
    arguments = ["--method", "none", *SMALL_OPTIONS, "--profile", "quick"]
    run = ("compare", folder / "model", *arguments, "--out", folder / "lr=1e-5")
    status, _, err = run_in_this_process(*run)
    assert status == 0, err
    return folder / "lr=1e-5"


@pytest.mark.parametrize(("prefix", "label"), [("tuned=", "tuned"), ("", "lr=1e-5")])
def test_a_trained_model_is_a_further_method(compare_run, trained_run, tmp_path, prefix, label):
    folder, _ = compare_run
    arguments = ["report", folder, "--trained", f"{prefix}{trained_run}"]
    status, out, err = run_in_this_process(*arguments, "--out", tmp_path)
    assert (status, err) == (0, "")
    assert f"{label} " in out
    before, own, both = (
        json.loads((run / "report.json").read_text()) for run in (folder, trained_run, tmp_path)
    )
    assert [m["label"] for m in both["methods"]] == ["none", "yarn ×2", label]
    (own_label,) = (m["label"] for m in own["methods"])
    for kind in ("retrieval", "short"):
        for task, task_before, own_task in zip(both[kind], before[kind], own[kind], strict=True):
            assert task["samples"]["none"] == task_before["samples"]["none"]
            assert task["samples"][label] == own_task["samples"][own_label]
            assert task["samples"][label] != task["samples"]["yarn ×2"]


def test_trained_models_of_other_questions_are_refused(compare_run, trained_run, tmp_path):
    folder, _ = compare_run
    for arguments, reason in [
        ([folder, "--trained", trained_run], "give --out FOLDER"),
        ([folder, "--trained", f"none={trained_run}", "--out", tmp_path], "'none' is the label of"),
        ([folder, trained_run, "--trained", trained_run, "--out", tmp_path], "got 2 kinds of runs"),
        ([folder, "--trained", tmp_path / "no", "--out", tmp_path], "there is no"),
    ]:
        status, out, err = run_in_this_process("report", *arguments)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert reason in err
    assert not list(tmp_path.iterdir())


def test_changed_and_foreign_results_are_refused(compare_run, tmp_path):
    folder, _ = compare_run
    text = (folder / "report.json").read_text()
    for content, reason in [
        (text.replace('"seed": 42', '"seed": 43'), "was changed after it was written"),
        ("{}", "is not a report"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "report.json").write_text(content)
        status, out, err = run_in_this_process("report", tmp_path)
        assert (status, out) == (2, "")
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
def test_bad_methods_fail_with_one_line_before_the_model_is_read(tmp_path, arguments, message):
    status, out, err = run_in_this_process("compare", TINY, *arguments, "--out", tmp_path / "new")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_json_option_prints_only_json_to_stdout(tmp_path):
    arguments = ["--method", "none,none", "--lengths", "128", "--tasks", "perplexity", "--json"]
    arguments += ["--control-context", "100", "--out", tmp_path]
    status, out, _ = run_in_this_process("eval", TINY, *arguments)
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text())
    assert len(json.loads(out)["methods"]) == 1


def test_exit_status_is_2_if_every_sample_fails(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    arguments = ["--method", "none", "--lengths", "352", "--tasks", "rp_niah_single_2_ll"]
    status, out, err = run_in_this_process("eval", TINY, *arguments, "--out", tmp_path)
    assert (status, out) == (2, "")
    assert "error: not one of 3 samples could be answered: RuntimeError: boom" in err


def test_interrupt_prints_how_to_continue(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "forward", stop)
    arguments = ["--method", "none", "--lengths", "352", "--tasks", "rp_niah_single_2_ll"]
    status, out, err = run_in_this_process("eval", TINY, *arguments, "--out", tmp_path)
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
        (
            ["compare", TINY, "--factor=2", "--tasks=perplexity", "--until-decided"],
            "expected a retrieval task, got perplexity",
        ),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_bad_input_is_one_error_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run_in_this_process(*arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert not list(tmp_path.iterdir())
