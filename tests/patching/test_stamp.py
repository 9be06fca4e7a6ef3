"""Caches under methods whose frequencies stay: one of another rotation is refused."""

import copy
import pickle

import pytest
import torch
import transformers
from helpers.tiny_models import (
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    assert_close,
    assert_differs,
    forward,
    logits,
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
    """One model for all tests, each of which leaves it unpatched."""
    return make_model(num_hidden_layers=1, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def unpatched(model):
    yield
    if rope_patch.current(model):
        rope_patch.unpatch(model)


def patch(model, method):
    """Patch a model by a method's name, or leave it alone for "none"."""
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
def go_on(model, cache, start=SHORT):
    return model(tokens(start + MORE)[:, start:], past_key_values=cache).logits


def assert_goes_on(model, cache, start=SHORT):
    assert_close(go_on(model, cache, start), forward(model, tokens(start + MORE))[:, start:])


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        ("none", "yarn", "filled before the model was patched"),
        ("yarn", "linear", "another patch rotated"),
        ("yarn", "longrope", "another patch rotated"),
        ("dynamic-linear", "yarn", "another patch rotated"),
        ("mixed-yarn", "yarn", "another patch rotated"),
        ("yarn", "dynamic-yarn", "under a method whose frequencies stay"),
    ],
)
def test_a_cache_of_another_rotation_is_refused(model, first, then, reason):
    patch(model, first)
    cache = fill(model)
    before = cache.layers[0].keys.clone()
    patch(model, then)
    with pytest.raises(ValueError, match=rf"40 tokens.*{reason}.*[Ee]xpected an empty cache"):
        go_on(model, cache)
    assert cache.layers[0].keys.equal(before)


def test_other_options_are_another_rotation(model):
    rope_patch.patch(model, "yarn", factor=4)
    cache = fill(model)
    for changes in ({"factor": 2}, {"factor": 4, "attention_factor": 1.0}):
        rope_patch.patch(model, "yarn", **changes)
        with pytest.raises(ValueError, match="another patch"):
            go_on(model, cache)


def test_start_tokens_are_another_rotation(model):
    stretch = {"long_factor": LONG_FACTOR, "short_factor": LONG_FACTOR}
    rope_patch.patch(model, "longrope", factor=4, **stretch)
    cache = fill(model)
    rope_patch.patch(model, "longrope", factor=4, start_tokens=4, **stretch)
    with pytest.raises(ValueError, match="another patch"):
        go_on(model, cache)
    assert_goes_on(model, fill(model))


def test_generate_refuses_a_prompt_cache_of_the_unpatched_model(model):
    cache = fill(model)
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(ValueError, match="filled before the model was patched"):
        model.generate(tokens(SHORT + MORE), past_key_values=cache, max_new_tokens=2)


def test_a_static_cache_is_refused(model):
    cache = fill(model, StaticCache(config=model.config, max_cache_len=SHORT + MORE))
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(ValueError, match="40 tokens"):
        go_on(model, cache)


def test_the_decoder_of_an_encoder_decoder_refuses_too():
    config = make_config("gemma2").to_dict()
    config = transformers.T5GemmaConfig(encoder=config, decoder=config, vocab_size=128)
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    given = {"input_ids": tokens(SHORT), "use_cache": True}
    with torch.no_grad():
        old = model(**given, decoder_input_ids=tokens(8)).past_key_values
        rope_patch.patch(model, "linear", factor=4)
        with pytest.raises(ValueError, match="8 tokens"):
            model(**given, decoder_input_ids=tokens(1), past_key_values=old)
        new = model(**given, decoder_input_ids=tokens(9)[:, :8]).past_key_values
        assert isinstance(new, EncoderDecoderCache)
        got = model(**given, decoder_input_ids=tokens(9)[:, 8:], past_key_values=new).logits
        whole = model(**given, decoder_input_ids=tokens(9)).logits[:, 8:]
    assert_close(got, whole)


# -- accepted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["the same patch again", "a copy", "a second model"])
def test_whoever_rotates_alike_goes_on(model, through):
    handle = rope_patch.patch(model, "yarn", factor=4)
    cache, other = fill(model), model
    if through == "a copy":
        other = copy.deepcopy(model)
    elif through == "a second model":
        other = make_model(num_hidden_layers=1, tie_word_embeddings=False)
        rope_patch.patch(other, "yarn", length=256)
    else:
        handle.undo()
        rope_patch.patch(model, "yarn", factor=4)
    assert_goes_on(other, cache)


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
def test_what_is_done_to_a_cache_leaves_its_mark(model, change):
    rope_patch.patch(model, "yarn", factor=4)
    cache = fill(model)
    cache = change(cache) or cache
    assert_goes_on(model, cache, cache.get_seq_length())
    rope_patch.patch(model, "linear", factor=4)
    with pytest.raises(ValueError, match="another patch"):
        go_on(model, cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_an_emptied_cache_serves_any_patch(model, kind):
    """Through a method that follows the length, and back."""
    sizes = {"max_cache_len": SHORT + MORE} if kind is StaticCache else {}
    cache = fill(model, kind(config=model.config, **sizes))
    for method in ("yarn", "dynamic-yarn", "yarn", "linear"):
        cache.reset() if kind is StaticCache else cache.crop(-cache.get_seq_length())
        patch(model, method)
        assert_goes_on(model, fill(model, cache))


def test_a_mark_does_not_outlive_another_filling(model):
    """A cache that was emptied and filled by a dynamic method is no longer of the first patch."""
    rope_patch.patch(model, "yarn", factor=4)
    cache = fill(model)
    cache.crop(-SHORT)
    patch(model, "dynamic-yarn")
    fill(model, cache)
    patch(model, "yarn")
    with pytest.raises(ValueError, match="another patch"):
        go_on(model, cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_tokens_that_came_unpatched_are_found_out_by_the_length(model, kind):
    sizes = {"max_cache_len": 200} if kind is StaticCache else {}
    patch(model, "yarn")
    cache = fill(model, kind(config=model.config, **sizes))
    patch(model, "none")
    go_on(model, cache)
    patch(model, "yarn")
    with pytest.raises(ValueError, match=f"{SHORT + MORE} tokens, of which .* rotated {SHORT}"):
        go_on(model, cache, SHORT + MORE)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_a_cache_that_the_decoder_made(model, method, return_dict):
    patch(model, method)
    with torch.no_grad():
        output = model.model(tokens(SHORT), use_cache=True, return_dict=return_dict)
    assert_goes_on(model, output.past_key_values if return_dict else output[1])


def test_a_layer_whose_keys_are_packed(model):
    """As in quantized caches, whose keys no static method needs to touch."""

    class Packed(DynamicLayer):
        pass

    rope_patch.patch(model, "yarn", factor=4)
    assert_goes_on(model, fill(model, transformers.Cache(layer_class_to_replicate=Packed)))
    assert issubclass(Packed, CacheLayerMixin)


WAYS = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_meets_no_refusal(model, way):
    if OLD_TRANSFORMERS and way in ("prompt lookup", "chunks"):
        pytest.skip("transformers 5.0 itself fails without an eos token, or without a cache")
    rope_patch.patch(model, "yarn", factor=4)
    said = model.generate(
        tokens(SHORT), max_new_tokens=8, return_dict_in_generate=True, **WAYS[way]
    )
    assert said.sequences.shape[1] == SHORT + 8


def test_assisted_generation_and_a_second_turn(model):
    assistant = make_model(num_hidden_layers=1, seed=3)
    rope_patch.patch(model, "yarn", factor=4)
    way = {"do_sample": False, "max_new_tokens": MORE}
    expected = model.generate(tokens(SHORT), use_cache=False, **way)
    assert model.generate(tokens(SHORT), assistant_model=assistant, **way).equal(expected)
    first = model.generate(tokens(SHORT), return_dict_in_generate=True, **way)
    assert first.sequences.equal(expected)
    second = model.generate(expected, past_key_values=first.past_key_values, **way)
    assert second.equal(model.generate(expected, use_cache=False, **way))


# -- the way out -----------------------------------------------------------------------------------


def test_a_rebuilt_cache_is_accepted_on_the_users_word(model):
    handle = rope_patch.patch(model, "yarn", factor=4)
    stored = fill(model).layers[0]
    rebuilt = DynamicCache([(stored.keys.clone(), stored.values.clone())])
    with pytest.raises(ValueError, match=r"rebuilt from tensors.*accept_cache\(cache\)"):
        go_on(model, rebuilt)
    handle.accept_cache(rebuilt)
    assert_goes_on(model, rebuilt)


def test_the_users_word_is_not_taken_for_what_only_the_model_knows(model):
    handle = rope_patch.patch(model, "dynamic-yarn")
    with pytest.raises(ValueError, match=r"without the record.*copy\.deepcopy"):
        handle.accept_cache(fill(model))
    handle = rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(TypeError, match="expected a transformers cache, got list"):
        handle.accept_cache([])


def test_prefix_tuning_goes_on(model):
    """Its trained keys are no positions' and belong to any rotation."""
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
def compiled(model):
    torch._dynamo.reset()
    counters.clear()
    yield torch.compile(model, fullgraph=True, backend="eager")
    torch._dynamo.reset()


def early(model):
    """A static cache whose length no graph can read: its tensors are there, and empty."""
    cache = StaticCache(config=model.config, max_cache_len=SHORT + MORE)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    return cache


@torch.no_grad()
def test_a_compiled_step_reads_no_mark_again(model, compiled):
    rope_patch.patch(model, "yarn", factor=4)
    cache = early(model)
    compiled(tokens(SHORT), past_key_values=cache)
    ids = tokens(SHORT + MORE)
    got = [compiled(ids[:, i : i + 1], past_key_values=cache).logits for i in range(SHORT, 50)]
    assert_close(torch.cat(got, dim=1), forward(model, ids)[:, SHORT:])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the prompt, and all steps


@torch.no_grad()
def test_a_compiled_graph_refuses_when_it_runs(model, compiled):
    old = fill(model, early(model))
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(ValueError, match="40 tokens, and nothing says"):
        compiled(tokens(MORE), past_key_values=old)
    assert int(old.get_seq_length()) == SHORT


@torch.no_grad()
def test_a_compiled_graph_refuses_a_growing_cache(model, compiled):
    old = fill(model)
    rope_patch.patch(model, "yarn", factor=4)
    with pytest.raises(Exception, match="40 tokens, and nothing says"):
        compiled(tokens(MORE), past_key_values=old)


def test_training_needs_no_cache(model):
    plain = logits(model, SHORT)
    with rope_patch.patch(model, "yarn", factor=4):
        model(tokens(SHORT), labels=tokens(SHORT)).loss.backward()
    model.zero_grad(set_to_none=True)
    assert logits(model, SHORT).equal(plain)
