"""Test caches of dynamically patched models: decoding stays right after any change to a cache."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from helpers.reference_rerotation import Reference
from helpers.releases import plain_transformers
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
CUT = 180  # the length at which the cache is changed


class Quantized(DynamicLayer):
    """A layer whose keys are no plain tensor, like those of transformers' quantized caches."""


@pytest.fixture
def model():
    """Return a patched model of two layers."""
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    return model


def truth(ids, family="llama"):
    return Reference(make_model(family), "dynamic-yarn").decode(ids, SHORT)


def fill_cache(model, ids, until=CUT):
    """Return a cache filled up to `until`, past the trained length and several growth steps."""
    cache = DynamicCache(config=model.config)
    step_by_step(model, ids[:, :until], SHORT, cache)
    return cache


def decode(model, ids, cache, start=CUT):
    return step_by_step(model, ids[:, start:], 1, cache)


# -- kinds of caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_static_cache_matches_the_reference(family):
    model, ids = make_model(family), tokens(END)
    rope_patch.patch(model, "dynamic-yarn")
    cache = StaticCache(config=model.config, max_cache_len=END + 20)
    assert_close(step_by_step(model, ids, SHORT, cache), truth(ids, family))


def test_reset_static_cache_gives_the_same_logits(model):
    ids = tokens(END)
    cache = StaticCache(config=model.config, max_cache_len=END)
    first = step_by_step(model, ids, SHORT, cache)
    cache.reset()
    assert step_by_step(model, ids, SHORT, cache).equal(first)


def test_early_initialized_static_cache(model):
    ids = tokens(END)
    cache = StaticCache(config=model.config, max_cache_len=END)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    assert_close(step_by_step(model, ids, SHORT, cache), truth(ids))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_scaled_sliding_windows_are_rerotated(kind):
    """Sliding layers cache only the last keys; growth must re-rotate these."""
    model, ids = make_model("gemma3"), tokens(LONG)
    rope_patch.patch(model, "dynamic-yarn", layer_types=["sliding_attention"])
    size = {"max_cache_len": LONG} if kind is StaticCache else {}
    cache = kind(config=model.config, **size)
    # Without a config a cache keeps all keys, and the mask hides those outside the window.
    whole = step_by_step(model, ids, SHORT, DynamicCache())
    assert_close(step_by_step(model, ids, SHORT, cache), whole)


def test_cache_without_a_config(model):
    ids = tokens(END)
    assert_close(step_by_step(model, ids, SHORT, DynamicCache()), truth(ids))


def test_cache_made_by_the_model(model):
    ids = tokens(LONG)
    with torch.no_grad():
        output = model(ids[:, :SHORT])
        got = step_by_step(model, ids[:, SHORT:], 1, output.past_key_values)
    assert_close(got, truth(ids)[:, SHORT:])


def test_offloaded_layers_are_rerotated(model):
    """Move layers to the CPU and back between steps, as transformers' offloading does."""
    ids = tokens(END)
    cache = fill_cache(model, ids)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


def test_decoding_continues_after_inference_mode(model):
    ids = tokens(END)
    with torch.inference_mode():
        cache = fill_cache(model, ids)
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


# -- changes to caches -----------------------------------------------------------------------------


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
def test_copied_cache_continues_independently(model, duplicate):
    """Copy a cache, as to save a conversation and continue it later."""
    ids = tokens(END)
    cache = fill_cache(model, ids)
    other = duplicate(cache)
    assert isinstance(other, DynamicCache)
    assert_close(decode(model, ids, other), truth(ids)[:, CUT:])
    assert cache.get_seq_length() == CUT
    assert_close(decode(model, ids, cache), truth(ids)[:, CUT:])


@pytest.mark.parametrize("cropped", [1, 20, CUT - SHORT])
def test_crop_restores_earlier_frequencies(model, cropped):
    """Crop a cache; at the trained length the frequencies are the unscaled ones again."""
    ids = tokens(END)
    cache = fill_cache(model, ids)
    cache.crop(-cropped if not OLD_TRANSFORMERS else CUT - cropped)
    got = decode(model, ids, cache, CUT - cropped)
    reference = Reference(make_model(), "dynamic-yarn")
    reference_cache = reference.new_cache()
    reference.decode(ids[:, :CUT], SHORT, reference_cache)
    reference_cache.crop(-cropped if not OLD_TRANSFORMERS else CUT - cropped)
    expected = reference.decode(ids[:, CUT - cropped :], 1, reference_cache)
    assert_close(got, expected)


def test_chunks_of_several_tokens_on_top_of_a_cache(model):
    """Read chunks on top of a cache, across the trained length and growth steps."""
    ids = tokens(END)
    reference = Reference(make_model(), "dynamic-yarn")
    cache, reference_cache = DynamicCache(config=model.config), reference.new_cache()
    with torch.no_grad():
        for chunk in ids.split([SHORT, 5, 60, 1, 100, END - SHORT - 166], dim=1):
            got = model(chunk, past_key_values=cache).logits
            assert_close(got, reference.model(chunk, past_key_values=reference_cache).logits)


def decode_batch(model, lengths, until):
    """Decode a left-padded batch of rows of different lengths, up to `until` slots."""
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
    return cache, continue_batch(model, cache, mask, positions, new[:, : until - max(lengths)]), new


def continue_batch(model, cache, mask, positions, new):
    with torch.no_grad():
        for step in range(new.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions + 1
            output = model(
                new[:, step : step + 1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            )
    return mask, positions, output.logits


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "beams of one": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1])), [1, 1, 1]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_moved_rows_keep_their_rotation(model, change):
    """Move rows of 20, 100 and 160 tokens, at different growth steps; then decode 60 tokens."""
    change_cache, order = CHANGES[change]
    cache, (mask, positions, _), new = decode_batch(model, (20, 100, 160), 170)
    expected = continue_batch(model, copy.deepcopy(cache), mask, positions, new[:, 10:70])[2]
    change_cache(cache)
    got = continue_batch(model, cache, mask[order], positions[order], new[order, 10:70])[2]
    assert_close(got, expected[order])


def test_another_patch_rerotates_an_old_cache(model):
    """Re-rotate keys from the frequencies of one method to those of another."""
    ids = tokens(END)
    shallow = make_model(num_hidden_layers=1)
    rope_patch.patch(shallow, "dynamic-yarn")
    cache = fill_cache(shallow, ids)
    rope_patch.patch(shallow, "dynamic-linear")
    assert_close(decode(shallow, ids, cache)[:, -1], forward(shallow, ids)[:, -1])


# -- refused caches --------------------------------------------------------------------------------


def test_cache_whose_keys_cannot_be_rerotated_is_refused(model):
    cache = Cache(layer_class_to_replicate=Quantized)
    with pytest.raises(ValueError, match=r"cannot be rotated again.*expected a DynamicCache"):
        model(tokens(SHORT), past_key_values=cache)
    assert len(cache) == 0


def test_transformers_own_quantized_cache_is_refused(model):
    with plain_transformers():  # up to 5.17, all need another package
        cache = transformers.QuantizedCache(backend="fp8", config=model.config)
    with pytest.raises(ValueError, match="keys of a QuantizedCache"):
        model(tokens(SHORT), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_fixed_length_allows_any_cache(model):
    ids = tokens(END)
    rope_patch.current(model).fix_length(END)
    cache = Cache(layer_class_to_replicate=Quantized)
    expected = step_by_step(model, ids, SHORT)
    assert step_by_step(model, ids, SHORT, cache).equal(expected)


def test_cache_of_unknown_rotation_is_refused(model):
    cache = DynamicCache(config=model.config)
    plain = make_model()
    with torch.no_grad():
        plain(tokens(SHORT), past_key_values=cache)
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match=r"40 tokens, and no record.*copy\.deepcopy"):
        model(tokens(1), past_key_values=cache)
    assert cache.layers[0].keys.equal(before)


def test_cache_with_unrecorded_rows_is_refused(model):
    cache = fill_cache(model, tokens(CUT))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1)
    with pytest.raises(ValueError, match="expected 1 rows of 180 tokens, got 2 rows"):
        model(tokens(1, batch=2), past_key_values=cache)


def test_cache_with_a_layer_of_no_known_layer_is_refused(model):
    """Its keys would keep the frequencies of the shorter text."""
    cache = fill_cache(model, tokens(TRAINED), TRAINED)
    cache.layers.append(copy.deepcopy(cache.layers[0]))
    with pytest.raises(ValueError, match=r"layer \d of the cache belongs to none"):
        model(tokens(1), past_key_values=cache)


def test_cache_of_other_layer_types_is_refused():
    model = make_model("gemma3")
    rope_patch.patch(model, "dynamic-yarn")
    cache = fill_cache(model, tokens(CUT))
    both = ["sliding_attention", "full_attention"]
    rope_patch.patch(model, "dynamic-yarn", layer_types=both)
    with pytest.raises(ValueError, match="other layer types"):
        model(tokens(1), past_key_values=cache)


# -- cost ------------------------------------------------------------------------------------------


def test_cache_record_grows_by_positions_only(model):
    def record_bytes(length):
        record = fill_cache(model, tokens(length), length).rotation
        return sum(
            t.numel() * t.element_size()
            for t in (record.positions, record.row_spans, record.frequencies)
        )

    assert record_bytes(160) - record_bytes(100) == 60 * 8  # one int64 a slot


def test_keys_are_rerotated_in_place(model):
    cache = fill_cache(model, tokens(CUT), TRAINED)
    layer = cache.layers[0]
    keys, before = layer.keys, layer.keys.clone()
    with torch.no_grad():
        model(tokens(1), past_key_values=cache)
    assert_differs(keys, before)


STRETCHES = {"factor": 4, "long_factor": LONG_FACTOR}


@pytest.mark.parametrize(
    ("family", "method", "first", "second"),
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
def test_cache_of_other_layers_or_start_tokens_is_refused(family, method, first, second):
    model, ids = make_model(family), tokens(TRAINED + 20)
    short = {} if method != "longrope" else {"short_factor": [1.0] * len(LONG_FACTOR)}
    cache = DynamicCache(config=model.config)
    rope_patch.patch(model, method, **first, **short)
    step_by_step(model, ids[:, :TRAINED], TRAINED, cache)
    rope_patch.patch(model, method, **second, **short)
    with pytest.raises(ValueError, match="other layer types, start tokens or frequencies"):
        step_by_step(model, ids[:, TRAINED:], 20, cache)
