"""Caches of a dynamically patched model: whatever is done to one, decoding goes on right."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from helpers.reference_rerotation import Reference
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    make_model,
    step_by_step,
    tokens,
)
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

import rope_patch

END = 300
CUT = 180  # where something happens to the cache, on the way to END


class Quantized(DynamicLayer):
    """A layer whose keys are not at hand as a tensor, as in transformers' quantized caches."""


@pytest.fixture
def model():
    """A patched model of two layers."""
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    return model


def truth(ids, family="llama"):
    return Reference(make_model(family), "dynamic-yarn").decode(ids, SHORT)


def filled(model, ids, until=CUT):
    """Return a cache filled up to `until`, past the trained length and some steps of growth."""
    cache = DynamicCache(config=model.config)
    step_by_step(model, ids[:, :until], SHORT, cache)
    return cache


def decode(model, ids, cache, start=CUT):
    return step_by_step(model, ids[:, start:], 1, cache)


# -- kinds of caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_static_cache(family):
    model, ids = make_model(family), tokens(END)
    rope_patch.patch(model, "dynamic-yarn")
    cache = StaticCache(config=model.config, max_cache_len=END + 20)
    assert_close(step_by_step(model, ids, SHORT, cache), truth(ids, family))


def test_a_static_cache_is_used_again(model):
    ids = tokens(END)
    cache = StaticCache(config=model.config, max_cache_len=END)
    first = step_by_step(model, ids, SHORT, cache)
    cache.reset()
    assert step_by_step(model, ids, SHORT, cache).equal(first)


def test_a_static_cache_made_beforehand(model):
    ids = tokens(END)
    cache = StaticCache(config=model.config, max_cache_len=END)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    assert_close(step_by_step(model, ids, SHORT, cache), truth(ids))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_sliding_windows_that_are_scaled_too(kind):
    """Their layers keep only the last keys, and those have to follow."""
    model, ids = make_model("gemma3"), tokens(LONG)
    rope_patch.patch(model, "dynamic-yarn", layer_types=["sliding_attention"])
    size = {"max_cache_len": LONG} if kind is StaticCache else {}
    cache = kind(config=model.config, **size)
    # Without a config a cache keeps all keys, and the mask hides what left the window.
    whole = step_by_step(model, ids, SHORT, DynamicCache())
    assert_close(step_by_step(model, ids, SHORT, cache), whole)


def test_a_cache_without_a_config(model):
    ids = tokens(END)
    assert_close(step_by_step(model, ids, SHORT, DynamicCache()), truth(ids))


def test_a_cache_that_the_model_made_itself(model):
    ids = tokens(LONG)
    with torch.no_grad():
        said = model(ids[:, :SHORT])
        got = step_by_step(model, ids[:, SHORT:], 1, said.past_key_values)
    assert_close(got, truth(ids)[:, SHORT:])


def test_offloaded_layers_are_turned_where_they_are(model):
    """Layers move to the CPU and back between steps, as transformers' offloading has them."""
    ids = tokens(END)
    cache = filled(model, ids)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


def test_inference_mode_may_end_in_between(model):
    ids = tokens(END)
    with torch.inference_mode():
        cache = filled(model, ids)
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


# -- what is done to caches ------------------------------------------------------------------------


def by_deepcopy(cache):
    return copy.deepcopy(cache)


def by_pickle(cache):
    return pickle.loads(pickle.dumps(cache))


def by_file(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [by_deepcopy, by_pickle, by_file])
def test_a_copy_goes_on_by_itself(model, duplicate):
    """As when a conversation is saved and continued later."""
    ids = tokens(END)
    cache = filled(model, ids)
    other = duplicate(cache)
    assert isinstance(other, DynamicCache)
    assert_close(decode(model, ids, other), truth(ids)[:, CUT:])
    assert cache.get_seq_length() == CUT
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


@pytest.mark.parametrize("back", [1, 20, CUT - SHORT])
def test_cropping_takes_the_frequencies_back(model, back):
    """Down to the unscaled ones, if that is where the length goes."""
    ids = tokens(END)
    cache = filled(model, ids)
    cache.crop(-back if not OLD_TRANSFORMERS else CUT - back)
    got = decode(model, ids, cache, CUT - back)
    reference = Reference(make_model(), "dynamic-yarn")
    kept = reference.new_cache()
    reference.decode(ids[:, :CUT], SHORT, kept)
    kept.crop(-back if not OLD_TRANSFORMERS else CUT - back)
    expected = reference.decode(ids[:, CUT - back :], 1, kept)
    assert_close(got, expected)


def test_a_longer_turn_of_a_conversation(model):
    """Several tokens at once on top of a cache, across the trained length and steps."""
    ids = tokens(END)
    reference = Reference(make_model(), "dynamic-yarn")
    cache, kept = DynamicCache(config=model.config), reference.new_cache()
    with torch.no_grad():
        for turn in ids.split([SHORT, 5, 60, 1, 100, END - SHORT - 166], dim=1):
            got = model(turn, past_key_values=cache).logits
            assert_close(got, reference.model(turn, past_key_values=kept).logits)


def batch_of(model, lengths, until):
    """Decode a batch of rows, which start after different padding, up to `until` slots."""
    rows = [tokens(length, seed=length) for length in lengths]
    new = tokens(END, batch=len(rows), seed=5)
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row, 1
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    positions = positions[:, -1:]
    return cache, go_on(model, cache, mask, positions, new[:, : until - max(lengths)]), new


def go_on(model, cache, mask, positions, new):
    with torch.no_grad():
        for step in range(new.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions + 1
            said = model(
                new[:, step : step + 1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            )
    return mask, positions, said.logits


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "beams of one": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_are_moved_take_their_rotation_along(model, change):
    """Rows of 20, 100 and 160 tokens, each on another step of growth, then 60 tokens more."""
    act, order = CHANGES[change]
    cache, (mask, positions, _), new = batch_of(model, (20, 100, 160), 170)
    expected = go_on(model, copy.deepcopy(cache), mask, positions, new[:, 10:70])[2]
    act(cache)
    got = go_on(model, cache, mask[order], positions[order], new[order, 10:70])[2]
    assert_close(got, expected[order])


def test_another_patch_takes_a_cache_over(model):
    """Keys go from the frequencies of one method to those of the other."""
    ids = tokens(END)
    shallow = make_model(num_hidden_layers=1)
    rope_patch.patch(shallow, "dynamic-yarn")
    cache = filled(shallow, ids)
    rope_patch.patch(shallow, "dynamic-linear")
    assert_close(decode(shallow, ids, cache)[:, -1], forward(shallow, ids)[:, -1])


# -- what is refused, before any harm --------------------------------------------------------------


def test_a_cache_whose_keys_cannot_be_turned_is_refused(model):
    cache = Cache(layer_class_to_replicate=Quantized)
    with pytest.raises(ValueError, match=r"cannot be rotated again.*expected a DynamicCache"):
        model(tokens(SHORT), past_key_values=cache)
    assert len(cache) == 0


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="its quantized caches need other packages")
def test_transformers_own_quantized_cache_is_refused(model):
    cache = transformers.QuantizedCache(backend="fp8", config=model.config)
    with pytest.raises(ValueError, match="keys of a QuantizedCache"):
        model(tokens(SHORT), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_with_a_fixed_length_any_cache_will_do(model):
    ids = tokens(END)
    rope_patch.current(model).fix_length(END)
    cache = Cache(layer_class_to_replicate=Quantized)
    expected = step_by_step(model, ids, SHORT)
    assert step_by_step(model, ids, SHORT, cache).equal(expected)


def test_a_cache_of_unknown_rotation_is_refused(model):
    cache = DynamicCache(config=model.config)
    plain = make_model()
    with torch.no_grad():
        plain(tokens(SHORT), past_key_values=cache)
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match=r"40 tokens, and no record.*copy\.deepcopy"):
        model(tokens(1), past_key_values=cache)
    assert cache.layers[0].keys.equal(before)


def test_a_cache_changed_behind_the_back_is_refused(model):
    cache = filled(model, tokens(CUT))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1)
    with pytest.raises(ValueError, match="expected 1 rows of 180 tokens, got 2 rows"):
        model(tokens(1, batch=2), past_key_values=cache)


def test_a_cache_of_other_layer_types_is_refused():
    model = make_model("gemma3")
    rope_patch.patch(model, "dynamic-yarn")
    cache = filled(model, tokens(CUT))
    both = ["sliding_attention", "full_attention"]
    rope_patch.patch(model, "dynamic-yarn", layer_types=both)
    with pytest.raises(ValueError, match="other layer types"):
        model(tokens(1), past_key_values=cache)


# -- what it costs ---------------------------------------------------------------------------------


def test_a_cache_keeps_positions_and_nothing_else_that_grows(model):
    def beside(length):
        record = filled(model, tokens(length), length).rotation
        return sum(
            t.numel() * t.element_size()
            for t in (record.positions, record.row_spans, record.frequencies)
        )

    assert beside(160) - beside(100) == 60 * 8  # one int64 a slot


def test_keys_are_turned_in_place(model):
    cache = filled(model, tokens(CUT), TRAINED)
    layer = cache.layers[0]
    kept, before = layer.keys, layer.keys.clone()
    with torch.no_grad():
        model(tokens(1), past_key_values=cache)
    assert_differs(kept, before)


STRETCHES = {"factor": 4, "long_factor": LONG_FACTOR}


@pytest.mark.parametrize(
    ("family", "method", "first", "then"),
    [
        (
            "gemma3",
            "dynamic-yarn",
            {"layer_types": ["sliding_attention"]},
            {"layer_types": ["full_attention"]},
        ),
        ("llama", "longrope", {**STRETCHES, "start_tokens": 4}, STRETCHES),
    ],
)
def test_keys_of_other_layers_or_start_tokens_are_refused(family, method, first, then):
    model, ids = make_model(family), tokens(TRAINED + 20)
    short = {} if method != "longrope" else {"short_factor": [1.0] * len(LONG_FACTOR)}
    cache = DynamicCache(config=model.config)
    rope_patch.patch(model, method, **first, **short)
    step_by_step(model, ids[:, :TRAINED], TRAINED, cache)
    rope_patch.patch(model, method, **then, **short)
    with pytest.raises(ValueError, match="other layer types or start tokens"):
        step_by_step(model, ids[:, TRAINED:], 20, cache)
