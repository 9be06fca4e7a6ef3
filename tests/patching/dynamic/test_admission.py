"""Test growth="admission": generate equals a static patch of the factor that serves all tokens."""

import copy

import pytest
import torch
from helpers.reference_rerotation import stepped
from helpers.releases import prompt_lookup
from helpers.tiny_models import (
    BEFORE_5_17,
    LONG,
    OLD_TRANSFORMERS,
    SHORT,
    SIZES,
    TRAINED,
    forward,
    make_generator,
    padded,
    step_by_step,
    tokens,
)
from transformers import Cache, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

import rope_patch
from rope_patch.patching.dynamic.rerotation import KeyRerotation

NEW = 100  # tokens, from SHORT to past twice the trained length
STATIC = {
    "dynamic": "ntk",
    "dynamic-linear": "linear",
    "dynamic-ntk-by-parts": "ntk-by-parts",
    "dynamic-yarn": "yarn",
    "dynamic-llama3": "llama3",
    "dynamic-abf": "abf",
    "dynamic-ntk-by-parts-2023-06": "ntk-by-parts-2023-06",
}
WAYS = {
    "cache": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 16},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "prompt lookup": prompt_lookup(4),
}


def generate(model, ids, **options):
    """Return the tokens and the logits of each step, `[steps, B, V]`."""
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    if "max_length" in options or options["max_new_tokens"] is None:
        del options["max_new_tokens"]
    output = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    return output.sequences, torch.stack(output.logits)


def assert_same(got, expected):
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])  # bit for bit


def admit(model, method="dynamic-yarn"):
    return rope_patch.patch(model, method, growth="admission")


def expected_of(model, length, ids, method="yarn", **options):
    """Return what a static patch with the factor for `length` tokens generates."""
    twin = copy.deepcopy(model)
    if length > TRAINED:
        rope_patch.patch(twin, method, factor=stepped(length, TRAINED))
    return generate(twin, ids, **options)


@pytest.fixture
def model():
    return make_generator("llama")


@pytest.mark.parametrize("method", STATIC)
def test_generate_equals_the_static_method(model, method):
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids, STATIC[method])
    admit(model, method)
    assert_same(generate(model, ids), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ways_to_generate_equal_the_static_method(family, way):
    if OLD_TRANSFORMERS and way in ("prompt lookup", "chunks"):
        pytest.skip("transformers 5.0 itself fails without an eos token, or to make the cache")
    model, ids = make_generator(family), tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids, **WAYS[way])
    admit(model)
    assert_same(generate(model, ids, **WAYS[way]), expected)


@pytest.mark.parametrize("new", [TRAINED - SHORT, 10])
def test_generate_within_the_trained_length_equals_the_plain_model(model, new):
    ids = tokens(SHORT)
    plain = generate(model, ids, max_new_tokens=new)
    admit(model)
    assert_same(generate(model, ids, max_new_tokens=new), plain)


def test_one_token_more_than_the_trained_length_stretches(model):
    ids, new = tokens(SHORT), TRAINED - SHORT + 1
    plain = generate(model, ids, max_new_tokens=new)
    expected = expected_of(model, TRAINED + 1, ids, max_new_tokens=new)
    admit(model)
    got = generate(model, ids, max_new_tokens=new)
    assert_same(got, expected)
    assert not got[1].equal(plain[1])


@pytest.mark.parametrize("how", ["max_length", "generation_config"])
def test_other_ways_to_state_the_length(model, how):
    ids = tokens(SHORT)
    expected = expected_of(model, LONG, ids, max_length=LONG)
    admit(model)
    if how == "generation_config":
        model.generation_config.max_new_tokens = LONG - SHORT
        assert_same(generate(model, ids, max_new_tokens=None), expected)
    else:
        assert_same(generate(model, ids, max_length=LONG), expected)


def test_generation_defaults_count(model):
    """Without any length transformers generates 20 tokens."""
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + 20, ids, max_new_tokens=None)
    admit(model)
    got = generate(model, ids, max_new_tokens=None)
    assert got[0].shape[1] == SHORT + 20
    assert_same(got, expected)


def test_embeddings_are_admitted_as_their_tokens(model):
    ids = tokens(SHORT)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = expected_of(model, SHORT + NEW, None, inputs_embeds=embeds)
    admit(model)
    assert_same(generate(model, None, inputs_embeds=embeds), expected)


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


def test_rows_rotate_by_the_bits_of_their_factors(model):
    """The factors differ between rows that pad each other, to the bit."""
    rows = [tokens(30, seed=1), tokens(120, seed=2)]
    ids, mask = padded(rows, "left")
    hooks = admit(model)._length_hooks[0]
    seen = []
    original = hooks.update_rows
    hooks.update_rows = lambda *a, **k: seen.append(original(*a, **k)) or seen[-1]
    generate(model, ids, attention_mask=mask, max_new_tokens=20)
    expected = torch.stack([hooks.frequency_table.row(reach) for reach in (64.0, 64 * 2**1.25)])
    assert len(seen) == 20
    assert all(each.equal(expected.float()) for each in seen)


@pytest.mark.parametrize("kind", ["assistant", "patched assistant", "early exit"])
def test_assisted_decoding_equals_decoding_without(kind):
    if OLD_TRANSFORMERS and kind == "early exit":
        pytest.skip("transformers 5.0 itself calls its generator wrongly")
    model, ids = make_generator("llama"), tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)[0]
    assistant = make_generator("llama", seed=3)
    options = {"assistant_model": assistant}
    if kind == "patched assistant":  # its own cache is announced token by token, so it grows
        admit(assistant)
    if kind == "early exit":
        options = {"assistant_early_exit": 1}
    admit(model)
    assert generate(model, ids, **options)[0].equal(expected)


def test_generate_continues_a_cache_that_serves_it(model):
    """A cache keeps the factor of its first request, while that serves the next ones."""
    ids, more = tokens(SHORT), tokens(10, seed=8)
    outputs = []
    for static in (True, False):
        twin = copy.deepcopy(model)
        if static:
            rope_patch.patch(twin, "yarn", factor=stepped(SHORT + NEW, TRAINED))
        else:
            admit(twin)
        cache = DynamicCache(config=model.config)
        first = twin.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        cache.crop(-NEW // 2)
        prompt = torch.cat([first[:, : cache.get_seq_length()], more], dim=1)
        outputs.append(generate(twin, prompt, past_key_values=cache, max_new_tokens=20))
    assert_same(*outputs)


@pytest.mark.parametrize("prompt", [1, 10])
def test_generate_refuses_a_cache_that_does_not_serve_it(model, prompt):
    """Refuse at the first token, before anything is generated, and not on the way."""
    admit(model)
    cache = DynamicCache(config=model.config)
    ids = tokens(SHORT + prompt)
    model.generate(ids[:, :SHORT], past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert cache.get_seq_length() == SHORT
    with pytest.raises(ValueError, match=r"keeps the factor.*fix_length.*growth='stepped'"):
        model.generate(ids, past_key_values=cache, max_new_tokens=NEW)
    fresh = DynamicCache(config=model.config)
    assert model.generate(ids, past_key_values=fresh, max_new_tokens=NEW).shape[1] == (
        SHORT + prompt + NEW
    )


def test_an_emptied_cache_is_admitted_anew(model):
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)
    admit(model)
    cache = DynamicCache(config=model.config)
    model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.crop(-cache.get_seq_length())
    assert_same(generate(model, ids, past_key_values=cache), expected)


@pytest.mark.skipif(BEFORE_5_17, reason="it caches the keys of latent attention expanded")
def test_latent_attention_equals_the_static_method_up_to_rounding():
    """There the attention factor multiplies queries, instead of the softmax scale."""
    torch.manual_seed(0)
    sizes = {
        key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")
    }
    config = DeepseekV3Config(
        **sizes | {"initializer_range": 0.2, "tie_word_embeddings": False},
        num_key_value_heads=4,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    model, ids = DeepseekV3ForCausalLM(config).eval(), tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)
    admit(model)
    got = generate(model, ids)
    assert got[0].equal(expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-4)


def test_single_pass_has_the_factor_of_its_length(model):
    ids = tokens(LONG)
    static = copy.deepcopy(model)
    rope_patch.patch(static, "yarn", factor=stepped(LONG, TRAINED))
    admit(model)
    assert forward(model, ids).equal(forward(static, ids))


@torch.no_grad()
def test_a_loop_without_generate_is_refused_where_it_outgrows_its_first_forward(model):
    admit(model)
    cache = DynamicCache(config=model.config)
    model(tokens(TRAINED - 4), past_key_values=cache)
    for _ in range(4):
        model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match=r"keeps the factor.*fix_length"):
        model(tokens(1), past_key_values=cache)


@torch.no_grad()
def test_fixed_length_serves_a_loop_without_generate(model):
    ids = tokens(LONG)
    static = copy.deepcopy(model)
    rope_patch.patch(static, "yarn", factor=stepped(LONG, TRAINED))
    handle = admit(model)
    handle.fix_length(LONG)
    assert step_by_step(model, ids, SHORT).equal(step_by_step(static, ids, SHORT))
    cache = DynamicCache(config=model.config)
    model(ids[:, :SHORT], past_key_values=cache)
    handle.fix_length(None)  # the cache keeps its factor
    static_cache = DynamicCache(config=model.config)
    static(ids[:, :SHORT], past_key_values=static_cache)
    for at in range(SHORT, LONG):
        got = model(ids[:, at : at + 1], past_key_values=cache).logits
        assert got.equal(static(ids[:, at : at + 1], past_key_values=static_cache).logits)
    handle.fix_length(4 * LONG)
    with pytest.raises(ValueError, match="keeps the factor"):
        model(ids[:, :1], past_key_values=cache)


def test_no_key_is_rerotated(model, monkeypatch):
    calls = []
    rerotate = KeyRerotation.rerotate
    monkeypatch.setattr(
        KeyRerotation,
        "rerotate",
        lambda self, cached, old, new, changed: (
            calls.append(bool(changed.any())),
            rerotate(self, cached, old, new, changed),
        ),
    )
    admit(model)
    generate(model, tokens(SHORT))
    assert calls == [False]  # the empty cache got its first frequencies
    rope_patch.patch(model, "dynamic-yarn")
    generate(model, tokens(SHORT))
    assert True in calls


def test_an_admission_ends_with_its_generate(model):
    admit(model)
    generate(model, tokens(SHORT))
    with pytest.raises(ValueError, match="not_an_argument"):
        model.generate(tokens(SHORT), max_new_tokens=NEW, not_an_argument=1)
    plain = make_generator("llama")
    assert forward(model, tokens(SHORT)).equal(forward(plain, tokens(SHORT)))


def test_undo_restores_generate(model):
    own = set(vars(model))
    handle = admit(model)
    assert {"generate", "_prepare_cache_for_generation"} <= set(vars(model)) - own
    handle.undo()
    assert set(vars(model)) == own


def test_copied_model_admits_by_itself(model):
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)
    admit(model)
    twin = copy.deepcopy(model)
    rope_patch.unpatch(model)
    assert_same(generate(twin, ids), expected)
    assert twin.generate.original_method.__self__ is twin


class OtherLayer(DynamicLayer):
    """A layer of a kind whose keys cannot be re-rotated."""


def test_any_cache_can_be_admitted(model):
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)
    admit(model)
    cache = Cache(layer_class_to_replicate=OtherLayer)
    assert_same(generate(model, ids, past_key_values=cache), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("reset_compiler")
def test_compiled_model_is_admitted(model):
    ids = tokens(SHORT)
    expected = expected_of(model, SHORT + NEW, ids)
    admit(model)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    got = generate(model, ids)
    assert got[0].equal(expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-5)


def test_saved_model_admits_as_before(model, tmp_path):
    ids = tokens(SHORT)
    admit(model)
    expected = generate(model, ids)
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path, dtype=torch.float32)
    assert rope_patch.current(loaded).method.growth == "admission"
    got = generate(loaded, ids)
    assert got[0].equal(expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-5)


def test_summary_and_request_name_the_growth(model):
    handle = admit(model)
    assert "growth=admission" in handle.summary()
    assert handle.extension.options["growth"] == "admission"
