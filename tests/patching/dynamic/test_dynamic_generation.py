"""Test generation of dynamically patched models against keys rotated afresh."""

import pytest
import torch
import transformers
from helpers.growing_texts import LONGROPE, PROMPT
from helpers.reference_rerotation import Reference
from helpers.releases import plain_transformers, prompt_lookup
from helpers.tiny_models import (
    OLD_TRANSFORMERS,
    TRAINED,
    make_generator,
    make_model,
    padded,
    tokens,
)
from transformers import DynamicCache

import rope_patch

NEW = 20  # tokens, from PROMPT over the trained length and a growth step beyond it
FAMILIES = ["llama", "qwen3", "gemma3"]
GREEDY = {"do_sample": False}
WAYS = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt lookup": {"do_sample": False, **prompt_lookup(4)},
    "assistant": GREEDY,
}


def generate(model, ids, **kwargs):
    torch.manual_seed(5)
    return model.generate(ids, **{"max_new_tokens": NEW, **kwargs})


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in WAYS),
        *(("gemma3", way) for way in ("greedy", "assistant")),
        *(pytest.param("qwen3", w, marks=pytest.mark.slow) for w in ("greedy", "assistant")),
    ],
)
def test_generate_matches_the_reference(family, way):
    """Rejected candidates must leave the cache and its length."""
    model, ids, options = make_generator(family), tokens(PROMPT, seed=4), WAYS[way]
    if way == "assistant":
        options = {**options, "assistant_model": make_generator(family, seed=3)}
    with plain_transformers():  # some releases fail to crop sliding windows
        unpatched = generate(model, ids, **options)
    reference = Reference(model, "dynamic-yarn")
    # Candidates change nothing, so the reference decodes token by token.
    same = GREEDY if way in ("prompt lookup", "assistant") else options
    expected = generate(reference.model, ids, past_key_values=reference.new_cache(), **same)
    rope_patch.patch(model, "dynamic-yarn")
    got = generate(model, ids, **options)
    assert got.equal(expected)
    assert not got.equal(unpatched)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize(
    "family", [n if n != "qwen3" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_padded_batch_generates_the_tokens_of_its_rows(family, implementation):
    model, expected_rows = make_generator(family), []
    rows = [tokens(length, seed=length) for length in (50, 120, 80)]
    for row in rows:
        reference = Reference(model, "dynamic-yarn")
        own = {"past_key_values": reference.new_cache(), "max_new_tokens": 16}
        expected_rows.append(generate(reference.model, row, **own, **GREEDY)[0, row.shape[1] :])
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded(rows, "left")
    kind = {} if implementation == "dynamic" else {"cache_implementation": implementation}
    batch = generate(model, ids, attention_mask=mask, max_new_tokens=16, **GREEDY, **kind)
    for got, expected in zip(batch[:, ids.shape[1] :], expected_rows, strict=True):
        assert got.equal(expected)


def test_conversation_continues_from_its_cache():
    model, ids = make_generator("llama"), tokens(PROMPT)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    conversations = []
    for generator, cache in (
        (model, DynamicCache(config=model.config)),
        (reference.model, reference.new_cache()),
    ):
        own = {"past_key_values": cache, **GREEDY}
        output = generate(generator, ids, max_new_tokens=TRAINED - PROMPT + 8, **own)
        prompt = torch.cat([output, tokens(30, seed=8)], dim=1)
        conversations.append(generate(generator, prompt, max_new_tokens=12, **own))
    assert conversations[0].equal(conversations[1])


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [("llama", "longrope", LONGROPE), ("phi3", "longrope", LONGROPE), ("phi3", "yarn", {})],
)
def test_generation_crosses_the_trained_length(family, method, options):
    """With one layer, decoding with re-rotated keys equals decoding without a cache.

    Phi-3's generate drops the cache there.
    """
    model = make_model(
        family, tie_word_embeddings=False, initializer_range=0.2, num_hidden_layers=1
    )
    ids = tokens(TRAINED - 10)
    rope_patch.patch(model, method, **{"factor": 4, **options})
    assert generate(model, ids, **GREEDY).equal(generate(model, ids, use_cache=False, **GREEDY))


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="needs lm-eval, which is tested with new versions")
def test_lm_eval_batches_match_single_prompts():
    """Answer prompts of several lengths in batches, and each alone."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tiny = "tests/assets/tiny-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    rope_patch.patch(model, "dynamic-yarn")
    text = "It is a truth universally acknowledged, that a single man in possession of a good "
    prompts = [text * times for times in (1, 9, 14)]

    def answers(batch_size):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=2048)
        settings = {"until": [], "max_gen_toks": 10, "do_sample": False}
        requests = [
            Instance("generate_until", {}, (prompt, settings), i)
            for i, prompt in enumerate(prompts)
        ]
        return lm.generate_until(requests, disable_tqdm=True)

    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert min(lengths) < 256 < 2 * 256 < max(lengths)
    assert answers(batch_size=3) == answers(batch_size=1)
