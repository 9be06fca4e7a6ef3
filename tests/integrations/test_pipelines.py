"""Test transformers' text pipelines: lists and padded batches equal each text alone."""

import copy
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import rope_patch

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
TEXT = "It is a truth universally acknowledged, that a single man "
TEXTS = [TEXT, TEXT * 9, TEXT * 3]  # the second passes 256 tokens, the trained length
NEW = 12


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"  # which pipelines of newer releases see to themselves
    return tokenizer


def alone(base, tokenizer, method, options):
    """Return what a fresh patch generates for each text by itself."""
    answers = []
    for text in TEXTS:
        model = copy.deepcopy(base)
        rope_patch.patch(model, method, **options)
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("yarn", {"factor": 4}),
        ("dynamic-yarn", {}),
        ("dynamic-yarn", {"growth": "admission"}),
        ("mixed-yarn", {"factor": 4}),
        ("self-extend", {"factor": 4}),
    ],
)
def test_pipeline_equals_each_text_alone(base, tokenizer, method, options):
    model = copy.deepcopy(base)
    rope_patch.patch(model, method, **options)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    expected = alone(base, tokenizer, method, options)
    for batch_size in (1, 3):
        outputs = write(TEXTS, batch_size=batch_size, **settings)
        assert [output[0]["generated_text"] for output in outputs] == expected
