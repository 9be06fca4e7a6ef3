"""Test caches under static methods: a cache of another rotation is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from helpers.releases import prompt_lookup
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    assert_close,
    assert_differs,
    forward,
    make_config,
    make_model,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import rope_patch

MORE = 10  # tokens on top of a cache of SHORT


@pytest.fixture(scope="module")
def model():
    """Return one model for all tests; `unpatched` restores it."""
    return make_model(num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def unpatched(model):
    yield
    if rope_patch.current(model):
        rope_patch.unpatch(model)


def patch(model, method):
    """Patch a model by a method's name; "none" leaves it unpatched."""
    if rope_patch.current(model):
        rope_patch.unpatch(model)
    options = {"longrope": {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}}
    sizes = {} if method.startswith("dynamic") else {"factor": 4}
    return method != "none" and rope_patch.patch(model, method, **sizes, **options.get(method, {}))


@torch.no_grad()
def fill(model, cache=None, length=SHORT):
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(tokens(length), past_key_values=cache)
    return cache


@torch.no_grad()
def continue_cache(model, cache, start=SHORT):
    return model(tokens(start + MORE)[:, start:], past_key_values=cache).logits


def assert_continues(model, cache, start=SHORT):
    assert_close(
        continue_cache(model, cache, start), forward(model, tokens(start + MORE))[:, start:]
    )


# -- refused caches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("none", "yarn", "before the model was patched"),
        ("yarn", "linear", "another patch"),
        ("yarn", "longrope", "another patch"),
        ("dynamic-linear", "yarn", "another patch"),
        ("mixed-yarn", "yarn", "another patch"),
        ("yarn", "dynamic-yarn", "frequencies stay"),
    ],
)
def test_cache_of_another_rotation_is_refused(model, first, second, reason):
    patch(model, first)
    cache = fill(model)
    before = cache.layers[0].keys.clone()
    patch(model, second)
    with pytest.raises(ValueError, match=rf"40 tokens.*{reason}"):
        continue_cache(model, cache)
    assert cache.layers[0].keys.equal(before)


def test_cache_of_other_options_is_refused(model):
    rope_patch.patch(model, "yarn", factor=4)
    cache = fill(model)
    for changes in ({"factor": 2}, {"factor": 4, "attention_factor": 1.0}):
        rope_patch.patch(model, "yarn", **changes)
        with pytest.raises(ValueError, match="another patch"):
            continue_cache(model, cache)


def test_cache_of_other_start_tokens_is_refused(model):
    stretch = {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}
    rope_patch.patch(model, "longrope", factor=4, **stretch)
    cache = fill(model)
    rope_patch.patch(model, "longrope", factor=4, start_tokens=4, **stretch)
    with pytest.raises(ValueError, match="another patch"):
        continue_cache(model, cache)
    assert_continues(model, fill(model))


def test_static_cache_and_prompt_cache_of_the_unpatched_model_are_refused(model):
    static = fill(model, StaticCache(config=model.config, max_cache_len=SHORT + MORE))
    prompt = fill(model)
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(ValueError, match="40 tokens"):
        continue_cache(model, static)
    with pytest.raises(ValueError, match="before the model was patched"):
        model.generate(tokens(SHORT + MORE), past_key_values=prompt, max_new_tokens=2)


def test_encoder_decoder_cache_is_refused():
    config = make_config("gemma2").to_dict()
    config = transformers.T5GemmaConfig(encoder=config, decoder=config, vocab_size=128)
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    inputs = {"input_ids": tokens(SHORT), "use_cache": True}
    with torch.no_grad():
        old_cache = model(**inputs, decoder_input_ids=tokens(8)).past_key_values
        rope_patch.patch(model, "linear", factor=4)
        with pytest.raises(ValueError, match="8 tokens"):
            model(**inputs, decoder_input_ids=tokens(1), past_key_values=old_cache)
        new_cache = model(**inputs, decoder_input_ids=tokens(9)[:, :8]).past_key_values
        assert isinstance(new_cache, EncoderDecoderCache)
        got = model(**inputs, decoder_input_ids=tokens(9)[:, 8:], past_key_values=new_cache).logits
        whole = model(**inputs, decoder_input_ids=tokens(9)).logits[:, 8:]
    assert_close(got, whole)


# -- accepted caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["the same patch again", "a copy", "a second model"])
def test_models_with_the_same_rotation_continue_a_cache(model, case):
    handle = rope_patch.patch(model, "yarn", factor=4)
    cache, other = fill(model), model
    if case == "a copy":
        other = copy.deepcopy(model)
    elif case == "a second model":
        other = make_model(num_hidden_layers=1, tie_word_embeddings=False)
        rope_patch.patch(other, "yarn", length=256)
    else:
        handle.undo()
        rope_patch.patch(model, "yarn", factor=4)
    assert_continues(other, cache)


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda cache: copy.deepcopy(copy.deepcopy(cache)),
        lambda cache: pickle.loads(pickle.dumps(cache)),
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.batch_repeat_interleave(1),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.crop(-MORE),
    ],
)
def test_changed_caches_keep_their_stamp(model, change):
    rope_patch.patch(model, "yarn", factor=4)
    cache = fill(model)
    cache = change(cache) or cache
    assert_continues(model, cache, cache.get_seq_length())
    rope_patch.patch(model, "linear", factor=4)
    with pytest.raises(ValueError, match="another patch"):
        continue_cache(model, cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_emptied_cache_serves_any_patch(model, kind):
    """Refill one cache under static and dynamic methods in turn."""
    sizes = {"max_cache_len": SHORT + MORE} if kind is StaticCache else {}
    cache = fill(model, kind(config=model.config, **sizes))
    for method in ("yarn", "dynamic-yarn", "yarn", "linear"):
        cache.reset() if kind is StaticCache else cache.crop(-cache.get_seq_length())
        patch(model, method)
        assert_continues(model, fill(model, cache))
    patch(model, "yarn")  # the stamp is that of the last patch
    with pytest.raises(ValueError, match="another patch"):
        continue_cache(model, cache, SHORT + MORE)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_tokens_cached_without_the_patch_are_refused(model, kind):
    sizes = {"max_cache_len": 200} if kind is StaticCache else {}
    patch(model, "yarn")
    cache = fill(model, kind(config=model.config, **sizes))
    patch(model, "none")
    continue_cache(model, cache)
    patch(model, "yarn")
    with pytest.raises(ValueError, match=f"{SHORT + MORE} tokens, of which .* rotated {SHORT}"):
        continue_cache(model, cache, SHORT + MORE)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_cache_made_by_the_decoder(model, method, return_dict):
    patch(model, method)
    with torch.no_grad():
        output = model.model(tokens(SHORT), use_cache=True, return_dict=return_dict)
    assert_continues(model, output.past_key_values if return_dict else output[1])


def test_cache_layer_with_packed_keys(model):
    """Static methods accept quantized caches, because they never re-rotate keys."""

    class Packed(DynamicLayer):
        pass

    rope_patch.patch(model, "yarn", factor=4)
    assert_continues(model, fill(model, transformers.Cache(layer_class_to_replicate=Packed)))
    assert issubclass(Packed, CacheLayerMixin)


WAYS = {
    "beams": {"num_beams": 3},
    "prompt lookup": prompt_lookup(4),
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_generation_mode_is_accepted(model, way):
    if OLD_TRANSFORMERS and way in ("prompt lookup", "chunks"):
        pytest.skip("transformers 5.0 itself fails without an eos token, or without a cache")
    rope_patch.patch(model, "yarn", factor=4)
    output = model.generate(
        tokens(SHORT), max_new_tokens=8, return_dict_in_generate=True, **WAYS[way]
    )
    assert output.sequences.shape[1] == SHORT + 8


def test_assisted_generation_and_a_second_round(model):
    assistant = make_model(num_hidden_layers=1, seed=3)
    rope_patch.patch(model, "yarn", factor=4)
    options = {"do_sample": False, "max_new_tokens": MORE}
    expected = model.generate(tokens(SHORT), use_cache=False, **options)
    assert model.generate(tokens(SHORT), assistant_model=assistant, **options).equal(expected)
    first = model.generate(tokens(SHORT), return_dict_in_generate=True, **options)
    assert first.sequences.equal(expected)
    second = model.generate(expected, past_key_values=first.past_key_values, **options)
    assert second.equal(model.generate(expected, use_cache=False, **options))


# -- caches accepted by the user -------------------------------------------------------------------


def test_accept_cache_allows_a_rebuilt_cache(model):
    handle = rope_patch.patch(model, "yarn", factor=4)
    stored = fill(model).layers[0]
    rebuilt = DynamicCache([(stored.keys.clone(), stored.values.clone())])
    with pytest.raises(ValueError, match=r"accept_cache\(cache\)"):
        continue_cache(model, rebuilt)
    handle.accept_cache(rebuilt)
    assert_continues(model, rebuilt)


def test_accept_cache_refuses_dynamic_methods_and_other_types(model):
    handle = rope_patch.patch(model, "dynamic-yarn")
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        handle.accept_cache(fill(model))
    handle = rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(TypeError, match="got list"):
        handle.accept_cache([])


def test_prefix_tuning_works(model):
    """The trained prefix keys have no positions, so they fit any rotation."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    plain = tuned(tokens(SHORT)).logits
    rope_patch.patch(tuned, "yarn", factor=4)
    assert_differs(tuned(tokens(SHORT)).logits, plain)
    assert tuned.generate(input_ids=tokens(SHORT), max_new_tokens=3).shape[1] == SHORT + 3
    rope_patch.unpatch(tuned)
    assert tuned(tokens(SHORT)).logits.equal(plain)


# -- compiled graphs -------------------------------------------------------------------------------


@pytest.fixture
def compiled(model, reset_compiler):
    return torch.compile(model, fullgraph=True, backend="eager")


def make_static_cache(model):
    """Return an initialised, empty static cache, whose length no compiled graph can read."""
    cache = StaticCache(config=model.config, max_cache_len=SHORT + MORE)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    return cache


@torch.no_grad()
def test_compiled_steps_do_not_recompile_for_the_stamp(model, compiled):
    rope_patch.patch(model, "yarn", factor=4)
    cache = make_static_cache(model)
    compiled(tokens(SHORT), past_key_values=cache)
    ids = tokens(SHORT + MORE)
    got = [compiled(ids[:, i : i + 1], past_key_values=cache).logits for i in range(SHORT, 50)]
    assert_close(torch.cat(got, dim=1), forward(model, ids)[:, SHORT:])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the prompt, and all steps


@torch.no_grad()
def test_compiled_graph_refuses_a_static_cache_at_run_time(model, compiled):
    cache = fill(model, make_static_cache(model))
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(ValueError, match="40 tokens"):
        compiled(tokens(MORE), past_key_values=cache)
    assert int(cache.get_seq_length()) == SHORT


@torch.no_grad()
def test_compiled_graph_refuses_a_dynamic_cache(model, compiled):
    cache = fill(model)
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(Exception, match="40 tokens"):
        compiled(tokens(MORE), past_key_values=cache)
