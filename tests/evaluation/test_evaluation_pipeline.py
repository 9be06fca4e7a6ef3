"""Test whole evaluations of the tiny trained model: results, their schema, files and failures."""

import copy
import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.built_tasks import build_rows
from helpers.evaluations import TASKS, TEXT, TINY, answer_lines, measured_numbers, request
from helpers.schema import problems
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import rope_patch
from rope_patch import statistics
from rope_patch.evaluation import (
    LongContextLM,
    RunRecord,
    RunsRecord,
    RunStatistics,
    evaluate,
    summary_cautions,
)
from rope_patch.evaluation.measures import lm_eval_tasks, perplexity
from rope_patch.lab import LabRecord, LabResults
from rope_patch.tasks import documents
from rope_patch.utils import verify_checksum

pytestmark = pytest.mark.usefixtures("never_drawn")

LABELS = ["none", "yarn ×4"]
PARTS = (*TASKS, "rp_json_kv_mc", "key_tokens", "sliding")
ROOT = Path(__file__).parents[2]
REPORTS = sorted((ROOT / "eval" / "results").rglob("report.json"))
BEFORE_FORMATS = {"before", "mixed-after", "yarn-after"}  # folders of reports without a format


def whole_request(folder, **changes):
    """Return a request for every part that works offline."""
    parts = {
        "tasks": (*PARTS, "speed"),
        "controls": True,
        "stride": 32,
        "windows": 2,
        "documents": 2,
    }
    return request(folder, **{**parts, **changes})


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    results = evaluate(whole_request(folder))
    shutil.copy(folder / "report.json", folder / "first.json")  # other tests write there, too
    return folder, results


def first_task_rows(results, label):
    return results["retrieval"][0]["samples"][label]


# -- results ---------------------------------------------------------------------------------------


def test_all_requested_measures_are_in_the_results(finished_run):
    _, results = finished_run
    assert [method["label"] for method in results["methods"]] == LABELS
    assert [method["method"] for method in results["methods"]] == [None, "yarn"]
    long = results["perplexity"]
    assert [d["name"] for d in long["documents"]] == [TEXT, f"{TEXT} 2"]
    assert (long["block"], long["window"]) == (32, 32)
    assert long["control"]["context"] == 256  # the trained length
    assert list(long["control"]["losses"][0]) == [str(e) for e in range(320, 449, 64)]
    key_tokens = long["key_tokens"]
    for label in LABELS:
        assert [len(blocks) for blocks in long["losses"][label]] == [448 // 32] * 2
        found = key_tokens["losses"][label]
        assert list(map(len, found)) == list(map(len, key_tokens["positions"]))
        assert all(math.isfinite(loss) for document in found for loss in document)
        for windows in long["sliding"]["losses"][label].values():
            assert [len(losses) for losses in windows] in ([2, 2], [1, 1])
        for entry in results["retrieval"]:
            rows = entry["samples"][label]
            grid = [(row["length"], row["depth"]) for row in rows]
            assert grid == [(length, depth) for length in (336, 448) for depth in (20, 80)]
            assert all(0 <= row["score"] <= 1 and row["log_likelihood"] < 0 for row in rows)
            assert [row["text"] for row in rows] == [0, 0, 0, 0]
    retrieved = ["rp_nonliteral", "rp_json_kv_ll", "rp_json_kv_mc"]
    assert [entry["task"] for entry in results["retrieval"]] == retrieved
    (short,) = results["short"]
    assert short["task"] == "rp_short_cloze"
    assert [len(short["samples"][label]) for label in LABELS] == [3, 3]
    assert {x for scores in short["samples"].values() for x in scores} <= {0, 1}
    controls = [(entry["kind"], entry["task"]) for entry in results["control"]]
    assert controls == [*product(("no answer", "closed book"), retrieved)]
    for entry in results["control"]:
        assert entry["lengths"] == [336]
        assert list(entry["samples"]) == ["none"]
    assert results["run"]["not_run"] == []
    assert 0 < results["run"]["prompt_tokens"]["read"] < results["run"]["prompt_tokens"]["asked"]


def test_a_task_that_the_model_answers_by_heart_is_named(tmp_path, tokenizer):
    """The file's answers are the words that transformers writes after a question alone."""
    bank = tmp_path / "questions.jsonl"

    def write(answer):
        places = ["attic", "barn", "cellar", "garden", "harbour", "kitchen", "library", "mill"]
        entries = [
            {
                "question": f"What is in the {place}?",
                "answers": [answer],
                "context": [f"The {place} is old and nobody comes.", f"The {place} has {answer}."],
            }
            for place in places
        ]
        bank.write_text("\n".join(map(json.dumps, entries)))

    write("a chest")
    (row,) = build_rows("rp_qa_1", length=400, samples=1, questions=str(bank), closed_book=True)
    ids = tokenizer(f"{row['input']} {row['gen_prefix']}", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(TINY)
    written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    write(" ".join(tokenizer.decode(written).split()[:2]))
    asked = {"tasks": ("rp_qa_1",), "questions": str(bank), "methods": ("none",), "per_text": 1}
    results = evaluate(request(tmp_path / "out", controls=True, samples=8, **asked))
    (closed,) = (entry for entry in results["control"] if entry["kind"] == "closed book")
    scores = [sample["score"] for sample in closed["samples"]["none"]]
    assert len(scores) == 8
    assert sum(scores) > 4
    (warning,) = (line for line in summary_cautions(RunStatistics(results)) if "qa_1" in line)
    assert f"without its text, {sum(scores) / 8:.0%}".replace(".0", "") in warning
    assert warning in (tmp_path / "out" / "report.md").read_text().replace("\\_", "_")


def test_losses_and_likelihoods_equal_those_of_transformers(finished_run, tokenizer):
    _, results = finished_run
    model = AutoModelForCausalLM.from_pretrained(TINY)
    (document,) = documents([TEXT], tokenizer, 448)
    task = lm_eval_tasks.build("rp_nonliteral", tokenizer, [448], 2, [20, 80], seed=42, per_text=2)[
        0
    ]
    doc = task.dataset["test"][1]
    for label, arguments in zip(LABELS, [None, {"method": "yarn", "factor": 4}], strict=True):
        if arguments:
            rope_patch.patch(model, **arguments)
        with torch.no_grad():
            logits = model(torch.tensor([document.tokens])).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(document.tokens[1:]), reduction="none"
        )
        blocks = [losses[:31].mean(), *(losses[31:].split(32))]
        expected = [blocks[0].item(), *(block.mean().item() for block in blocks[1:])]
        assert results["perplexity"]["losses"][label][0] == pytest.approx(expected, abs=1e-4)
        prompt = tokenizer(f"{doc['input']} {doc['gen_prefix']}").input_ids
        both = tokenizer(f"{doc['input']} {doc['gen_prefix']} {doc['target']}").input_ids
        with torch.no_grad():
            scores = model(torch.tensor([both])).logits[0].log_softmax(-1)
        total = sum(scores[i - 1, both[i]].item() for i in range(len(prompt), len(both)))
        row = first_task_rows(results, label)[3]
        assert row["id"] == doc["id"]
        assert row["log_likelihood"] == pytest.approx(total, abs=1e-3)


def test_methods_give_different_results_of_the_same_samples(finished_run):
    _, results = finished_run
    none, yarn = results["perplexity"]["losses"].values()
    assert none[0][-1] != yarn[0][-1]
    for entry in results["retrieval"]:
        none, yarn = entry["samples"].values()
        assert [row["id"] for row in none] == [row["id"] for row in yarn]
        for a, b in zip(none, yarn, strict=True):
            assert a["log_likelihood"] != b["log_likelihood"]


def test_the_folder_holds_the_report_and_the_lm_eval_results(finished_run):
    folder, results = finished_run
    files = {"report.html", "report.md", "report.json", "model-index.yaml"}
    assert files <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "first.json").read_text())["methods"] == results["methods"]
    (path,) = (folder / "lm_eval").glob("*yarn*448*")
    lm_eval_results = json.loads(path.read_text())
    assert lm_eval_results["config"]["rope_patch"] == "yarn ×4, 256 → 1,024 tokens"
    assert "rp_nonliteral@448" in lm_eval_results["results"]
    assert all(name.endswith("@448") for name in lm_eval_results["results"])
    sample = lm_eval_results["samples"]["rp_nonliteral@448"][0]
    assert {"id", "answers", "depth", "length"} <= sample["doc"].keys()
    assert "input" not in sample["doc"]


def test_the_same_request_computes_nothing_again(finished_run, monkeypatch):
    folder, results = finished_run
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("computed again"))
    before = answer_lines(folder)
    again = evaluate(whole_request(folder, tasks=PARTS))
    assert measured_numbers(again) == measured_numbers(results)
    assert answer_lines(folder) == before


# -- the schema of results -------------------------------------------------------------------------


def test_an_evaluation_returns_and_writes_what_the_schema_says(finished_run):
    folder, returned = finished_run
    written = verify_checksum((folder / "first.json").read_bytes(), "first.json")
    assert list(problems(returned, RunRecord)) == []
    assert list(problems(written, RunRecord)) == []
    # Each part is there, so that the schema was tried on it.
    for part in RunRecord.__required_keys__ - {"harness"}:
        assert returned[part], part
    for part in ("control", "short_control", "key_tokens", "sliding"):
        assert returned["perplexity"][part], part
    assert returned["usable"] == written["usable"]
    choices = returned["retrieval"][2]["samples"]["none"]
    assert all("chance" in row for row in choices)


@pytest.mark.parametrize("path", REPORTS, ids=[path.parent.name for path in REPORTS])
def test_every_report_of_the_project_is_what_the_schema_says(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") == "rope_patch.lab/1":
        assert list(problems(LabResults.load(path).results, LabRecord)) == []
        return
    if path.parent.name in BEFORE_FORMATS:
        with pytest.raises(ValueError, match="before formats"):
            verify_checksum(content, str(path))
        return
    kind = RunsRecord if "runs" in content else RunRecord
    assert list(problems(verify_checksum(content, str(path)), kind)) == []


def test_reports_were_found():
    assert len(REPORTS) > len(BEFORE_FORMATS)
    assert {path.parent.name for path in REPORTS} > BEFORE_FORMATS


DAMAGES = {  # what is set, or lost where it is None
    "['perplexity']['control'] lacks 'context'": (("perplexity", "control", "context"), None),
    "['retrieval'][0]['samples']['none'][0] has an unknown 'hits'": (
        ("retrieval", 0, "samples", "none", 0, "hits"),
        1,
    ),
    "['cost']['none']['peak_bytes'] is a str": (("cost", "none", "peak_bytes"), "12"),
    "['short'][0]['n'] is a float": (("short", 0, "n"), 3.0),
    "['run']['geometry']['all']['theta'] is a bool": (("run", "geometry", "all", "theta"), True),
    "['perplexity']['losses']['none'][0][0] is": (("perplexity", "losses", "none", 0, 0), "inf"),
    "['methods'][1]['frequencies']['all']['inv_freq'] is a": (
        ("methods", 1, "frequencies", "all", "inv_freq"),
        {},
    ),
}


def damaged(results, path, value):
    """Return a copy of results with another value somewhere; None removes it."""
    *parents, key = path
    part = changed = copy.deepcopy(results)
    for name in parents:
        part = part[name]
    if value is None:
        del part[key]
    else:
        part[key] = value
    return changed


@pytest.mark.parametrize("problem", DAMAGES)
def test_other_results_are_not_what_the_schema_says(finished_run, problem):
    _, results = finished_run
    (line,) = problems(damaged(results, *DAMAGES[problem]), RunRecord)
    assert line.startswith(f"results{problem}")


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", float("inf"), 1.5])
def test_infinities_are_texts_in_files_and_numbers_before(finished_run, value):
    _, results = finished_run
    changed = damaged(results, ("perplexity", "losses", "none", 0, 0), value)
    assert list(problems(changed, RunRecord)) == []


# -- failures --------------------------------------------------------------------------------------


def fail_on_text(monkeypatch, tokenizer, part, error):
    """Make the model raise an error when it reads a text; clear the returned list to stop that."""
    forward, is_failing = LlamaForCausalLM.forward, [True]

    def forward_or_raise(self, input_ids=None, **kwargs):
        if is_failing and any(part in tokenizer.decode(row) for row in input_ids):
            raise error
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward_or_raise)
    return is_failing


def test_a_failed_sample_is_reported_and_retried(
    finished_run, tmp_path, monkeypatch, tokenizer, caplog
):
    _, expected = finished_run
    eval_request = request(tmp_path, methods=("none",), factor=None, tasks=("rp_nonliteral",))
    task = lm_eval_tasks.build("rp_nonliteral", tokenizer, [336], 2, [20, 80], seed=42, per_text=2)
    failing_doc = task[0].dataset["test"][1]
    subject = failing_doc["input"].split("?")[-2].split()[-1]  # of this sample's question alone
    error = RuntimeError("boom\nmore")
    is_failing = fail_on_text(monkeypatch, tokenizer, subject, error)
    rows = first_task_rows(evaluate(eval_request), "none")
    assert {row["id"]: row["error"] for row in rows if "error" in row} == {
        failing_doc["id"]: "RuntimeError: boom more"
    }
    expected_rows = {row["id"]: row for row in first_task_rows(expected, "none")}
    for row in rows:
        if "error" in row:
            assert (row["score"], row["log_likelihood"]) == (None, None)
        else:
            assert row == expected_rows[row["id"]]
    assert "1 of 4 samples failed (RuntimeError: boom more)" in caplog.text
    caplog.clear()
    is_failing.clear()
    retried = first_task_rows(evaluate(eval_request), "none")
    assert all("error" not in row for row in retried)
    got = [row["log_likelihood"] for row in retried]
    assert got == pytest.approx([row["log_likelihood"] for row in expected_rows.values()], abs=1e-3)
    assert "failed" not in caplog.text
    assert sorted(is_failure for _, is_failure in answer_lines(tmp_path)) == [False] * 4 + [True]


@pytest.mark.parametrize(
    "tasks", [("rp_nonliteral", "perplexity"), ("perplexity",), ("rp_short_cloze",)]
)
def test_a_run_in_which_everything_fails_is_an_error(tmp_path, monkeypatch, tasks):
    def fail(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    monkeypatch.setattr(perplexity, "token_losses", fail)
    with pytest.raises(ValueError, match=r"could be .*boom"):
        evaluate(request(tmp_path, methods=("none",), factor=None, tasks=tasks))


def test_a_failed_perplexity_leaves_those_of_other_methods(tmp_path, monkeypatch, caplog):
    original = perplexity.document_losses

    def fail_for_yarn(model, ids, label, *rest):
        if "yarn" in label:
            raise torch.OutOfMemoryError("no memory")
        return original(model, ids, label, *rest)

    monkeypatch.setattr(perplexity, "document_losses", fail_for_yarn)
    results = evaluate(request(tmp_path, tasks=("perplexity",)))
    assert list(results["perplexity"]["losses"]) == ["none"]
    assert results["run"]["not_run"] == ["perplexity of yarn ×4: OutOfMemoryError: no memory"]
    assert "not run: perplexity of yarn" in caplog.text


# -- samples ---------------------------------------------------------------------------------------


def half_width(rows):
    interval = statistics.accuracy([row["score"] for row in rows], [row["text"] for row in rows])
    return (interval.high - interval.low) / 2


@pytest.mark.parametrize(("precision", "max_samples"), [(0.2, 500), (0.02, 12)])
def test_samples_grow_until_intervals_are_narrow_enough(tmp_path, precision, max_samples):
    growing = {"precision": precision, "max_samples": max_samples}
    eval_request = request(tmp_path, tasks=("rp_json_kv_ll",), lengths=(336,), **growing)
    (entry,) = evaluate(eval_request)["retrieval"]
    (count,) = {len(rows) for rows in entry["samples"].values()}  # the same under every method
    widths = [half_width(rows) for rows in entry["samples"].values()]
    assert count == max_samples or max(widths) <= precision
    ten_samples = evaluate(replace(eval_request, precision=None, samples=10))["retrieval"][0]
    for label, rows in ten_samples["samples"].items():
        assert rows == entry["samples"][label][:10]
    assert count in (10, 12) or max(map(half_width, ten_samples["samples"].values())) > precision
    assert len(answer_lines(tmp_path)) == 2 * count


def test_other_options_and_dtypes_give_other_results(finished_run):
    folder, results = finished_run
    eval_request = request(folder, methods=("yarn",), tasks=("perplexity",))
    before = results["perplexity"]["losses"]["yarn ×4"][0]
    for changes in ({"options": {"attention_factor": 1.0}}, {"dtype": "bfloat16"}):
        other = evaluate(replace(eval_request, **changes))["perplexity"]["losses"]
        ((losses,),) = other.values()
        assert losses != before
        assert losses == pytest.approx(before, abs=3)


def test_prefix_sharing_changes_no_score(finished_run, tmp_path):
    _, results = finished_run
    alone = {"methods": ("none",), "factor": None, "tasks": ("rp_nonliteral",)}
    again = evaluate(request(tmp_path, share=False, **alone))
    assert first_task_rows(again, "none") == first_task_rows(results, "none")
    tokens = again["run"]["prompt_tokens"]
    assert tokens["read"] > 0.99 * tokens["asked"] - 8


def test_tasks_with_the_same_prompts_read_them_once_and_need_no_generation(tmp_path, monkeypatch):
    """Both tasks have the same prompts, and the target is one of the choices."""
    monkeypatch.setattr(LongContextLM, "generate_until", None)
    likelihood, choice = "rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc"
    read_tokens = []
    for names in ((likelihood,), (choice,), (likelihood, choice)):
        changes = {"tasks": names, "lengths": (700,), "samples": 2, "per_text": 2}
        folder = tmp_path / str(len(names)) / names[0]
        results = evaluate(request(folder, methods=("none",), factor=None, **changes))
        assert results["perplexity"] is None
        assert [entry["task"] for entry in results["retrieval"]] == list(names)
        read_tokens.append(results["run"]["prompt_tokens"]["read"])
    assert len(set(read_tokens)) == 1


# -- models saved with their patch, length-dependent methods ---------------------------------------


@pytest.mark.parametrize("method", ["ntk", "mixed-yarn"])
def test_a_saved_patch_is_evaluated_without_patching_twice(tmp_path, tokenizer, method):
    """With and without a form in a config."""
    rope_patch.save(rope_patch.load(TINY, method, factor=4), tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    eval_request = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match=rf"saved with {method} in it: .*--method none"):
        evaluate(replace(eval_request, methods=(method,)))
    results = evaluate(replace(eval_request, methods=("none",), factor=None))
    ((label, (got,)),) = results["perplexity"]["losses"].items()
    assert label == f"{method} ×4"
    if method == "ntk":
        (document,) = documents([TEXT], tokenizer, 448)
        model = AutoModelForCausalLM.from_pretrained(TINY)
        with rope_patch.patch(model, method, factor=4):
            losses = perplexity.document_losses(model, document.tokens, method)
        expected = perplexity.block_losses(losses, 32)
    else:  # patched as it was evaluated before it was saved
        original = evaluate(replace(eval_request, model=TINY, methods=(method,)))
        ((expected,),) = original["perplexity"]["losses"].values()
    assert got == pytest.approx(expected, abs=1e-4)


def test_dynamic_methods_equal_the_plain_model_on_short_texts(tmp_path):
    """They need no factor, and their losses within the trained length equal the plain model's."""
    changes = {"methods": ("none", "dynamic-yarn"), "factor": None, "tasks": ("perplexity",)}
    results = evaluate(request(tmp_path, perplexity_length=768, window=64, **changes))
    (plain,), (dynamic,) = results["perplexity"]["losses"].values()
    # One pass of 256 tokens adds up in another order than one of 768.
    assert dynamic[:4] == pytest.approx(plain[:4], abs=1e-4)
    assert all(abs(a - b) > 1e-2 for a, b in zip(dynamic[5:], plain[5:], strict=True))
    method = results["methods"][1]
    assert (method["factor"], method["length"]) == (None, None)
    unscaled, stretched = (method["frequencies"]["all"][k] for k in ("unscaled", "inv_freq"))
    stretch = max(a / b for a, b in zip(unscaled, stretched, strict=True))
    assert stretch == pytest.approx(2 ** (7 / 4))  # the step that serves 768 tokens
