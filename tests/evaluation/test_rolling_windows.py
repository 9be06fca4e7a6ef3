"""Test lm-eval's rolling tasks: whole documents in windows, against lm-eval's own class."""

import math
from pathlib import Path

import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import patch
from rope_patch.evaluation.language_model import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks, perplexity
from rope_patch.inference.answers import AnswerStore

LLAMA = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
WINDOW = 96
LENGTHS = (40, WINDOW, WINDOW + 1, 3 * WINDOW + 50)  # tokens of the documents


@pytest.fixture(scope="module")
def texts(tokenizer):
    """Return documents of `LENGTHS` tokens."""
    documents = []
    for number, length in enumerate(LENGTHS):
        words = " ".join(f"w{(i + number) ** 2 % 97}" for i in range(length))
        ids = tokenizer(words).input_ids[:length]
        text = tokenizer.decode(ids)
        assert len(tokenizer(text).input_ids) == length
        documents.append(text)
    return documents


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(LLAMA).eval()


def rolling_task(texts):
    return ConfigurableTask(
        config={
            "task": "documents",
            "dataset_path": "",
            "test_split": "test",
            "custom_dataset": lambda **_: {
                "test": Dataset.from_list([{"page": text} for text in texts])
            },
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [
                {"metric": "word_perplexity"},
                {"metric": "byte_perplexity"},
                {"metric": "bits_per_byte"},
            ],
            "metadata": {"version": 1.0},
        }
    )


def language_model(model, answers=None):
    lm = LongContextLM(
        model, AutoTokenizer.from_pretrained(LLAMA), 10**9, {"model": "tiny"}, answers=answers
    )
    lm.rolling_window = WINDOW
    return lm


def reference(model, window=WINDOW):
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=window, batch_size=1)


def measure(lm, texts):
    """Return the task's metrics, and the log-likelihood of each document."""
    results = lm_eval_tasks.evaluate(lm, [rolling_task(texts)])
    metrics = {
        name: value
        for name, value in results["results"]["documents"].items()
        if name.endswith(",none") and "stderr" not in name
    }
    samples = sorted(results["samples"]["documents"], key=lambda sample: sample["doc_id"])
    return metrics, [sample["filtered_resps"][0] for sample in samples]


@pytest.mark.parametrize(
    "method",
    [
        None,
        {"method": "yarn", "factor": 4},
        {"method": "dynamic-yarn", "factor": 4},
        {"method": "linear", "factor": 4},
        {"method": "self-extend"},
    ],
)
def test_windows_give_the_numbers_of_lm_evals_own_class(model, texts, method):
    if method is not None:
        # Windows are longer than the trained length, so a dynamic rotation extends them.
        patch(model, **method, trained_length=32)
    metrics, likelihoods = measure(language_model(model), texts)
    reference_metrics, reference_likelihoods = measure(reference(model), texts)
    assert set(metrics) == {"word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"}
    assert metrics == pytest.approx(reference_metrics, rel=1e-6)
    assert likelihoods == pytest.approx(reference_likelihoods, rel=1e-6)
    # The window matters: without one, long documents get other numbers.
    _, whole = measure(reference(model, 10**9), texts)
    assert whole[:2] == pytest.approx(likelihoods[:2], rel=1e-6)
    assert abs(whole[3] - likelihoods[3]) > 1e-4


def test_the_window_is_the_longest_sample_unless_set(model, texts):
    lm = LongContextLM(model, AutoTokenizer.from_pretrained(LLAMA), WINDOW, {"model": "tiny"})
    assert measure(lm, texts)[1] == pytest.approx(measure(reference(model), texts)[1], rel=1e-6)


def test_no_more_logits_exist_at_once_than_a_chunk_of_positions(model, texts, monkeypatch):
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 16)
    positions = []
    model.lm_head.register_forward_hook(lambda _, __, logits: positions.append(logits.shape[1]))
    likelihoods = measure(language_model(model), texts)[1]
    assert max(positions) == 16
    assert sum(positions) == sum(LENGTHS)  # each token is scored once
    assert likelihoods == pytest.approx(measure(reference(model), texts)[1], rel=1e-6)


def test_stored_windows_are_not_read_again(model, texts):
    answers = AnswerStore()
    first = language_model(model, answers)
    likelihoods = measure(first, texts)[1]
    assert first.prompt_tokens == first.computed_tokens > sum(LENGTHS)
    again = language_model(model, answers)
    assert measure(again, texts)[1] == likelihoods
    assert again.computed_tokens == 0


def test_a_window_that_fails_leaves_the_document_without_a_number(model, texts):
    def fail_on_long(_, args):
        if args[0].shape[1] >= WINDOW:
            raise RuntimeError("the long windows fail")

    model.model.embed_tokens.register_forward_pre_hook(fail_on_long)
    lm = language_model(model)
    likelihoods = measure(lm, texts)[1]
    assert math.isfinite(likelihoods[0])
    assert all(math.isnan(value) for value in likelihoods[1:])
    assert list(lm.failures) == [("documents", i) for i in (1, 2, 3)]
    assert "the long windows fail" in lm.failures["documents", 1]


def test_an_empty_document_has_a_likelihood_of_one(model):
    request = Instance("loglikelihood_rolling", {}, ("",), 0, metadata=("documents", 0, 1))
    assert language_model(model).loglikelihood_rolling([request]) == [0.0]
