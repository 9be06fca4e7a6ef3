"""Test generation of dynamically patched models against keys rotated afresh."""

import pytest
import torch
import transformers
from helpers.reference_rerotation import Reference
from helpers.releases import plain_transformers, prompt_lookup
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TRAINED,
    make_generator,
    make_model,
    padded,
    tokens,
)
from transformers import DynamicCache

import rope_patch

NEW = 100  # tokens, from SHORT to past twice the trained length
FAMILIES = ["llama", "qwen3", "gemma3"]
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt lookup": {"do_sample": False, **prompt_lookup(4)},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(5)
    return model.generate(ids, max_new_tokens=NEW, **kwargs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_matches_the_reference(family, way):
    model, ids = make_generator(family), tokens(SHORT)
    with plain_transformers():  # 5.0 fails to crop sliding windows
        generate(model, ids, **WAYS[way])
    reference = Reference(model, "dynamic-yarn")
    # Candidates change nothing, so the reference decodes token by token.
    reference_options = WAYS["greedy" if way == "prompt lookup" else way]
    expected = generate(
        reference.model, ids, past_key_values=reference.new_cache(), **reference_options
    )
    unpatched = generate(model, ids, **WAYS[way])
    rope_patch.patch(model, "dynamic-yarn")
    got = generate(model, ids, **WAYS[way])
    assert got.equal(expected)
    assert not got.equal(unpatched)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_generation_matches_the_reference(family):
    """Rejected candidates must leave the cache and its length."""
    model, ids = make_generator(family), tokens(SHORT)
    assistant = make_generator(family, seed=3)
    way = {"do_sample": False, "assistant_model": assistant}
    with plain_transformers():  # some releases fail to crop sliding windows
        generate(model, ids, **way)
    reference = Reference(model, "dynamic-yarn")
    greedy = {"do_sample": False}  # candidates change nothing, so the reference has none
    expected = generate(reference.model, ids, past_key_values=reference.new_cache(), **greedy)
    rope_patch.patch(model, "dynamic-yarn")
    assert generate(model, ids, **way).equal(expected)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_generates_the_tokens_of_its_rows(family, implementation):
    model = make_generator(family)
    rows = [tokens(length, seed=length) for length in (30, 120, 70)]
    expected_rows = []
    for row in rows:
        reference = Reference(model, "dynamic-yarn")
        cache = reference.new_cache()
        output = generate(reference.model, row, past_key_values=cache, do_sample=False)
        expected_rows.append(output[0, row.shape[1] :])
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded(rows, "left")
    kind = {} if implementation == "dynamic" else {"cache_implementation": implementation}
    batch = generate(model, ids, attention_mask=mask, do_sample=False, **kind)
    for got, expected in zip(batch[:, ids.shape[1] :], expected_rows, strict=True):
        assert got.equal(expected)


def test_conversation_continues_from_its_cache():
    model, ids = make_generator("llama"), tokens(SHORT)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    conversations = []
    for generator, cache in (
        (model, DynamicCache(config=model.config)),
        (reference.model, reference.new_cache()),
    ):
        output = generator.generate(
            ids, past_key_values=cache, max_new_tokens=TRAINED, do_sample=False
        )
        prompt = torch.cat([output, tokens(30, seed=8)], dim=1)
        conversations.append(
            generator.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False)
        )
    assert conversations[0].equal(conversations[1])


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama", "longrope", {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}),
        ("phi3", "longrope", {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}),
        ("phi3", "yarn", {}),
    ],
)
def test_generation_crosses_the_trained_length(family, method, options):
    """With one layer, decoding with re-rotated keys equals decoding without a cache.

    Phi-3's generate drops the cache there.
    """
    model = make_model(
        family, tie_word_embeddings=False, initializer_range=0.2, num_hidden_layers=1
    )
    ids = tokens(TRAINED - 20)
    rope_patch.patch(model, method, factor=4, **options)
    way = {"do_sample": False}
    assert generate(model, ids, **way).equal(generate(model, ids, use_cache=False, **way))


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
    prompts = [text * times for times in (1, 9, 4, 14, 6)]

    def answers(batch_size):
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=2048)
        settings = {"until": [], "max_gen_toks": 20, "do_sample": False}
        requests = [
            Instance("generate_until", {}, (prompt, settings), i)
            for i, prompt in enumerate(prompts)
        ]
        return lm.generate_until(requests, disable_tqdm=True)

    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert min(lengths) < 256 < 2 * 256 < max(lengths)
    assert answers(batch_size=3) == answers(batch_size=1)
