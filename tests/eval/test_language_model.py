"""The model as lm-eval sees it, against transformers and lm-eval's own class."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny_models import make_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch.eval.language_model import LongContextLM

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
CONTEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune"
ANSWER = "1234567"
SETTINGS = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 24, "until": ["\n"]}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    """Gemma3's sliding windows are shorter than the prompt: their caches cannot be cropped."""
    return make_model(request.param, vocab_size=512)


def lm_for(model, tokenizer, max_length=1024):
    return LongContextLM(model, tokenizer, max_length, {"weights": "w"})


def ask(lm, kind, arguments):
    doc = {"answer": ANSWER}
    request = Instance(request_type=kind, doc=doc, arguments=arguments, idx=0)
    return getattr(lm, kind)([request])[0]


@pytest.mark.parametrize("method", [None, "yarn"])
def test_generation_is_greedy_decoding_of_the_prompt(model, tokenizer, method):
    if method:
        rope_patch.patch(model, method, factor=4)
    got = ask(lm_for(model, tokenizer), "generate_until", (CONTEXT, SETTINGS))
    ids = tokenizer(CONTEXT, return_tensors="pt").input_ids
    for _ in range(SETTINGS["max_gen_toks"]):  # without any cache
        with torch.no_grad():
            following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], dim=1)
    written = ids[0, -SETTINGS["max_gen_toks"] :]
    assert str(got) == tokenizer.decode(written, skip_special_tokens=True).split("\n")[0]


@pytest.mark.parametrize("method", [None, "dynamic-yarn"])
def test_the_answer_is_scored_from_the_same_prompt(model, tokenizer, method):
    context = " ".join([CONTEXT] * 3)
    prompt = tokenizer(context).input_ids
    target = tokenizer(f"{context} {ANSWER}").input_ids[len(prompt) :]
    if method:  # one step of growth serves the prompt and the answer, not all that is generated
        handle = rope_patch.patch(model, method, trained_length=len(prompt) - 2)
        reach = handle.method.reach(len(prompt), len(prompt) - 2)
        assert len(prompt) + len(target) < reach < len(prompt) + SETTINGS["max_gen_toks"]
    got = ask(lm_for(model, tokenizer), "generate_until", (context, SETTINGS))
    with torch.no_grad():
        out = model(torch.tensor([prompt + target]), use_cache=False).logits[0].log_softmax(-1)
    expected = sum(out[len(prompt) + i - 1, token].item() for i, token in enumerate(target))
    assert got.answer_log_likelihood == pytest.approx(expected, abs=1e-3)


def test_likelihoods_equal_those_of_lm_evals_own_class(model, tokenizer):
    arguments = (CONTEXT, f" {ANSWER}")
    ours = ask(lm_for(model, tokenizer), "loglikelihood", arguments)
    own = ask(HFLM(pretrained=model, tokenizer=tokenizer), "loglikelihood", arguments)
    assert ours[0] == pytest.approx(own[0], abs=1e-3)
    assert ours[1] == own[1]


def test_only_the_logits_that_are_read_are_made(model, tokenizer):
    shapes = []
    model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape[1]))
    lm = lm_for(model, tokenizer)
    ask(lm, "loglikelihood", (CONTEXT * 3, f" {ANSWER}"))
    ask(lm, "generate_until", (CONTEXT * 3, SETTINGS))
    assert max(shapes) < 12


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("generate_until", (CONTEXT, SETTINGS)), ("loglikelihood", (CONTEXT, f" {ANSWER}"))],
)
def test_a_prompt_that_does_not_fit_is_refused_not_cut(model, tokenizer, kind, arguments):
    with pytest.raises(ValueError, match="were set as the longest"):
        ask(lm_for(model, tokenizer, max_length=20), kind, arguments)


def test_results_record_the_patch_and_never_ask_the_hub(model, tokenizer, monkeypatch):
    monkeypatch.setattr(
        "lm_eval.models.huggingface.HfApi", SimpleNamespace
    )  # without the method that lm-eval would call
    lm = lm_for(model, tokenizer)
    assert lm.get_model_info()["rope_patch"] is None
    with rope_patch.patch(model, "yarn", factor=4):
        info = lm.get_model_info()
    assert info["rope_patch"] == "yarn ×4, 64 → 256 tokens"
    assert info["max_position_embeddings"] == 256
    assert "yarn" in str(info["rope_parameters"])
