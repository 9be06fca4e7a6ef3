"""Test growth="admission": generate equals a static patch of the factor that serves all tokens."""

import copy

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.growing_texts import PROMPT
from helpers.reference_rerotation import stepped
from helpers.releases import prompt_lookup
from helpers.tiny_models import (
    BEFORE_5_17,
    OLD_TRANSFORMERS,
    TRAINED,
    forward,
    make_generator,
    padded,
    step_by_step,
    tokens,
)
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import rope_patch

NEW = 20  # tokens, from PROMPT over the trained length and a growth step beyond it
LENGTH = PROMPT + NEW
IDS = tokens(PROMPT)
STATIC = {
    "dynamic": "ntk",
    "dynamic-linear": "linear",
    "dynamic-ntk-by-parts": "ntk-by-parts",
    "dynamic-yarn": "yarn",
    "dynamic-llama3": "llama3",
    "dynamic-abf": "abf",
    "dynamic-ntk-by-parts-2023-06": "ntk-by-parts-2023-06",
}


class OtherLayer(DynamicLayer):
    """A layer of a kind whose keys cannot be re-rotated."""


# Ways to generate: options of `generate`, and the tokens that they announce. The last one is
# never read.
WAYS = {
    "cache": ({}, LENGTH),
    "no cache": ({"use_cache": False}, LENGTH),
    "static cache": ({"cache_implementation": "static"}, LENGTH),
    "chunks": ({"prefill_chunk_size": 16}, LENGTH),
    "beams": ({"num_beams": 3}, LENGTH),
    "sampled": ({"do_sample": True, "top_k": 20, "num_return_sequences": 2}, LENGTH),
    "prompt lookup": (prompt_lookup(4), LENGTH),
    "embeddings": ({"inputs_embeds": None}, LENGTH),
    "max_length": ({"max_length": 78, "max_new_tokens": None}, 78),
    "generation config": ({"max_new_tokens": None}, 78),
    "no length": ({"max_new_tokens": None}, TRAINED),
    "short": ({"max_new_tokens": 4}, PROMPT + 4),
    "up to the trained length": ({"max_new_tokens": TRAINED - PROMPT + 1}, TRAINED + 1),
    "one token more": ({"max_new_tokens": TRAINED - PROMPT + 2}, TRAINED + 2),
}


def generate(model, ids, **options):
    """Return the tokens and the logits of each step, `[steps, B, V]`."""
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    if options["max_new_tokens"] is None:
        del options["max_new_tokens"]
    output = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    return output.sequences, torch.stack(output.logits)


def assert_same(got, expected):
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])  # bit for bit


def assert_close(got, expected, atol=2e-5):
    assert got[0].equal(expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=atol)


def admit(model, method="dynamic-yarn"):
    return rope_patch.patch(model, method, growth="admission")


def static_twin(model, length, method="yarn"):
    """Return a copy with a static patch of the factor for `length` tokens."""
    twin = copy.deepcopy(model)
    if length > TRAINED:
        rope_patch.patch(twin, method, factor=stepped(length, TRAINED))
    return twin


def expected_of(model, length=LENGTH, ids=IDS, method="yarn", **options):
    return generate(static_twin(model, length, method), ids, **options)


@pytest.fixture
def model():
    return make_generator("llama")


@pytest.mark.parametrize("method", STATIC)
def test_generate_equals_the_static_method(model, method):
    expected = expected_of(model, method=STATIC[method])
    admit(model, method)
    assert_same(generate(model, IDS), expected)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in WAYS),
        *(("gemma3", way) for way in ("cache", "static cache", "prompt lookup")),
    ],
)
def test_ways_to_generate_equal_the_static_method(family, way):
    if OLD_TRANSFORMERS and way in ("prompt lookup", "chunks"):
        pytest.skip("transformers 5.0 itself fails without an eos token, or to make the cache")
    model, ids, (options, length) = make_generator(family), IDS, WAYS[way]
    if way == "embeddings":
        ids = None
        options = {"inputs_embeds": model.get_input_embeddings()(IDS).detach()}
    if way == "generation config":
        model.generation_config.max_new_tokens = length - PROMPT
    plain, expected = (
        generate(model, ids, **options),
        expected_of(model, length - 1, ids, **options),
    )
    admit(model)
    got = generate(model, ids, **options)
    assert_same(got, expected)
    assert len(got[1]) == length - PROMPT or way == "prompt lookup"
    assert got[1].shape != plain[1].shape or got[1].equal(plain[1]) == (length - 1 <= TRAINED)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_have_factors_of_their_own(family):
    """Rows of 30, 120 and 70 tokens with 20 more: below the trained length, 140 and 90."""
    model, new = make_generator(family), 20
    rows = [tokens(length, seed=length) for length in (30, 120, 70)]
    expected = [expected_of(model, row.shape[1] + new, row, max_new_tokens=new)[1] for row in rows]
    admit(model)
    ids, mask = padded(rows, "left")
    got = generate(model, ids, attention_mask=mask, max_new_tokens=new)[1]
    for i, row in enumerate(expected):
        torch.testing.assert_close(got[:, i], row[:, 0], rtol=0, atol=2e-5)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="its rotary module takes no rows")
def test_rows_rotate_by_the_bits_of_their_factors(model):
    """The factors differ between rows that pad each other, to the bit."""
    ids, mask = padded([tokens(30, seed=1), tokens(120, seed=2)], "left")
    handle, seen = admit(model), []
    rotary = model.model.rotary_emb
    rotary.register_forward_pre_hook(lambda module, _: seen.append(module.inv_freq))
    generate(model, ids, attention_mask=mask, max_new_tokens=20)
    expected = [handle.frequencies_at(length)[None].inv_freq.float() for length in (50, 140)]
    assert len(seen) == 20
    assert all(each.equal(torch.stack(expected)[:, None]) for each in seen)


@pytest.mark.parametrize("kind", ["assistant", "patched assistant", "early exit"])
def test_assisted_decoding_equals_decoding_without(model, kind):
    if OLD_TRANSFORMERS and kind == "early exit":
        pytest.skip("transformers 5.0 itself calls its generator wrongly")
    expected = expected_of(model)[0]
    assistant = make_generator("llama", seed=3)
    options = {"assistant_model": assistant}
    if kind == "patched assistant":  # its own cache is announced token by token, so it grows
        admit(assistant)
    if kind == "early exit":
        options = {"assistant_early_exit": 1}
    admit(model)
    assert generate(model, IDS, **options)[0].equal(expected)


# -- caches ----------------------------------------------------------------------------------------


def test_generate_continues_a_cache_that_serves_it(model):
    """A cache keeps the factor of its first request, while that serves the next ones."""
    outputs, static = [], static_twin(model, LENGTH)
    admit(model)
    for each in (model, static):
        cache = DynamicCache(config=model.config)
        first = each.generate(IDS, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        cache.crop(-NEW // 2)
        prompt = torch.cat([first[:, : cache.get_seq_length()], tokens(5, seed=8)], dim=1)
        outputs.append(generate(each, prompt, past_key_values=cache, max_new_tokens=10))
    assert_same(*outputs)


@pytest.mark.parametrize("prompt", [1, 10])
def test_generate_refuses_a_cache_that_does_not_serve_it(model, prompt):
    """Refuse at the first token, before anything is generated, and not on the way."""
    admit(model)
    cache, ids = DynamicCache(config=model.config), tokens(PROMPT + prompt)
    model.generate(ids[:, :PROMPT], past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert cache.get_seq_length() == PROMPT
    with pytest.raises(ValueError, match=r"fix_length.*growth='stepped'"):
        model.generate(ids, past_key_values=cache, max_new_tokens=NEW)
    assert cache.get_seq_length() == PROMPT
    fresh = DynamicCache(config=model.config)
    got = model.generate(ids, past_key_values=fresh, max_new_tokens=NEW)
    assert got.shape[1] == LENGTH + prompt


def test_an_emptied_cache_is_admitted_anew(model):
    expected = expected_of(model)
    admit(model)
    cache = DynamicCache(config=model.config)
    model.generate(IDS, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.crop(-cache.get_seq_length())
    assert_same(generate(model, IDS, past_key_values=cache), expected)


def test_any_cache_can_be_admitted(model):
    expected = expected_of(model)
    admit(model)
    cache = Cache(layer_class_to_replicate=OtherLayer)
    assert_same(generate(model, IDS, past_key_values=cache), expected)


@pytest.mark.skipif(BEFORE_5_17, reason="it caches the keys of latent attention expanded")
def test_latent_attention_equals_the_static_method_up_to_rounding():
    """There the attention factor multiplies queries, instead of the softmax scale."""
    model = tiny_model("deepseek_v3")
    expected = expected_of(model)
    admit(model)
    assert_close(generate(model, IDS), expected, atol=1e-4)


@pytest.mark.parametrize(("growth", "is_rerotated"), [("admission", False), ("stepped", True)])
def test_no_key_is_rerotated(model, growth, is_rerotated):
    cache, keys = DynamicCache(config=model.config), []
    rope_patch.patch(model, "dynamic-yarn", growth=growth)
    model.model.register_forward_hook(lambda *_: keys.append(cache.layers[0].keys.clone()))
    generate(model, IDS, past_key_values=cache)
    assert all(each[:, :, :PROMPT].equal(keys[0]) for each in keys) != is_rerotated


# -- forwards without generate ---------------------------------------------------------------------


def test_single_pass_has_the_factor_of_its_length(model):
    static = static_twin(model, LENGTH)
    admit(model)
    assert forward(model, tokens(LENGTH)).equal(forward(static, tokens(LENGTH)))


@torch.no_grad()
def test_a_loop_without_generate_is_refused_where_it_outgrows_its_first_forward(model):
    admit(model)
    cache = DynamicCache(config=model.config)
    step_by_step(model, tokens(TRAINED), TRAINED - 4, cache)
    with pytest.raises(ValueError, match="fix_length"):
        model(tokens(1), past_key_values=cache)


@torch.no_grad()
def test_fixed_length_serves_a_loop_without_generate(model):
    ids, cache = tokens(LENGTH), DynamicCache(config=model.config)
    expected = step_by_step(static_twin(model, LENGTH), ids, PROMPT)
    handle = admit(model)
    handle.fix_length(LENGTH)
    assert step_by_step(model, ids, PROMPT).equal(expected)
    model(ids[:, :PROMPT], past_key_values=cache)
    handle.fix_length(None)  # the cache keeps its factor
    assert step_by_step(model, ids[:, PROMPT:], 1, cache).equal(expected[:, PROMPT:])
    handle.fix_length(4 * LENGTH)
    with pytest.raises(ValueError, match="keeps the factor"):
        model(ids[:, :1], past_key_values=cache)


# -- the model -------------------------------------------------------------------------------------


def test_an_admission_ends_with_its_generate(model):
    plain = forward(model, IDS)
    admit(model)
    generate(model, IDS)
    with pytest.raises(ValueError, match="not_an_argument"):
        model.generate(IDS, max_new_tokens=NEW, not_an_argument=1)
    assert forward(model, IDS).equal(plain)


def test_undo_restores_generate(model):
    own = set(vars(model))
    handle = admit(model)
    assert {"generate", "_prepare_cache_for_generation"} <= set(vars(model)) - own
    handle.undo()
    assert set(vars(model)) == own


def test_copied_model_admits_by_itself(model):
    expected = expected_of(model)
    admit(model)
    twin = copy.deepcopy(model)
    rope_patch.unpatch(model)
    assert_same(generate(twin, IDS), expected)
    assert twin.generate.original_method.__self__ is twin


@pytest.mark.slow
@pytest.mark.usefixtures("reset_compiler")
def test_compiled_model_is_admitted(model):
    expected = expected_of(model)
    admit(model)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert_close(generate(model, IDS), expected)


def test_saved_model_admits_as_before(model, tmp_path):
    handle = admit(model)
    assert "growth=admission" in handle.summary()
    assert handle.extension.options["growth"] == "admission"
    expected = generate(model, IDS)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path, dtype=torch.float32)
    assert rope_patch.current(loaded).method.growth == "admission"
    assert_close(generate(loaded, IDS), expected)
