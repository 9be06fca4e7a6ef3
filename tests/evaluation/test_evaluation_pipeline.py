"""Test whole evaluations of the tiny trained model: results, files, resumption and failures."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.evaluations import TINY, answer_lines, measured_numbers, request, run_until_killed
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import rope_patch
from rope_patch import statistics
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks, perplexity
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.tasks import texts

LABELS = ["none", "yarn ×4"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(request(folder, controls=True))


def test_all_requested_measures_are_in_the_results(finished_run):
    _, results = finished_run
    assert [method["label"] for method in results["methods"]] == LABELS
    assert [method["method"] for method in results["methods"]] == [None, "yarn"]
    perplexity_results = results["perplexity"]
    assert (perplexity_results["block"], perplexity_results["window"]) == (32, 32)
    for label in LABELS:
        (blocks,) = perplexity_results["losses"][label]
        assert len(blocks) == 448 // 32
        for entry in results["retrieval"]:
            rows = entry["samples"][label]
            grid = [(row["length"], row["depth"]) for row in rows]
            assert grid == [(length, depth) for length in (336, 448) for depth in (20, 80)]
            assert all(0 <= row["score"] <= 1 and row["log_likelihood"] < 0 for row in rows)
            assert [row["text"] for row in rows] == [0, 0, 0, 0]
    assert [entry["task"] for entry in results["retrieval"]] == [
        "rp_niah_single_2",
        "rp_json_kv_ll",
    ]
    assert perplexity_results["control"]["context"] == 256  # the trained length
    assert list(perplexity_results["control"]["losses"][0]) == [str(e) for e in range(320, 449, 64)]
    ((short),) = results["short"]
    assert short["task"] == "rp_short_cloze"
    assert {label: len(scores) for label, scores in short["samples"].items()} == dict.fromkeys(
        LABELS, 3
    )
    assert {x for scores in short["samples"].values() for x in scores} <= {0, 1}
    assert [entry["task"] for entry in results["control"]] == ["rp_niah_single_2", "rp_json_kv_ll"]
    for entry in results["control"]:
        assert entry["lengths"] == [336]
        assert list(entry["samples"]) == ["none"]
    assert results["run"]["not_run"] == []
    assert 0 < results["run"]["prompt_tokens"]["read"] < results["run"]["prompt_tokens"]["asked"]


def test_losses_and_likelihoods_equal_those_of_transformers(finished_run, tokenizer):
    _, results = finished_run
    model = AutoModelForCausalLM.from_pretrained(TINY)
    (document,) = texts.documents(["emma"], tokenizer, 448)
    task = lm_eval_tasks.build(
        "rp_niah_single_2", tokenizer, [448], 2, [20, 80], seed=42, per_text=2
    )[0]
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
        row = results["retrieval"][0]["samples"][label][3]
        assert row["id"] == doc["id"]
        assert row["log_likelihood"] == pytest.approx(total, abs=1e-3)


def test_methods_give_different_results(finished_run):
    _, results = finished_run
    none, yarn = results["perplexity"]["losses"].values()
    assert none[0][-1] != yarn[0][-1]
    for entry in results["retrieval"]:
        none, yarn = entry["samples"].values()
        assert [row["id"] for row in none] == [row["id"] for row in yarn]
        assert all(
            a["log_likelihood"] != b["log_likelihood"] for a, b in zip(none, yarn, strict=True)
        )


def test_the_folder_holds_the_report_and_the_lm_eval_results(finished_run):
    folder, results = finished_run
    assert {"report.html", "report.md", "report.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "report.json").read_text())["methods"] == results["methods"]
    (path,) = (folder / "lm_eval").glob("*yarn*448*")
    lm_eval_results = json.loads(path.read_text())
    assert lm_eval_results["config"]["rope_patch"] == "yarn ×4, 256 → 1,024 tokens"
    assert "rp_niah_single_2@448" in lm_eval_results["results"]
    assert all(name.endswith("@448") for name in lm_eval_results["results"])
    sample = lm_eval_results["samples"]["rp_niah_single_2@448"][0]
    assert {"id", "answers", "depth", "length"} <= sample["doc"].keys()
    assert "input" not in sample["doc"]


def test_the_same_request_computes_nothing_again(finished_run, monkeypatch):
    folder, results = finished_run
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("computed again"))
    before = answer_lines(folder)
    again = evaluate(request(folder, controls=True))
    assert measured_numbers(again) == measured_numbers(results)
    assert answer_lines(folder) == before


# -- kills -----------------------------------------------------------------------------------------


# Under each method 4 answers are generated, 4 scored alone, and 12 choices in batches.
@pytest.mark.parametrize(
    "kill_point",
    [{"answers": 13}, {"pieces": 7}, pytest.param({"answers": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_killed_run_resumes_to_the_same_numbers(finished_run, tmp_path, kill_point):
    _, expected = finished_run
    eval_request = request(tmp_path)
    run_until_killed(eval_request, **kill_point)
    before = answer_lines(tmp_path)
    cut = 0
    path = tmp_path / "cache" / "answers-0.jsonl"
    if kill_point == {"answers": 3}:  # killed while the last line was written
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - 25])
        cut = 1
        before = answer_lines(tmp_path)
    results = evaluate(eval_request)
    assert measured_numbers(results) == measured_numbers(expected) | {"control": []}
    keys = [key for key, _ in answer_lines(tmp_path)]
    assert keys[: len(before)] == [key for key, _ in before]
    assert len(keys) == len(set(keys))  # nothing that was finished was answered again
    assert len(before) < len(keys)
    assert kill_point.get("answers") is None or len(before) == kill_point["answers"] - cut
    assert not list(tmp_path.rglob(".*-*"))  # no partial files


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


@pytest.mark.parametrize(
    "error", [RuntimeError("boom\nmore"), torch.OutOfMemoryError("no memory")], ids=["error", "oom"]
)
def test_a_failed_sample_is_reported_and_retried(
    finished_run, tmp_path, monkeypatch, tokenizer, caplog, error
):
    _, expected = finished_run
    eval_request = request(tmp_path, methods=("none",), factor=None, tasks=("rp_niah_single_2",))
    task = lm_eval_tasks.build(
        "rp_niah_single_2", tokenizer, [336], 2, [20, 80], seed=42, per_text=2
    )
    failing_doc = task[0].dataset["test"][1]
    is_failing = fail_on_text(monkeypatch, tokenizer, failing_doc["target"], error)
    results = evaluate(eval_request)
    rows = results["retrieval"][0]["samples"]["none"]
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert [row.get("error") for row in rows if row["id"] == failing_doc["id"]] == [reason]
    expected_rows = {row["id"]: row for row in expected["retrieval"][0]["samples"]["none"]}
    for row in rows:
        if row["id"] == failing_doc["id"]:
            assert (row["score"], row["log_likelihood"]) == (None, None)
        elif not isinstance(error, torch.OutOfMemoryError):  # which makes chunks smaller
            assert row == expected_rows[row["id"]]
    assert f"1 of 4 samples failed ({reason})" in caplog.text
    caplog.clear()
    is_failing.clear()
    retried_results = evaluate(eval_request)
    assert all("error" not in row for row in retried_results["retrieval"][0]["samples"]["none"])
    got = [row["log_likelihood"] for row in retried_results["retrieval"][0]["samples"]["none"]]
    assert got == pytest.approx([row["log_likelihood"] for row in expected_rows.values()], abs=1e-3)
    assert "failed" not in caplog.text
    assert sorted(is_failure for _, is_failure in answer_lines(tmp_path)) == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            ("rp_niah_single_2", "perplexity"),
            "not one of 4 samples could be answered: RuntimeError",
        ),
        (("perplexity",), "nothing could be measured: .*boom"),
        (("rp_short_cloze",), "nothing could be measured: .*boom"),
    ],
)
def test_a_run_in_which_everything_fails_is_an_error(
    tmp_path, monkeypatch, tokenizer, tasks, message
):
    fail_on_text(monkeypatch, tokenizer, "", RuntimeError("boom"))
    monkeypatch.setattr(
        perplexity, "token_losses", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("boom"))
    )
    eval_request = request(tmp_path, methods=("none",), factor=None, tasks=tasks)
    with pytest.raises(ValueError, match=message):
        evaluate(eval_request)


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


@pytest.mark.parametrize(("precision", "max_samples"), [(0.1, 500), (0.02, 15)])
def test_samples_grow_until_intervals_are_narrow_enough(tmp_path, precision, max_samples):
    eval_request = request(
        tmp_path,
        tasks=("rp_json_kv_ll",),
        lengths=(336,),
        precision=precision,
        max_samples=max_samples,
    )
    (entry,) = evaluate(eval_request)["retrieval"]
    counts = {len(rows) for rows in entry["samples"].values()}
    assert len(counts) == 1  # the same samples under every method
    (count,) = counts
    widths = [half_width(rows) for rows in entry["samples"].values()]
    assert count == max_samples or max(widths) <= precision
    ten_samples = evaluate(replace(eval_request, precision=None, samples=10))["retrieval"][0]
    for label, rows in ten_samples["samples"].items():
        assert rows == entry["samples"][label][:10]
    assert (
        count == 15 or max(half_width(rows) for rows in ten_samples["samples"].values()) > precision
    )
    assert len(answer_lines(tmp_path)) == 2 * count


def half_width(rows):
    interval = statistics.accuracy([row["score"] for row in rows], [row["text"] for row in rows])
    return (interval.high - interval.low) / 2


def test_precision_never_exceeds_max_samples(tmp_path):
    eval_request = request(
        tmp_path, tasks=("rp_json_kv_ll",), lengths=(336,), methods=("none",), factor=None
    )
    (entry,) = evaluate(replace(eval_request, precision=0.01, max_samples=3))["retrieval"]
    assert len(entry["samples"]["none"]) == 3


def test_the_likelihood_task_needs_no_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(LongContextLM, "generate_until", None)
    results = evaluate(request(tmp_path, tasks=("rp_niah_single_2_ll",), lengths=(448,)))
    assert results["perplexity"] is None
    assert [entry["task"] for entry in results["retrieval"]] == ["rp_niah_single_2_ll"]


def test_other_options_and_dtypes_give_other_results(finished_run):
    folder, results = finished_run
    eval_request = request(folder, methods=("yarn",), tasks=("perplexity",))
    before = results["perplexity"]["losses"]["yarn ×4"][0]
    for changes in ({"options": {"attention_factor": 1.0}}, {"dtype": "bfloat16"}, {"factor": 3}):
        other = evaluate(replace(eval_request, **changes))["perplexity"]["losses"]
        ((losses,),) = other.values()
        assert losses != before
        assert losses == pytest.approx(before, abs=3)


def test_prefix_sharing_changes_no_score(finished_run, tmp_path):
    _, results = finished_run
    again = evaluate(request(tmp_path, share=False, tasks=("rp_niah_single_2",)))
    assert again["retrieval"] == results["retrieval"][:1]
    tokens = again["run"]["prompt_tokens"]
    assert tokens["read"] > 0.99 * tokens["asked"] - 8


# -- models saved with their patch, length-dependent methods ---------------------------------------


def test_a_saved_patch_is_evaluated_without_patching_twice(tmp_path, tokenizer):
    rope_patch.save(rope_patch.load(TINY, "ntk", factor=4), tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    eval_request = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match="saved with ntk in it"):
        evaluate(eval_request)
    results = evaluate(replace(eval_request, methods=("none",), factor=None))
    with rope_patch.patch(model := AutoModelForCausalLM.from_pretrained(TINY), "ntk", factor=4):
        (document,) = texts.documents(["emma"], tokenizer, 448)
        expected = perplexity.block_losses(
            perplexity.document_losses(model, document.tokens, "ntk"), 32
        )
    assert results["perplexity"]["losses"]["ntk ×4"][0] == pytest.approx(expected, abs=1e-4)


def test_a_saved_patch_without_native_form_is_evaluated_as_saved(tmp_path, tokenizer):
    rope_patch.save(rope_patch.load(TINY, "mixed-yarn", factor=4), tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    eval_request = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match=r"saved with mixed-yarn in it: .* \(--method none\)"):
        evaluate(replace(eval_request, methods=("mixed-yarn",)))
    results = evaluate(replace(eval_request, methods=("none",), factor=None))
    original = evaluate(replace(eval_request, model=TINY, methods=("mixed-yarn",)))
    ((label, (got,)),) = results["perplexity"]["losses"].items()
    ((_, (expected,)),) = original["perplexity"]["losses"].items()
    assert label == "mixed-yarn ×4"
    assert got == pytest.approx(expected, abs=1e-5)


def test_dynamic_methods_equal_the_plain_model_on_short_texts(tmp_path):
    """They need no factor, and their losses within the trained length equal the plain model's."""
    eval_request = request(
        tmp_path,
        methods=("none", "dynamic-yarn"),
        factor=None,
        perplexity_length=768,
        window=64,
        tasks=("perplexity",),
    )
    results = evaluate(eval_request)
    (plain,), (dynamic,) = results["perplexity"]["losses"].values()
    # One pass of 256 tokens adds up in another order than one of 768.
    assert dynamic[:4] == pytest.approx(plain[:4], abs=1e-4)
    assert all(abs(a - b) > 1e-2 for a, b in zip(dynamic[5:], plain[5:], strict=True))
    method = results["methods"][1]
    assert (method["factor"], method["length"]) == (None, None)
    unscaled, stretched = (method["frequencies"]["all"][k] for k in ("unscaled", "inv_freq"))
    stretch = max(a / b for a, b in zip(unscaled, stretched, strict=True))
    assert stretch == pytest.approx(2 ** (7 / 4))  # the step that serves 768 tokens


def test_key_tokens_and_sliding_windows_are_measured(tmp_path):
    eval_request = request(
        tmp_path, tasks=("perplexity", "key_tokens", "sliding"), stride=32, windows=2, documents=2
    )
    perplexity_results = evaluate(eval_request)["perplexity"]
    assert [d["name"] for d in perplexity_results["documents"]] == ["emma", "emma 2"]
    key_tokens = perplexity_results["key_tokens"]
    for label in LABELS:
        assert list(map(len, key_tokens["losses"][label])) == list(
            map(len, key_tokens["positions"])
        )
        assert len(perplexity_results["sliding"]["losses"][label]["336"]) == 2
        assert all(
            len(losses) == 2 for losses in perplexity_results["sliding"]["losses"][label]["448"]
        )
    assert all(math.isfinite(x) for label in LABELS for d in key_tokens["losses"][label] for x in d)


def test_tasks_with_the_same_prompts_read_them_once(tmp_path):
    """Both tasks have the same prompts, and the target is one of the choices."""
    likelihood, choice = "rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc"
    read_tokens = {}
    for names in ((likelihood,), (choice,), (likelihood, choice)):
        eval_request = request(
            tmp_path / str(len(read_tokens)), methods=("none",), tasks=names, lengths=(700,)
        )
        results = evaluate(replace(eval_request, samples=2, per_text=2))
        read_tokens[names] = results["run"]["prompt_tokens"]["read"]
    assert read_tokens[likelihood, choice] == read_tokens[(choice,)] == read_tokens[(likelihood,)]
