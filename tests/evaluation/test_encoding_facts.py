"""Test evaluations of decoders that do not rotate."""

from pathlib import Path

import pytest
import torch
from helpers.encoding_models import encoding_model, token_logits
from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.encoding_facts import RowsGuard
from rope_patch.evaluation.entry_points import evaluate
from rope_patch.utils.errors import Refused

ASSETS = Path(__file__).parents[1] / "assets"
REQUEST = {
    "lengths": (128, 256),
    "tasks": ("perplexity", "rp_recall_ll"),
    "samples": 1,
    "documents": 1,
    "factor": 2,
}


def write_checkpoint(folder, family, **fields):
    model = encoding_model(family, vocab_size=512, **fields)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny-llama").save_pretrained(folder)
    return model


def test_gpt2_is_measured_plain_and_extended(tmp_path):
    pytest.importorskip("lm_eval")
    write_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel", n_positions=128)
    results = evaluate(
        tmp_path / "gpt2", ("none", "linear", "tile"), out=tmp_path / "out", **REQUEST
    ).results
    assert [m["label"] for m in results["methods"]] == ["none", "linear ×2", "tile ×2"]
    assert results["run"]["trained_length"] == 128
    assert results["run"]["geometry"] == {}
    losses = results["perplexity"]["losses"]
    assert set(losses) == {"linear ×2", "tile ×2"}
    assert "transformer.wpe tells 128 positions apart, and the text has 256" in str(
        results["run"]["not_run"]
    )
    (retrieval,) = results["retrieval"]
    failed = {
        label: [row["score"] is None for row in rows]
        for label, rows in retrieval["samples"].items()
    }
    assert failed == {"none": [False, True], "linear ×2": [False, False], "tile ×2": [False, False]}


@pytest.mark.parametrize(
    ("family", "methods", "message"),
    [
        ("BloomForCausalLM", ("dynamic-ntk",), "evaluate ntk with a factor for each length"),
        ("BloomForCausalLM", ("yarn",), "expected one of linear, ntk"),
        ("BertForMaskedLM", ("linear",), "expected a decoder such as GPT-2 or BLOOM"),
        ("BartForConditionalGeneration", ("linear",), "expected a decoder such as GPT-2"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, family, methods, message):
    pytest.importorskip("lm_eval")
    write_checkpoint(tmp_path / "model", family)
    with pytest.raises(Refused, match=message):
        evaluate(tmp_path / "model", methods, out=tmp_path / "out", trained_length=40, **REQUEST)


def test_bloom_needs_its_trained_length(tmp_path):
    pytest.importorskip("lm_eval")
    write_checkpoint(tmp_path / "model", "BloomForCausalLM")
    with pytest.raises(Refused, match="name them, for example trained_length=2048"):
        evaluate(tmp_path / "model", ("ntk",), out=tmp_path / "out", **REQUEST)


@torch.no_grad()
def test_the_guard_follows_a_patch():
    model = encoding_model("OPTForCausalLM")
    expected = token_logits(model, 40)
    RowsGuard.install(model)
    assert torch.equal(token_logits(model, 40), expected)
    with pytest.raises(Refused, match="tells 40 positions apart, and the text has 41"):
        token_logits(model, 41)
    with rope_patch.patch(model, "linear", factor=2):
        assert token_logits(model, 80).isfinite().all()
    with pytest.raises(Refused, match="tells 40 positions apart"):
        token_logits(model, 80)
