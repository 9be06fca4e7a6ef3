"""Test recall of word pairs: samples, tiny models' answers, and its use for short models."""

import json
import logging
import re

import pytest
import torch
from helpers import tokenizers
from helpers.built_tasks import build_rows
from helpers.commands import run_in_this_process
from helpers.search_fixtures import ASSETS, load

import rope_patch
from rope_patch.evaluation import PROFILES, cautions, fit_tasks
from rope_patch.inference import recall_samples
from rope_patch.recommending import standard_variants

TINY = str(ASSETS / "tiny-llama")
LENGTH, TRAINED = 1024, 256


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.load("tiny")


def accuracy(model, samples):
    """Return the share of right answers by transformers' forward and the argmax."""
    right = []
    for sample in samples:
        ids = torch.tensor(sample.ids)
        with torch.no_grad():
            guesses = model(ids[None]).logits[0, :-1].argmax(-1)
        right += [guesses[p - 1] == ids[p] for p in sample.positions]
    return sum(right).item() / len(right)


def test_words_are_one_token_each_and_none_is_a_key_and_a_value(tokenizer):
    pairs = []
    for row in build_rows("rp_recall", length=256, samples=60):
        words = re.findall("[a-z]+", row["input"])
        assert len(words) == 16
        pairs += zip(words[::2], words[1::2], strict=True)
    keys, values = (set(words) for words in zip(*pairs, strict=True))
    assert not keys & values
    assert min(len(keys), len(values)) >= 16
    for word in (*keys, *values):
        assert len(tokenizer(f"# {word}#", add_special_tokens=False).input_ids) == 3


def test_a_sample_holds_its_pairs_and_asks_for_them(tokenizer):
    (sample,) = recall_samples(tokenizer, TRAINED, 1, seed=3)
    assert TRAINED - 8 < len(sample.ids) <= TRAINED
    text = tokenizer.decode(sample.ids)
    words = re.findall("[a-z]+", text)
    body, question_words = words[:-16], words[-16:]
    pairs = dict(zip(body[::2], body[1::2], strict=True))
    assert len(pairs) == 8
    assert dict(zip(question_words[::2], question_words[1::2], strict=True)) == pairs
    answers = [tokenizer.decode(sample.ids[slice(*span)]).strip() for span in sample.answers]
    assert answers == question_words[1::2]
    assert recall_samples(tokenizer, TRAINED, 1, seed=3) == [sample]
    (control,) = recall_samples(tokenizer, TRAINED, 1, seed=3, planted=False)
    control_words = re.findall("[a-z]+", tokenizer.decode(control.ids))
    assert control_words[-16:] == question_words
    assert not {*control_words[:-16]} & {*question_words}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_tiny_models_recall_within_their_length_and_under_yarn_beyond(name, tokenizer):
    model = load(name).eval()
    within = recall_samples(tokenizer, TRAINED, 6, seed=1)
    beyond = recall_samples(tokenizer, LENGTH, 6, seed=1)
    assert accuracy(model, within) > 0.85
    assert accuracy(model, recall_samples(tokenizer, TRAINED, 6, seed=1, planted=False)) < 0.1
    assert accuracy(model, beyond) < 0.7
    with rope_patch.patch(model, "yarn", factor=4):
        assert accuracy(model, beyond) > 0.8


def test_values_are_generated_within_the_trained_length_and_not_beyond(tmp_path):
    words = ["--method", "none", "--tasks", "rp_recall", "--lengths", f"128,{LENGTH}"]
    result = run_in_this_process("eval", TINY, *words, "--samples", "10", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    (entry,) = json.loads((tmp_path / "report.json").read_text())["retrieval"]
    rows = entry["samples"]["none"]
    assert entry["task"] == "rp_recall"
    assert [row["length"] for row in rows] == [128] * 10 + [LENGTH] * 10
    within, beyond = (sum(r["score"] for r in rows if r["length"] == n) for n in (128, LENGTH))
    assert within > beyond
    assert within > 7


def test_a_search_for_a_short_model_uses_recall(model, tokenizer, caplog):
    options = {"length": LENGTH, "budget": 1, "count": 2, "progress": False}
    with caplog.at_level(logging.WARNING, logger="rope_patch"):
        search_result = rope_patch.search(model, tokenizer, **options)
    assert "needles in prose take 547 tokens" in caplog.text
    assert search_result.held_out["found"]["accuracy"] > 0.8
    assert search_result.held_out["none"]["accuracy"] < 0.6
    with pytest.raises(ValueError, match=r"--fitness recall.*--samples"):
        rope_patch.search(model, tokenizer, fitness="needles", **options)
    with pytest.raises(ValueError, match="leave the text out"):
        rope_patch.search(model, tokenizer, fitness="recall", text="emma", **options)


def test_a_recommendation_for_a_short_model_uses_recall_without_prose(
    model, tokenizer, monkeypatch
):
    all_variants = standard_variants
    names = ("plain", "linear", "yarn")
    novels = ["persuasion"]  # six take seconds
    monkeypatch.setattr("rope_patch.tasks.texts.names", lambda: novels)
    monkeypatch.setattr(
        "rope_patch.recommending.variants.standard_variants",
        lambda s: [e for e in all_variants(s) if e.name in names],
    )
    recommendation = rope_patch.recommend(
        model, tokenizer, length=512, budget=30, most=6, search=False, progress=False
    )
    assert recommendation.outcome == "use"
    rows = {row["name"]: row for row in recommendation.rows}
    assert rows["yarn"]["long"]["accuracy"][0] > rows["linear"]["long"]["accuracy"][0]
    assert all(row["prose"] is None for row in recommendation.rows)
    reasons = " ".join(recommendation.not_measured)
    assert "do not fit into 128 tokens" in reasons
    assert "perplexity of documents: a token of prose costs the plain model" in reasons
    with pytest.raises(ValueError, match=r"--short-length.*--samples.*no text"):
        rope_patch.recommend(model, tokenizer, length=512, budget=30, text="emma")


def test_tasks_of_a_profile_are_limited_to_those_that_fit(caplog):
    logging.getLogger("lm_eval").setLevel(logging.NOTSET)  # as in a new process
    profile_tasks = PROFILES["quick"].tasks
    expected = ("rp_recall_ll", "rp_recall_mc", "perplexity", "rp_short", "speed")
    assert fit_tasks(profile_tasks, TINY, None, 128) == expected
    assert "rp_niah_multikey_1_ll" in caplog.text
    assert {record.name for record in caplog.records} == {"rope_patch"}  # no messages of lm-eval
    assert fit_tasks(profile_tasks, TINY, None, 2048) == profile_tasks


def test_the_report_cautions_about_a_model_that_reads_no_prose(tmp_path):
    words = ["--method", "none", "--lengths", "128", "--tasks", "rp_recall_ll,perplexity"]
    result = run_in_this_process(
        "eval", TINY, *words, "--control-context", "100", "--out", tmp_path
    )
    assert result.returncode == 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("caution: ")]
    assert "reads these documents no better than chance" in line
    results = json.loads((tmp_path / "report.json").read_text())
    assert results["run"]["cautions"] == [line.removeprefix("caution: ")]
    assert "reads these documents no better than chance" in (tmp_path / "report.md").read_text()
    repeated = run_in_this_process("report", tmp_path)
    combined = run_in_this_process("report", tmp_path, tmp_path, "--out", tmp_path / "both")
    assert repeated.stdout.splitlines().count(line) == result.stdout.splitlines().count(line) == 1
    assert repeated.stdout == result.stdout
    assert line.removeprefix("caution: ") in combined.stdout


def test_a_short_length_is_refused_with_advice_before_weights_are_read(tmp_path):
    result = run_in_this_process(
        "eval", TINY, "--method", "none", "--lengths", "256", "--out", tmp_path / "new"
    )
    assert result.returncode == 2
    assert "give --lengths of at least 329 each" in result.stderr
    assert "rp_recall_ll" in result.stderr
    assert "Loading weights" not in result.stderr


def test_cautions_compare_with_chance():
    documents = [[1, 2, 3, 4] * 8]  # log(4) = 1.386 nats
    results = {
        "run": {"trained_length": 256},
        "methods": [{"label": "none", "method": None}],
        "perplexity": {"control": {"context": 128, "losses": [{"200": 1.3}]}},
        "retrieval": [
            {
                "samples": {
                    "none": [
                        {"length": 128, "score": 1.0, "chance": 0.25},
                        {"length": 512, "score": 0.0, "chance": 0.25},
                        {"length": 128, "score": None},
                    ]
                }
            }
        ],
    }
    assert cautions(results, documents) == []
    results["perplexity"]["control"]["losses"] = [{"200": 1.4}]
    results["retrieval"][0]["samples"]["none"][0]["score"] = 0.25
    reading, answering = cautions(results, documents)
    assert "1.40 nats, and 1.39 by how frequent" in reading
    assert "0.25 of 1 right" in answering
