"""The whole evaluation on the tiny trained model: what it measures, writes and continues."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.evaluations import TINY, killed, lines, numbers, request
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import rope_patch
from rope_patch import statistics
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks, perplexity
from rope_patch.evaluation.pipeline import evaluate
from rope_patch.tasks import texts

LABELS = ["none", "yarn ×4"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(request(folder, controls=True))


def test_everything_that_was_asked_for_is_measured(finished):
    _, results = finished
    assert [method["label"] for method in results["methods"]] == LABELS
    assert [method["method"] for method in results["methods"]] == [None, "yarn"]
    measured = results["perplexity"]
    assert (measured["block"], measured["window"]) == (32, 32)
    for label in LABELS:
        (blocks,) = measured["losses"][label]
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
    assert measured["control"]["context"] == 128
    assert list(measured["control"]["losses"][0]) == [str(e) for e in range(192, 449, 64)]
    ((short),) = results["short"]
    assert short["task"] == "rp_short_cloze"
    assert {label: len(found) for label, found in short["samples"].items()} == dict.fromkeys(
        LABELS, 3
    )
    assert {x for found in short["samples"].values() for x in found} <= {0, 1}
    assert [entry["task"] for entry in results["control"]] == ["rp_niah_single_2", "rp_json_kv_ll"]
    for entry in results["control"]:
        assert entry["lengths"] == [336]
        assert list(entry["samples"]) == ["none"]
    assert results["run"]["not_run"] == []
    assert 0 < results["run"]["prompt_tokens"]["read"] < results["run"]["prompt_tokens"]["asked"]


def test_losses_and_answers_are_transformers_own(finished, tokenizer):
    _, results = finished
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


def test_methods_give_results_of_their_own(finished):
    _, results = finished
    none, yarn = results["perplexity"]["losses"].values()
    assert none[0][-1] != yarn[0][-1]
    for entry in results["retrieval"]:
        none, yarn = entry["samples"].values()
        assert [row["id"] for row in none] == [row["id"] for row in yarn]
        assert all(
            a["log_likelihood"] != b["log_likelihood"] for a, b in zip(none, yarn, strict=True)
        )


def test_the_folder_holds_the_report_and_lm_evals_own_results(finished):
    folder, results = finished
    assert {"report.html", "report.md", "report.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "report.json").read_text())["methods"] == results["methods"]
    (path,) = (folder / "lm_eval").glob("*yarn*448*")
    own = json.loads(path.read_text())
    assert own["config"]["rope_patch"] == "yarn ×4, 256 → 1,024 tokens"
    assert "rp_niah_single_2@448" in own["results"]
    assert all(name.endswith("@448") for name in own["results"])
    sample = own["samples"]["rp_niah_single_2@448"][0]
    assert {"id", "answers", "depth", "length"} <= sample["doc"].keys()
    assert "input" not in sample["doc"]


def test_the_same_request_continues_without_computing_again(finished, monkeypatch):
    folder, results = finished
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("computed again"))
    before = lines(folder)
    again = evaluate(request(folder, controls=True))
    assert numbers(again) == numbers(results)
    assert lines(folder) == before


# -- kills -----------------------------------------------------------------------------------------


# Under each method 4 answers are generated, 4 scored alone, and 12 choices in batches.
@pytest.mark.parametrize(
    "moment",
    [{"answers": 13}, {"pieces": 7}, pytest.param({"answers": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_killed_run_goes_on_to_the_same_numbers(finished, tmp_path, moment):
    _, expected = finished
    asked = request(tmp_path)
    killed(asked, **moment)
    before = lines(tmp_path)
    cut = 0
    path = tmp_path / "cache" / "answers-0.jsonl"
    if moment == {"answers": 3}:  # killed while the last line was written
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - 25])
        cut = 1
        before = lines(tmp_path)
    results = evaluate(asked)
    assert numbers(results) == numbers(expected) | {"control": []}
    keys = [key for key, _ in lines(tmp_path)]
    assert keys[: len(before)] == [key for key, _ in before]
    assert len(keys) == len(set(keys))  # nothing that was finished was answered again
    assert len(before) < len(keys)
    assert moment.get("answers") is None or len(before) == moment["answers"] - cut
    assert not list(tmp_path.rglob(".*-*"))  # of files half written


# -- failures --------------------------------------------------------------------------------------


def fail(monkeypatch, tokenizer, part, error):
    """The model raises an error whenever it reads a certain text; returns a switch to end that."""
    forward, on = LlamaForCausalLM.forward, [True]

    def failing(self, input_ids=None, **given):
        if on and any(part in tokenizer.decode(row) for row in input_ids):
            raise error
        return forward(self, input_ids=input_ids, **given)

    monkeypatch.setattr(LlamaForCausalLM, "forward", failing)
    return on


@pytest.mark.parametrize(
    "error", [RuntimeError("boom\nmore"), torch.OutOfMemoryError("no memory")], ids=["error", "oom"]
)
def test_a_failure_is_told_and_tried_again(
    finished, tmp_path, monkeypatch, tokenizer, caplog, error
):
    _, expected = finished
    asked = request(tmp_path, methods=("none",), factor=None, tasks=("rp_niah_single_2",))
    task = lm_eval_tasks.build(
        "rp_niah_single_2", tokenizer, [336], 2, [20, 80], seed=42, per_text=2
    )
    bad = task[0].dataset["test"][1]
    on = fail(monkeypatch, tokenizer, bad["target"], error)
    results = evaluate(asked)
    rows = results["retrieval"][0]["samples"]["none"]
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert [row.get("error") for row in rows if row["id"] == bad["id"]] == [reason]
    right = {row["id"]: row for row in expected["retrieval"][0]["samples"]["none"]}
    for row in rows:
        if row["id"] == bad["id"]:
            assert (row["score"], row["log_likelihood"]) == (None, None)
        elif not isinstance(error, torch.OutOfMemoryError):  # which makes chunks smaller
            assert row == right[row["id"]]
    assert f"1 of 4 samples failed ({reason})" in caplog.text
    caplog.clear()
    on.clear()
    again = evaluate(asked)
    assert all("error" not in row for row in again["retrieval"][0]["samples"]["none"])
    got = [row["log_likelihood"] for row in again["retrieval"][0]["samples"]["none"]]
    assert got == pytest.approx([row["log_likelihood"] for row in right.values()], abs=1e-3)
    assert "failed" not in caplog.text
    assert sorted(failed for _, failed in lines(tmp_path)) == [False] * 4 + [True]


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
    fail(monkeypatch, tokenizer, "", RuntimeError("boom"))
    monkeypatch.setattr(
        perplexity, "token_losses", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("boom"))
    )
    asked = request(tmp_path, methods=("none",), factor=None, tasks=tasks)
    with pytest.raises(ValueError, match=message):
        evaluate(asked)


def test_a_method_whose_perplexity_fails_leaves_the_others_theirs(tmp_path, monkeypatch, caplog):
    original = perplexity.document_losses

    def failing(model, ids, label, *rest):
        if "yarn" in label:
            raise torch.OutOfMemoryError("no memory")
        return original(model, ids, label, *rest)

    monkeypatch.setattr(perplexity, "document_losses", failing)
    results = evaluate(request(tmp_path, tasks=("perplexity",)))
    assert list(results["perplexity"]["losses"]) == ["none"]
    assert results["run"]["not_run"] == ["perplexity of yarn ×4: OutOfMemoryError: no memory"]
    assert "not run: perplexity of yarn" in caplog.text


# -- samples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "most"), [(0.1, 500), (0.02, 15)])
def test_samples_grow_until_intervals_are_narrow_enough(tmp_path, precision, most):
    asked = request(
        tmp_path, tasks=("rp_json_kv_ll",), lengths=(336,), precision=precision, max_samples=most
    )
    (entry,) = evaluate(asked)["retrieval"]
    counts = {len(rows) for rows in entry["samples"].values()}
    assert len(counts) == 1  # the same samples under every method
    (count,) = counts
    widths = [width(rows) for rows in entry["samples"].values()]
    assert count == most or max(widths) <= precision
    fewer = evaluate(replace(asked, precision=None, samples=10))["retrieval"][0]
    for label, rows in fewer["samples"].items():
        assert rows == entry["samples"][label][:10]
    assert count == 15 or max(width(rows) for rows in fewer["samples"].values()) > precision
    assert len(lines(tmp_path)) == 2 * count


def width(rows):
    found = statistics.accuracy([row["score"] for row in rows], [row["text"] for row in rows])
    return (found.high - found.low) / 2


def test_a_precision_starts_with_no_more_samples_than_it_may_take(tmp_path):
    asked = request(
        tmp_path, tasks=("rp_json_kv_ll",), lengths=(336,), methods=("none",), factor=None
    )
    (entry,) = evaluate(replace(asked, precision=0.01, max_samples=3))["retrieval"]
    assert len(entry["samples"]["none"]) == 3


def test_the_likelihood_task_needs_no_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(LongContextLM, "generate_until", None)
    results = evaluate(request(tmp_path, tasks=("rp_niah_single_2_ll",), lengths=(448,)))
    assert results["perplexity"] is None
    assert [entry["task"] for entry in results["retrieval"]] == ["rp_niah_single_2_ll"]


def test_another_option_or_dtype_is_another_result(finished):
    folder, results = finished
    asked = request(folder, methods=("yarn",), tasks=("perplexity",))
    before = results["perplexity"]["losses"]["yarn ×4"][0]
    for changes in ({"options": {"attention_factor": 1.0}}, {"dtype": "bfloat16"}, {"factor": 3}):
        other = evaluate(replace(asked, **changes))["perplexity"]["losses"]
        ((losses,),) = other.values()
        assert losses != before
        assert losses == pytest.approx(before, abs=3)


def test_sharing_beginnings_changes_no_number(finished, tmp_path):
    _, results = finished
    again = evaluate(request(tmp_path, share=False, tasks=("rp_niah_single_2",)))
    assert again["retrieval"] == results["retrieval"][:1]
    tokens = again["run"]["prompt_tokens"]
    assert tokens["read"] > 0.99 * tokens["asked"] - 8


# -- models saved with their patch, methods that follow the length ---------------------------------


def test_a_saved_patch_is_evaluated_as_it_is_and_never_patched_twice(tmp_path, tokenizer):
    rope_patch.save(rope_patch.load(TINY, "ntk", factor=4), tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    asked = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match="saved with ntk in it"):
        evaluate(asked)
    results = evaluate(replace(asked, methods=("none",), factor=None))
    with rope_patch.patch(model := AutoModelForCausalLM.from_pretrained(TINY), "ntk", factor=4):
        (document,) = texts.documents(["emma"], tokenizer, 448)
        expected = perplexity.block_losses(
            perplexity.document_losses(model, document.tokens, "ntk"), 32
        )
    assert results["perplexity"]["losses"]["ntk ×4"][0] == pytest.approx(expected, abs=1e-4)


def test_a_saved_patch_that_plain_transformers_cannot_read_is_evaluated_as_it_was_saved(
    tmp_path, tokenizer
):
    rope_patch.save(rope_patch.load(TINY, "mixed-yarn", factor=4), tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    asked = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match=r"saved with mixed-yarn in it: .* \(--method none\)"):
        evaluate(replace(asked, methods=("mixed-yarn",)))
    results = evaluate(replace(asked, methods=("none",), factor=None))
    original = evaluate(replace(asked, model=TINY, methods=("mixed-yarn",)))
    ((label, (got,)),) = results["perplexity"]["losses"].items()
    ((_, (expected,)),) = original["perplexity"]["losses"].items()
    assert label == "mixed-yarn ×4"
    assert got == pytest.approx(expected, abs=1e-5)


def test_dynamic_methods_read_short_texts_as_the_plain_model_does(tmp_path):
    """They need no factor, and their curve up to the trained length is the plain one, exactly."""
    asked = request(
        tmp_path,
        methods=("none", "dynamic-yarn"),
        factor=None,
        perplexity_length=768,
        window=64,
        tasks=("perplexity",),
    )
    results = evaluate(asked)
    (plain,), (dynamic,) = results["perplexity"]["losses"].values()
    # In one pass of 256 or of 768 tokens sums go in another order.
    assert dynamic[:4] == pytest.approx(plain[:4], abs=1e-4)
    assert all(abs(a - b) > 1e-2 for a, b in zip(dynamic[5:], plain[5:], strict=True))
    method = results["methods"][1]
    assert (method["factor"], method["length"]) == (None, None)
    unscaled, stretched = (method["frequencies"]["all"][k] for k in ("unscaled", "inv_freq"))
    stretch = max(a / b for a, b in zip(unscaled, stretched, strict=True))
    assert stretch == pytest.approx(2 ** (7 / 4))  # the step that serves 768 tokens


def test_key_tokens_and_sliding_windows(tmp_path):
    asked = request(
        tmp_path, tasks=("perplexity", "key_tokens", "sliding"), stride=32, windows=2, documents=2
    )
    measured = evaluate(asked)["perplexity"]
    assert [d["name"] for d in measured["documents"]] == ["emma", "emma 2"]
    key = measured["key_tokens"]
    for label in LABELS:
        assert list(map(len, key["losses"][label])) == list(map(len, key["positions"]))
        assert len(measured["sliding"]["losses"][label]["336"]) == 2
        assert all(len(found) == 2 for found in measured["sliding"]["losses"][label]["448"])
    assert all(math.isfinite(x) for label in LABELS for d in key["losses"][label] for x in d)


def test_tasks_with_the_same_prompts_read_them_once(tmp_path):
    """The choice's prompts are the likelihood's, and so is one of its continuations."""
    likelihood, choice = "rp_niah_multikey_1_ll", "rp_niah_multikey_1_mc"
    read = {}
    for names in ((likelihood,), (choice,), (likelihood, choice)):
        asked = request(tmp_path / str(len(read)), methods=("none",), tasks=names, lengths=(700,))
        results = evaluate(replace(asked, samples=2, per_text=2))
        read[names] = results["run"]["prompt_tokens"]["read"]
    assert read[likelihood, choice] == read[(choice,)] == read[(likelihood,)]
