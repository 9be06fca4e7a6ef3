"""Test generation around kept caches, prompt lookup and pipelines: equal to each text alone."""

import copy
from pathlib import Path

import pytest
import torch
from helpers.releases import prompt_lookup
from helpers.tiny_models import LONG_FACTOR, OLD_TRANSFORMERS, make_generator, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    StaticCache,
    pipeline,
)

import rope_patch

NEW = 6
PREFIX = tokens(50, seed=4)
ENDINGS = [tokens(20, seed=5), tokens(7, seed=6)]  # the first passes 64 tokens, the trained length
LONG_SET = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}
STATIC = [
    ("yarn", {"factor": 4}),
    ("longrope", {**LONG_SET, "start_tokens": 4}),
    ("yarn", {"factor": 4, "temperature": "log-n"}),
    ("self-extend", {"factor": 4}),
    ("dca", {"factor": 4}),
]
DYNAMIC = [("dynamic-yarn", {}), ("mixed-yarn", {"factor": 4})]


def slow(cases):
    """Mark cases that differ in their formula alone from the others of a test."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


needs_slots = pytest.mark.skipif(OLD_TRANSFORMERS, reason="transformers 5.0 counts by positions")


def make_patched(family, method, options):
    model = make_generator(family)
    rope_patch.patch(model, method, **options)
    return model


def generate(model, ids, **kwargs):
    settings = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    seen = torch.ones_like(ids)  # a generated token may be the padding one, which generate masks
    return model.generate(ids, attention_mask=seen, max_new_tokens=NEW, **settings, **kwargs)


def assert_same_answer(got, expected):
    """Compare log-probabilities of each step, which rounding moves less than any other key would.

    Greedy tokens may differ behind a tie, so steps are compared as long as their tokens agree.
    """
    for step, (ours, theirs) in enumerate(zip(got.logits, expected.logits, strict=True)):
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=1e-3)
        tokens_so_far = slice(None, expected.sequences.shape[1] - NEW + step + 1)
        if not got.sequences[:, tokens_so_far].equal(expected.sequences[:, tokens_so_far]):
            return


@torch.no_grad()
def filled_cache(model):
    cache = DynamicCache(config=model.config)
    model(PREFIX, past_key_values=cache)
    return cache


@needs_slots
@pytest.mark.parametrize(
    ("family", "kind", "method", "options"),
    [
        *(("qwen3", "static", *case) for case in STATIC[1:4]),
        *(("gemma3", "dynamic", *case) for case in (STATIC[0], STATIC[4])),
        *slow(("qwen3", "static", *case) for case in (STATIC[0], STATIC[4])),
        *slow(("gemma3", "dynamic", *case) for case in STATIC[1:4]),
    ],
)
def test_conversation_equals_one_prompt(family, kind, method, options):
    model = make_patched(family, method, options)
    cache = (
        DynamicCache(config=model.config)
        if kind == "dynamic"
        else StaticCache(config=model.config, max_cache_len=128)
    )
    first = generate(model, PREFIX, past_key_values=cache).sequences
    whole = torch.cat([first, ENDINGS[0]], dim=1)
    second = generate(model, whole, past_key_values=cache)
    assert_same_answer(second, generate(make_patched(family, method, options), whole))


@needs_slots
@pytest.mark.parametrize(("method", "options"), STATIC[1:4] + DYNAMIC)
def test_copies_of_a_prefix_do_not_disturb_each_other(method, options):
    model = make_patched("gemma3", method, options)
    prefix = filled_cache(model)
    for ending in ENDINGS:
        ids = torch.cat([PREFIX, ending], dim=1)
        got = generate(model, ids, past_key_values=copy.deepcopy(prefix))
        fresh = make_patched("gemma3", method, options)
        expected = generate(fresh, ids, past_key_values=filled_cache(fresh))
        assert got.sequences.equal(expected.sequences)
        assert all(a.equal(b) for a, b in zip(got.logits, expected.logits, strict=True))


@needs_slots
@pytest.mark.parametrize(("method", "options"), [*STATIC[1:4:2], *DYNAMIC, *slow(STATIC[::2])])
def test_repeated_prefix_serves_several_endings(method, options):
    model = make_patched("llama", method, options)
    prefix = filled_cache(model)
    prefix.batch_repeat_interleave(2)
    rows = [torch.cat([PREFIX, tokens(20, seed=seed)], dim=1) for seed in (7, 8)]
    got = generate(model, torch.cat(rows), past_key_values=prefix)
    for i, row in enumerate(rows):
        fresh = make_patched("llama", method, options)
        expected = generate(fresh, row, past_key_values=filled_cache(fresh))
        assert got.sequences[i].equal(expected.sequences[0])


@needs_slots
@pytest.mark.parametrize(("method", "options"), [*STATIC[::4], *DYNAMIC, *slow(STATIC[1:4])])
def test_loaded_model_continues_the_cache_of_the_saved_one(tmp_path, method, options):
    """A static rotation is known by its digest; a record of lengths says how keys are rotated."""
    model = make_patched("llama", method, options)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    ids = torch.cat([PREFIX, ENDINGS[0]], dim=1)
    got = generate(loaded, ids, past_key_values=filled_cache(model))
    expected = generate(model, ids, past_key_values=filled_cache(model))
    assert got.sequences.equal(expected.sequences)


@needs_slots
@pytest.mark.parametrize(
    ("method", "options"), [*STATIC[2:4], *DYNAMIC, *slow(STATIC[:2] + STATIC[4:])]
)
def test_prompt_lookup_keeps_the_tokens(method, options):
    model = make_patched("llama", method, options)
    repetitive = tokens(10, seed=3).repeat(1, 4)
    expected = generate(model, repetitive, eos_token_id=-1).sequences
    got = generate(model, repetitive, **prompt_lookup(3)).sequences
    assert got.equal(expected)


@needs_slots
def test_kept_cache_beyond_its_admitted_factor_is_refused():
    model = make_patched("llama", "dynamic-yarn", {"growth": "admission"})
    cache = DynamicCache(config=model.config)
    first = generate(model, PREFIX, past_key_values=cache).sequences
    with pytest.raises(rope_patch.Refused, match="keeps the factor that its cache began with"):
        generate(model, torch.cat([first, ENDINGS[0]], dim=1), past_key_values=cache)


# -- pipelines -------------------------------------------------------------------------------------

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
TEXT = "It is a truth universally acknowledged, that a single man "
TEXTS = [TEXT, TEXT * 9, TEXT * 3]  # the second passes 256 tokens, the trained length


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
        new = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
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
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    expected = alone(base, tokenizer, method, options)
    for batch_size in (1, 3):
        outputs = write(TEXTS, batch_size=batch_size, **settings)
        assert [output[0]["generated_text"] for output in outputs] == expected
