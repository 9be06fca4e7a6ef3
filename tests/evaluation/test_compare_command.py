"""Test the commands eval, compare and report, and the functions of these names."""

import json

import pytest
import torch
from helpers.commands import run_in_this_process
from helpers.evaluations import TEXT, TINY
from helpers.tiny_models import make_model
from transformers import AutoTokenizer, LlamaForCausalLM

import rope_patch

pytestmark = pytest.mark.usefixtures("never_drawn")

SMALL = ["--lengths", "352", "--samples", "2", "--profile", "quick"]
SMALL += ["--tasks", "rp_niah_single_2_ll,perplexity,rp_short_grammar", "--text", TEXT]


def results_in(folder):
    return json.loads((folder / "report.json").read_text())


def check_refused(words, fact):
    """Check that a command ends with one line that names a fact."""
    status, out, err = run_in_this_process(*words)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert fact in err


@pytest.fixture(scope="module")
def compare_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "out"
    words = ["compare", TINY, "--method", "yarn,none", "--factor", "2", *SMALL, "--out", folder]
    return folder, run_in_this_process(*words)


# -- commands --------------------------------------------------------------------------------------


def test_compare_measures_the_plain_model_first_and_prints_the_report_path(compare_run):
    folder, result = compare_run
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"\n\n{folder / 'report.html'}\n")
    assert "Methods, best first by " in result.stdout
    results = results_in(folder)
    assert [m["label"] for m in results["methods"]] == ["none", "yarn ×2"]
    controls = [(entry["task"], entry["kind"]) for entry in results["control"]]
    assert controls == [("rp_niah_single_2_ll", kind) for kind in ("no answer", "closed book")]
    assert results["run"]["command"].startswith(f"rope-patch compare {TINY} --method yarn,none")
    assert "1 of 2 methods done" in result.stderr
    assert result.stderr.startswith("plan: ")
    assert "2 texts" in result.stderr.splitlines()[0]


def test_report_is_rebuilt_from_stored_results(compare_run, tmp_path):
    folder, _ = compare_run
    status, out, err = run_in_this_process("report", folder, "--out", tmp_path / "again")
    assert (status, err) == (0, "")
    assert out.endswith(f"\n\n{tmp_path / 'again' / 'report.html'}\n")
    assert "Methods, best first by " in out
    for name in ("report.json", "report.md"):
        assert (tmp_path / "again" / name).read_text() == (folder / name).read_text()


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
    words = ("compare", folder / "model", "--method", "none", *SMALL, "--out", folder / "lr=1e-5")
    status, _, err = run_in_this_process(*words)
    assert status == 0, err
    return folder / "lr=1e-5"


@pytest.mark.parametrize(("prefix", "label"), [("tuned=", "tuned"), ("", "lr=1e-5")])
def test_a_trained_model_is_a_further_method(compare_run, trained_run, tmp_path, prefix, label):
    folder, _ = compare_run
    words = ["report", folder, "--trained", f"{prefix}{trained_run}", "--out", tmp_path]
    status, out, err = run_in_this_process(*words)
    assert (status, err) == (0, "")
    assert f"{label} " in out
    before, own, both = map(results_in, (folder, trained_run, tmp_path))
    assert [m["label"] for m in both["methods"]] == ["none", "yarn ×2", label]
    (own_label,) = (m["label"] for m in own["methods"])
    for kind in ("retrieval", "short"):
        for task, task_before, own_task in zip(both[kind], before[kind], own[kind], strict=True):
            assert task["samples"]["none"] == task_before["samples"]["none"]
            assert task["samples"][label] == own_task["samples"][own_label]
            assert task["samples"][label] != task["samples"]["yarn ×2"]


def test_reports_of_other_questions_or_without_a_folder_are_refused(
    compare_run, trained_run, tmp_path
):
    folder, _ = compare_run
    for words, fact in [
        ([folder, folder], "--out FOLDER"),
        ([folder, "--trained", trained_run], "--out FOLDER"),
        ([folder, "--trained", f"none={trained_run}", "--out", tmp_path], "'none'"),
        ([folder, trained_run, "--trained", trained_run, "--out", tmp_path], "2 kinds of runs"),
        ([folder, "--trained", tmp_path / "no", "--out", tmp_path], "there is no"),
    ]:
        check_refused(["report", *words], fact)
    assert not list(tmp_path.iterdir())


def test_changed_and_foreign_results_are_refused(compare_run, tmp_path):
    folder, _ = compare_run
    text = (folder / "report.json").read_text()
    for content, fact in [
        (text.replace('"seed": 42', '"seed": 43'), "was changed"),
        ("{}", "is not a report"),
        ("{", "is not JSON"),
    ]:
        (tmp_path / "report.json").write_text(content)
        check_refused(["report", tmp_path], fact)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_json_option_prints_only_json_to_stdout(tmp_path):
    words = ["--method", "none,none", "--lengths", "128", "--tasks", "perplexity", "--json"]
    words += ["--control-context", "100", "--out", tmp_path]
    status, out, _ = run_in_this_process("eval", TINY, *words)
    assert status == 0
    assert json.loads(out) == results_in(tmp_path)
    assert len(json.loads(out)["methods"]) == 1


@pytest.mark.parametrize(
    ("error", "status", "fact"),
    [
        (RuntimeError("boom"), 2, "error: not one of 3 samples could be answered"),
        (KeyboardInterrupt(), 130, "the same command continues from here"),
    ],
)
def test_exit_status_if_every_sample_fails_or_ctrl_c_is_typed(
    tmp_path, monkeypatch, error, status, fact
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    words = ["--method", "none", "--lengths", "352", "--tasks", "rp_niah_single_2_ll"]
    result = run_in_this_process("eval", TINY, *words, "--out", tmp_path)
    assert (result.returncode, result.stdout) == (status, "")
    assert fact in result.stderr


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["eval", TINY, "--method", "none", "--lengths", "12,x"], "--lengths"),
        (["eval", TINY, "--method", "none", "--depths", "-1"], "--depths"),
        (["eval", TINY, "--method", "none", "--tasks", ","], "at least one task"),
        (["eval", TINY, "--method", "none", "--option", "x"], "KEY=VALUE"),
        (["compare", TINY], "exactly one of --factor and --length"),
        (["compare", TINY, "--method", "yran", "--factor", "2"], "'yarn'"),
        (["compare", TINY, "--methods", "yran", "--factor", "2", "--profile", "quick"], "'yarn'"),
        (["compare", TINY, "--factor", "2", "--option", "no_such=1"], "'no_such'"),
        (["compare", TINY, "--factor", "2", "--profile", "fast"], "'fast'"),
        (["compare", "/no/such", "--factor", "2", "--profile", "quick"], "no such folder"),
        (["compare", TINY, "--factor=2", "--tasks=perplexity", "--until-decided"], "perplexity"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_bad_input_is_one_error_line_and_writes_nothing(tmp_path, monkeypatch, words, fact):
    monkeypatch.chdir(tmp_path)
    check_refused(words, fact)
    assert not list(tmp_path.iterdir())


# -- functions -------------------------------------------------------------------------------------

OPTIONS = {"factor": 2, "lengths": [256, 400], "tasks": ["rp_recall_ll"], "documents": 1}
WORDS = ["--factor", 2, "--lengths", "256,400", "--tasks", "rp_recall_ll", "--documents", 1]


def test_evaluate_measures_what_the_command_measures_and_reads_as_its_report(tmp_path):
    shown = []
    few = {"out": tmp_path / "a", "show": shown.append, "samples": 4}
    done = rope_patch.evaluate(TINY, ["none", "yarn"], **OPTIONS, **few)
    words = ["eval", TINY, "--method", "none,yarn", *WORDS, "--samples", 4, "--out", tmp_path / "b"]
    assert run_in_this_process(*words).returncode == 0
    expected, got = results_in(tmp_path / "b"), results_in(done.folder)
    for part in ("methods", "retrieval", "control"):
        assert got[part] == expected[part]
    assert got["run"].keys() == expected["run"].keys()
    assert done.verdict in (done.folder / "report.md").read_text().replace("\n", " ")
    assert shown == [str(done)] == [done.overview]
    assert "yarn" in done.overview
    assert done.usable.keys() == got["usable"].keys() == {"none", "yarn ×2"}
    for label, usable in done.usable.items():
        record = got["usable"][label]["all"]
        assert (usable.estimate, usable.low, list(usable.lengths)) == (
            *(record["estimate"], record["low"]),
            [256, 400],
        )
        assert usable.text in " ".join(done.overview.split())
    assert done.report.is_file()
    assert all(path.read_bytes()[1:4] == b"PNG" for path in done.figures.values())
    assert "answers" in done.figures
    html = done._repr_html_()
    assert html.startswith("<div><strong>")
    assert "yarn" in html


def test_compare_takes_what_is_left_out_from_the_profile(tmp_path):
    done = rope_patch.compare(TINY, ["linear"], profile="quick", out=tmp_path / "a", **OPTIONS)
    words = ["compare", TINY, "--method", "linear", *WORDS, "--profile", "quick"]
    assert run_in_this_process(*words, "--out", tmp_path / "b").returncode == 0
    expected, got = results_in(tmp_path / "b"), results_in(done.folder)
    assert [m["label"] for m in got["methods"]] == [m["label"] for m in expected["methods"]]
    for part in ("retrieval", "control"):
        assert got[part] == expected[part]
    assert len(expected["retrieval"][0]["samples"]["none"]) == 2 * 10  # of quick, at two lengths


@pytest.mark.parametrize("function", [rope_patch.evaluate, rope_patch.compare])
@pytest.mark.parametrize(
    ("model", "arguments", "error", "fact"),
    [
        (make_model, {}, TypeError, r"LlamaForCausalLM.*rope_patch\.save"),
        (None, {"methods": ["yarn"], "factor": 2, "sample": 4}, TypeError, "'samples'"),
        (None, {"methods": "yarn", "factor": 2}, ValueError, r"\['yarn'\]"),
        (None, {"methods": ["yarm"], "factor": 2}, ValueError, "'yarm'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    function, tmp_path, model, arguments, error, fact
):
    with pytest.raises(error, match=fact):
        function(TINY if model is None else model(), out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
