"""The whole evaluation on the tiny trained model: what it measures, writes and continues."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.eval import perplexity, texts
from rope_patch.eval.evaluating import Request, evaluate
from rope_patch.eval.language_model import LongContextLM

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


def request(folder, **changes):
    asked = Request(
        model=TINY,
        methods=("none", "yarn"),
        factor=4,
        lengths=(512, 768),
        depths=(20, 80),
        folder=folder,
    )
    return replace(asked, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    return folder, evaluate(request(folder, tasks=("niah_single", "perplexity")))


def test_everything_that_was_asked_for_is_measured(finished):
    _, results = finished
    assert [method["label"] for method in results["methods"]] == ["none", "yarn ×4"]
    for label in ("none", "yarn ×4"):
        ends = [point["end"] for point in results["perplexity"]["curves"][label]]
        assert ends == list(range(64, 769, 64))
        cells = results["retrieval"][0]["cells"][label]
        grid = {(cell["length"], cell["depth"]) for cell in cells}
        assert grid == {(length, depth) for length in (512, 768) for depth in (20, 80)}
        assert all(0 < cell["answer_probability"] < 1 for cell in cells)
    control = results["perplexity"]["control"]
    assert control["context"] == 128
    assert [point["end"] for point in control["points"]] == [256, 384, 512, 640, 768]


def test_methods_give_results_of_their_own(finished):
    """lm-eval's cache of answers is not keyed by model; ours is."""
    _, results = finished
    none, yarn = results["perplexity"]["curves"].values()
    assert none[-1]["perplexity"] != yarn[-1]["perplexity"]
    none, yarn = results["retrieval"][0]["cells"].values()
    assert [c["answer_probability"] for c in none] != [c["answer_probability"] for c in yarn]


def test_the_folder_holds_the_report_and_lm_evals_own_results(finished):
    folder, results = finished
    assert {"report.html", "report.md", "report.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "report.json").read_text())["methods"] == results["methods"]
    own = json.loads((folder / "lm_eval-niah_single-yarn.json").read_text())
    assert own["config"]["rope_patch"] == "yarn ×4, 256 → 1,024 tokens"
    assert set(own["results"]) == {"niah_single@512", "niah_single@768"}
    sample = own["samples"]["niah_single@512"][0]
    assert {"id", "answer", "depth", "length"} <= sample["doc"].keys()
    assert "input" not in sample["doc"]


def test_the_same_request_continues_without_computing_again(finished, monkeypatch):
    folder, results = finished

    def never(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(perplexity, "token_losses", never)
    monkeypatch.setattr(LongContextLM, "_respond", never)
    again = evaluate(request(folder))
    assert again["perplexity"] == results["perplexity"]
    assert again["retrieval"] == results["retrieval"]


def test_a_stopped_run_keeps_every_finished_answer(tmp_path, monkeypatch):
    answer, answered = LongContextLM._respond, []

    def stop_at_the_third(self, context, settings, doc):
        if len(answered) == 2:
            raise KeyboardInterrupt
        answered.append(doc["id"])
        return answer(self, context, settings, doc)

    asked = request(tmp_path, tasks=("niah_single",))
    with monkeypatch.context() as patched:
        patched.setattr(LongContextLM, "_respond", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            evaluate(asked)
    later = []

    def count(self, context, settings, doc):
        later.append(doc["id"])
        return answer(self, context, settings, doc)

    monkeypatch.setattr(LongContextLM, "_respond", count)
    evaluate(asked)
    assert len(answered) + len(later) == 8  # two methods, two lengths, two depths


def test_the_likelihood_task_needs_no_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(LongContextLM, "generate_until", None)
    results = evaluate(request(tmp_path, tasks=("niah_single_likelihood",), lengths=(512,)))
    assert results["perplexity"] is None
    assert [entry["task"] for entry in results["retrieval"]] == ["niah_single_likelihood"]


def test_another_option_is_another_result(finished):
    folder, results = finished
    asked = request(folder, methods=("yarn",), options={"attention_factor": 1.0})
    other = evaluate(replace(asked, tasks=("perplexity",), folder=folder))
    assert other["perplexity"]["curves"] != {"yarn ×4": results["perplexity"]["curves"]["yarn ×4"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("nia_single",)}, "did you mean 'niah_single'"),
        ({"methods": ("yran",)}, "did you mean 'yarn'"),
        ({"factor": None}, "exactly one of factor and length"),
        ({"options": {"beta_fsat": 1}}, "has the option 'beta_fsat'"),
        ({"limit": 0}, "at least 1 sample"),
        ({"lengths": (64,), "tasks": ("niah_single",)}, "too short for a needle"),
        ({"control_context": 8}, "longer than the window"),
        ({"text": "no-such-book"}, "no text 'no-such-book'"),
        ({"model": "/no/such/model"}, "no such folder"),
        ({"dtype": "float33"}, "dtype"),
    ],
)
def test_bad_requests_write_nothing(tmp_path, changes, message):
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        evaluate(request(folder, **changes))
    assert not folder.exists()


def test_a_saved_patch_is_evaluated_as_it_is_and_never_patched_twice(tmp_path):
    rope_patch.save(rope_patch.load(TINY, "ntk", factor=4), tmp_path / "saved")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "saved")
    asked = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match="saved with ntk in it"):
        evaluate(asked)
    results = evaluate(replace(asked, methods=("none",), factor=None))
    with rope_patch.patch(model := AutoModelForCausalLM.from_pretrained(TINY), "ntk", factor=4):
        ids = texts.tokens("emma", AutoTokenizer.from_pretrained(TINY), 768)
        expected = perplexity.curve(model, ids, 64, "ntk")
    got = results["perplexity"]["curves"]["ntk ×4"]
    assert got[-1]["nll"] == pytest.approx(expected[-1]["nll"], abs=1e-4)


def test_a_saved_patch_that_plain_transformers_cannot_read_is_evaluated_as_it_was_saved(tmp_path):
    rope_patch.save(rope_patch.load(TINY, "mixed-yarn", factor=4), tmp_path / "saved")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "saved")
    asked = request(tmp_path / "out", model=str(tmp_path / "saved"), tasks=("perplexity",))
    with pytest.raises(ValueError, match=r"saved with mixed-yarn in it: .* \(--method none\)"):
        evaluate(replace(asked, methods=("mixed-yarn",)))
    results = evaluate(replace(asked, methods=("none",), factor=None))
    original = evaluate(replace(asked, model=TINY, methods=("mixed-yarn",)))
    ((label, got),) = results["perplexity"]["curves"].items()
    ((_, expected),) = original["perplexity"]["curves"].items()
    assert label == "mixed-yarn ×4"
    assert [p["nll"] for p in got] == pytest.approx([p["nll"] for p in expected], abs=1e-5)


def test_dynamic_methods_read_short_texts_as_the_plain_model_does(tmp_path):
    """They need no factor, and their curve up to the trained length is the plain one, exactly."""
    asked = request(
        tmp_path, methods=("none", "dynamic-yarn"), factor=None, perplexity_length=768, window=64
    )
    results = evaluate(asked)
    plain, dynamic = (
        {point["end"]: point["nll"] for point in points}
        for points in results["perplexity"]["curves"].values()
    )
    # In one pass of 256 or of 768 tokens sums go in another order.
    assert all(dynamic[end] == pytest.approx(plain[end], abs=1e-4) for end in plain if end <= 256)
    assert all(abs(dynamic[end] - plain[end]) > 1e-2 for end in plain if end > 320)
    page = (tmp_path / "report.md").read_text()
    assert "dynamic-yarn: the rotation follows the length, so the text's first 256 tokens" in page
    method = results["methods"][1]
    assert (method["factor"], method["length"]) == (None, None)
    stretch = [
        a / b
        for a, b in zip(
            *(method["frequencies"]["all"][k] for k in ("unscaled", "inv_freq")), strict=True
        )
    ]
    assert max(stretch) == pytest.approx(2 ** (7 / 4))  # the step that serves 768 tokens
