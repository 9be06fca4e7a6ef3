"""Test lm-eval's rolling tasks: whole documents in windows, against lm-eval's own class."""

import contextlib
import math

import pytest
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

import rope_patch
from rope_patch.evaluation import LongContextLM
from rope_patch.evaluation.measures import lm_eval_tasks, perplexity
from rope_patch.inference import AnswerStore

WINDOW = 96
LENGTHS = (40, WINDOW, WINDOW + 1, 3 * WINDOW + 50)  # tokens of the documents


@pytest.fixture(scope="module")
def texts(tokenizer):
    """Return documents of `LENGTHS` tokens."""
    documents = []
    for number, length in enumerate(LENGTHS):
        words = " ".join(f"w{(i + number) ** 2 % 97}" for i in range(length))
        documents.append(tokenizer.decode(tokenizer(words).input_ids[:length]))
        assert len(tokenizer(documents[-1]).input_ids) == length
    return documents


def rolling_task(texts):
    rows = Dataset.from_list([{"page": text} for text in texts])
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return ConfigurableTask(
        config={
            "task": "documents",
            "dataset_path": "",
            "test_split": "test",
            "custom_dataset": lambda **_: {"test": rows},
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": metric} for metric in metrics],
            "metadata": {"version": 1.0},
        }
    )


@pytest.fixture
def make_lm(trained_llama, tokenizer):
    """Return a function that makes ours, with windows of `WINDOW` tokens."""

    def make(answers=None, longest=10**9, window=WINDOW):
        lm = LongContextLM(trained_llama, tokenizer, longest, {"model": "tiny"}, answers=answers)
        if window is not None:
            lm.rolling_window = window
        return lm

    return make


@pytest.fixture
def reference(trained_llama, tokenizer, texts):
    """Return a function that measures the texts by lm-eval's own class."""

    def measure_with(window=WINDOW):
        lm = HFLM(pretrained=trained_llama, tokenizer=tokenizer, max_length=window, batch_size=1)
        return measure(lm, texts)

    return measure_with


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


@pytest.mark.parametrize("method", [None, "yarn", "dynamic-yarn", "linear", "self-extend"])
def test_windows_give_the_numbers_of_lm_evals_own_class(
    trained_llama, make_lm, reference, texts, method
):
    with contextlib.ExitStack() as patched:
        if method is not None:
            # Windows are longer than the trained length, so a dynamic rotation extends them.
            factor = {} if method == "self-extend" else {"factor": 4}
            options = {"trained_length": 32, **factor}
            patched.enter_context(rope_patch.patch(trained_llama, method, **options))
        metrics, likelihoods = measure(make_lm(), texts)
        expected_metrics, expected = reference()
        _, whole = reference(10**9)
    names = {"word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"}
    assert set(metrics) == names
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    assert likelihoods == pytest.approx(expected, rel=1e-6)
    # The window matters: without one, long documents get other numbers.
    assert whole[:2] == pytest.approx(likelihoods[:2], rel=1e-6)
    assert abs(whole[3] - likelihoods[3]) > 1e-4


def test_the_window_is_the_longest_sample_unless_set_and_is_read_in_chunks(
    trained_llama, make_lm, reference, texts, monkeypatch
):
    """No more logits exist at once than a chunk of positions."""
    monkeypatch.setattr(perplexity, "HEAD_CHUNK", 16)
    positions = []
    hook = trained_llama.lm_head.register_forward_hook(
        lambda _, __, logits: positions.append(logits.shape[1])
    )
    likelihoods = measure(make_lm(longest=WINDOW, window=None), texts)[1]
    hook.remove()
    assert max(positions) == 16
    assert sum(positions) == sum(LENGTHS)  # each token is scored once
    assert likelihoods == pytest.approx(reference()[1], rel=1e-6)


def test_stored_windows_are_not_read_again(make_lm, texts):
    answers = AnswerStore()
    first = make_lm(answers)
    likelihoods = measure(first, texts)[1]
    assert first.prompt_tokens == first.computed_tokens > sum(LENGTHS)
    again = make_lm(answers)
    assert measure(again, texts)[1] == likelihoods
    assert again.computed_tokens == 0


def test_a_window_that_fails_leaves_the_document_without_a_number(trained_llama, make_lm, texts):
    def fail_on_long(_, args):
        if args[0].shape[1] >= WINDOW:
            raise RuntimeError("the long windows fail")

    hook = trained_llama.model.embed_tokens.register_forward_pre_hook(fail_on_long)
    lm = make_lm()
    likelihoods = measure(lm, texts)[1]
    hook.remove()
    assert math.isfinite(likelihoods[0])
    assert all(math.isnan(value) for value in likelihoods[1:])
    assert list(lm.failures) == [("documents", i) for i in (1, 2, 3)]
    assert "the long windows fail" in lm.failures["documents", 1]


def test_an_empty_document_has_a_likelihood_of_one(make_lm):
    request = Instance("loglikelihood_rolling", {}, ("",), 0, metadata=("documents", 0, 1))
    assert make_lm().loglikelihood_rolling([request]) == [0.0]
