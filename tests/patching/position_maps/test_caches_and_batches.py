"""Test position maps under caches, padding and packing: a row depends on nothing but itself."""

import copy
from functools import cache

import pytest
import torch
from helpers.growing_texts import positions_of, read_in_parts
from helpers.tiny_models import (
    LONG,
    TRAINED,
    forward,
    make_generator,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from helpers.written_out_maps import MAPS, written_out
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import rope_patch
from rope_patch.patching import ShiftRotation

# Keys that are turned, or not; groups that grow; several regions.
METHODS = {
    "rerope": {"window": 20},
    "jet-long": {"window": 16},
    "self-extend": {"window": 12},
    "dca": {},
    "string": {"on": "yarn:4"},
    "lampe": {},
}
# The last two turn queries and keys as others do, by other numbers.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in ("string", "lampe") else ())
    for name in METHODS
]
LENGTH, STEPS = 120, 16  # tokens, and how many of them are read one by one
IDS, OTHERS = tokens(LENGTH), tokens(LENGTH, seed=9)
ROWS = [tokens(length, seed=length) for length in (30, LENGTH, 90)]


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def patched(name, model=None):
    model = make_model() if model is None else model
    rope_patch.patch(model, name, **METHODS[name])
    return model


shared = cache(patched)  # for tests that leave the model as it is
whole = cache(lambda name: forward(shared(name), IDS))


def assert_rows_as_alone(model, logits, mask):
    for row, is_token, got in zip(ROWS, mask.bool(), logits, strict=True):
        close(got[is_token], forward(model, row)[0])


@pytest.mark.parametrize(
    ("name", "side", "implementation"),
    [
        *((name, "left", "sdpa") for name in METHODS),
        *((name, "right", "eager") for name in METHODS),
        # Inductor compiles a kernel; test_mapped_masks.py reads masks of this kind.
        pytest.param("self-extend", "left", "flex_attention", marks=pytest.mark.slow),
    ],
)
def test_padded_rows_are_as_they_are_alone(name, side, implementation):
    model = patched(name)
    model.set_attn_implementation(implementation)
    ids, mask = padded(ROWS, side)
    got = forward(model, ids, attention_mask=mask, position_ids=positions_of(mask))
    assert_rows_as_alone(model, got, mask)


@pytest.mark.parametrize("name", METHODS)
def test_padded_rows_decode_as_they_do_alone(name):
    model, (ids, mask) = shared(name), padded(ROWS, "left")
    cache = DynamicCache(config=model.config)
    got = read_in_parts(model, ids, [LENGTH - STEPS], cache, mask)
    assert_rows_as_alone(model, got, mask)


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "sdpa") for name in METHODS), ("self-extend", "eager")]
)
def test_packed_rows_are_as_they_are_alone(name, implementation):
    model = patched(name)
    model.set_attn_implementation(implementation)
    positions = torch.cat([torch.arange(row.shape[1]) for row in ROWS])[None]
    got = forward(model, torch.cat(ROWS, 1), position_ids=positions)
    for row, logits in zip(ROWS, got.split([row.shape[1] for row in ROWS], 1), strict=True):
        close(logits, forward(model, row))


@pytest.mark.parametrize("name", NAMES)
def test_static_caches_match_forwards_without_a_cache(name):
    cache = StaticCache(config=shared(name).config, max_cache_len=LENGTH + 20)
    close(step_by_step(shared(name), IDS, LENGTH - STEPS, cache), whole(name))


class RoundedLayer(QuantizedLayer):
    """A quantised layer of a cache, whose keys and values are rounded to eighths."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round()

    def _dequantize(self, tensor):
        return tensor / 8


@pytest.mark.parametrize("name", ["rerope", "self-extend"])
def test_far_keys_of_a_quantised_cache_are_the_quantised_ones(name):
    model = make_model()

    def rounded_cache():
        cache = DynamicCache()
        layers = model.config.num_hidden_layers
        cache.layers = [RoundedLayer(residual_length=8) for _ in range(layers)]
        return cache

    expected = step_by_step(written_out(model, name), IDS, LENGTH - STEPS, rounded_cache())
    rope_patch.patch(model, name, **MAPS[name][0])
    cache = rounded_cache()
    close(step_by_step(model, IDS, LENGTH - STEPS, cache), expected)
    assert not cache.rotation.turned  # no unquantised copy beside the quantised keys
    assert (expected - forward(model, IDS)).abs().max() > 1e-2


@pytest.mark.parametrize("name", METHODS)
def test_cropped_and_copied_caches_go_on_exactly(name):
    model, start = shared(name), LENGTH - 30
    cache = DynamicCache(config=model.config)
    other_ids = torch.cat([IDS[:, :start], OTHERS[:, start:]], 1)
    read_in_parts(model, other_ids, [start - 10, 10, 26], cache)
    for each in (cache, copy.deepcopy(cache)):
        each.crop(-30)  # the tokens behind are others: no turned copy of their keys may stay
        close(read_in_parts(model, IDS, [4, 18], each), whole(name)[:, start:])


@pytest.mark.parametrize("name", METHODS)
def test_reordered_rows_keep_their_keys(name):
    model, rows = shared(name), torch.cat([IDS, OTHERS])
    cache, start = DynamicCache(config=model.config), LENGTH - STEPS
    step_by_step(model, rows[:, :start], start - 10, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = read_in_parts(model, rows[[1, 0]], [], cache)
    close(got, forward(model, rows)[[1, 0], start:])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in METHODS),
        *((name, {"num_beams": 3}) for name in ("rerope", "jet-long")),
        *((name, {"cache_implementation": "static"}) for name in ("rerope", "jet-long")),
    ],
)
def test_generate_continues_as_whole_forwards_do(name, options):
    model, settings = (
        patched(name, make_generator("llama")),
        {"max_new_tokens": 12, "do_sample": False} | options,
    )
    got = model.generate(tokens(60), **settings)
    if "num_beams" not in options:
        assert torch.equal(got[:, 60:], forward(model, got[:, :-1])[:, 59:].argmax(-1))
    assert torch.equal(got, model.generate(tokens(60), use_cache=False, **settings))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_mapped_attention(name):
    """Derivatives of the mapped attention agree with differences of its output."""
    model, ids = patched(name).double(), tokens(100)
    embeddings = model.get_input_embeddings()(ids).detach()
    direction = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(3)).double()

    def loss(step):
        return model(inputs_embeds=embeddings + step * direction).logits.square().mean()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss(step).backward()
    with torch.no_grad():
        difference = (loss(1e-4) - loss(-1e-4)) / 2e-4  # norms compute in float32
    assert step.grad.abs() > 1e-3
    torch.testing.assert_close(step.grad, difference, rtol=3e-3, atol=1e-4)


def test_gradient_checkpointing_recomputes_the_same():
    model, ids = patched("rerope"), tokens(100)
    model.train()
    gradients = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    close(gradients[0], gradients[1], 1e-6)


def test_eager_attention_returns_weights():
    model, ids = patched("rerope"), tokens(100)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    assert [tuple(each.shape) for each in weights] == [(1, 4, 100, 100)] * 2
    close(weights[0].sum(-1), torch.ones(1, 4, 100))
    assert weights[0].triu(1).abs().max() == 0


@torch.no_grad()
def test_caches_of_other_rotations_are_refused():
    model, ids = make_model(), tokens(100)
    plain, mapped = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, past_key_values=plain)
    rope_patch.patch(model, "rerope")
    with pytest.raises(ValueError, match="no record"):
        model(ids[:, :1], past_key_values=plain)
    model(ids, past_key_values=mapped)
    rope_patch.patch(model, "rerope", on="linear:2")
    with pytest.raises(ValueError, match="other layer types, start tokens or frequencies"):
        model(ids[:, :1], past_key_values=mapped)


def test_mapped_and_unmapped_patches_replace_each_other():
    model, ids = make_model(), tokens(2 * TRAINED)
    plain = forward(model, ids)
    with rope_patch.patch(model, "rerope"):
        mapped = forward(model, ids)
        with rope_patch.patch(model, "yarn", factor=2):
            assert (forward(model, ids) - mapped).abs().max() > 1e-2
        assert torch.equal(forward(model, ids), mapped)
    assert torch.equal(forward(model, ids), plain)


@torch.no_grad()
def test_a_mask_may_hide_tokens_that_were_seen_before():
    model, ids = patched("rerope"), tokens(110)
    masks = [torch.ones(1, 100, dtype=torch.long), torch.ones(1, 110, dtype=torch.long)]
    masks[1][:, 40:60] = 0
    results = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config)
        model(ids[:, :100], attention_mask=masks[0], past_key_values=cache)
        positions = torch.arange(100, 110)[None]
        options = {"attention_mask": masks[1], "position_ids": positions}
        hidden = model(ids[:, 100:], past_key_values=copy.deepcopy(cache), **options).logits
        seen = model(ids[:, 100:], past_key_values=cache).logits
        assert (hidden - seen).abs().max() > 1e-2
        results.append(hidden)
    close(*results)


@pytest.mark.parametrize("padding", [0, 3])
def test_accept_cache_tells_a_map_the_positions_of_a_rebuilt_cache(padding):
    model, ids = make_model(), tokens(LONG)
    handle = rope_patch.patch(model, "self-extend")
    expected = forward(model, ids)[:, -1:]
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    rebuilt = DynamicCache([tuple(pad(x, (0, 0, padding, 0)) for x in pair) for pair in states])
    mask = torch.ones(1, LONG + padding, dtype=torch.long)
    mask[:, :padding] = 0
    arguments = {"attention_mask": mask, "position_ids": torch.tensor([[LONG - 1]])}
    with pytest.raises(ValueError, match="no record"):
        model(ids[:, -1:], past_key_values=rebuilt, **arguments)
    places = torch.arange(LONG - 1 + padding)[None] - padding
    with pytest.raises(ValueError, match=r"1 rows of \d+ tokens.*\[1, 2\]"):
        handle.accept_cache(rebuilt, places[:, :2])
    handle.accept_cache(rebuilt, places.clamp(min=-1) if padding else None)
    with torch.no_grad():
        got = model(ids[:, -1:], past_key_values=rebuilt, **arguments).logits
    close(got, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_accept_cache_takes_static_caches_and_empty_ones(family):
    model, ids = make_model(family), tokens(LONG)
    handle = rope_patch.patch(model, "self-extend")
    expected = forward(model, ids)[:, -1:]
    cache = StaticCache(config=model.config, max_cache_len=LONG + 5)
    handle.accept_cache(cache)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        cache.rotation = None
        handle.accept_cache(cache)
        got = model(ids[:, -1:], past_key_values=cache).logits
    close(got, expected)


@pytest.mark.parametrize("name", ["rerope", "leaky-rerope"])
def test_each_key_is_turned_once_over_a_prompt_and_its_steps(name, monkeypatch):
    model, ids = make_model("llama"), tokens(LONG)
    rope_patch.patch(model, name)
    turned, turn = [], ShiftRotation.turn

    def count(self, x, tables):
        turned.append(tuple(x.shape))
        return turn(self, x, tables)

    monkeypatch.setattr(ShiftRotation, "turn", count)
    step_by_step(model, ids, LONG - 30)
    key_heads = model.config.num_key_value_heads
    keys = sum(shape[2] for shape in turned if shape[1] == key_heads)
    assert key_heads != model.config.num_attention_heads
    assert keys <= LONG * model.config.num_hidden_layers


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad,) * 2])
@pytest.mark.parametrize("name", ["rerope", "jet-long"])
def test_steps_may_leave_the_inference_mode_of_the_prompt(name, modes):
    """Turned keys are kept, and steps turn more, as tokens leave the window."""
    model, ids = patched(name), tokens(LONG)
    prompt, steps = modes
    cache = DynamicCache()
    with prompt():
        parts = [model(ids[:, :-50], past_key_values=cache).logits.clone()]
    with steps():
        parts += [model(part, past_key_values=cache).logits for part in ids[:, -50:].split(5, 1)]
    close(torch.cat(parts, 1), forward(model, ids))
