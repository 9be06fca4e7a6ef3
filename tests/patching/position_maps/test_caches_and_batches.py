"""Test position maps under caches, padding and packing: a row depends on nothing but itself."""

import copy

import pytest
import torch
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
from rope_patch.patching.position_maps.shift_tables import ShiftRotation

# Keys that are turned, or not; groups that grow; several regions.
METHODS = {
    "rerope": {"window": 20},
    "jet-long": {"window": 16},
    "self-extend": {"window": 12},
    "dca": {},
    "string": {"on": "yarn:4"},
    "lampe": {},
}


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def patched(name, make=make_model, **changes):
    model = make(**changes)
    rope_patch.patch(model, name, **METHODS[name])
    return model


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", METHODS)
def test_padded_rows_are_as_they_are_alone(name, side, implementation):
    model = patched(name)
    model.set_attn_implementation(implementation)
    rows = [tokens(length, seed=length) for length in (30, 150, 90)]
    ids, mask = padded(rows, side)
    got = forward(model, ids, attention_mask=mask, position_ids=positions_of(mask))
    for row, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        close(logits[is_token], forward(model, row)[0])


@pytest.mark.parametrize("name", METHODS)
def test_padded_rows_decode_as_they_do_alone(name):
    model = patched(name)
    rows = [tokens(length, seed=length) for length in (60, 150, 90)]
    ids, mask = padded(rows, "left")
    cache, parts = DynamicCache(config=model.config), []
    prompt = 120
    for start, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, 150))]:
        positions = positions_of(mask)[:, start:stop]
        with torch.no_grad():
            parts.append(
                model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions,
                    past_key_values=cache,
                ).logits
            )
    got = torch.cat(parts, 1)
    for row, is_token, logits in zip(rows, mask.bool(), got, strict=True):
        close(logits[is_token], forward(model, row)[0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", METHODS)
def test_packed_rows_are_as_they_are_alone(name, implementation):
    model = patched(name)
    model.set_attn_implementation(implementation)
    texts = [tokens(length, seed=length) for length in (100, 30, 80)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    got = forward(model, torch.cat(texts, 1), position_ids=positions)
    for text, logits in zip(texts, got.split([text.shape[1] for text in texts], 1), strict=True):
        close(logits, forward(model, text))


@pytest.mark.parametrize("name", METHODS)
def test_static_caches_match_dynamic_ones(name):
    model, ids = patched(name), tokens(150)
    expected = forward(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=170)
    close(step_by_step(model, ids, 100, cache), expected)


class RoundedLayer(QuantizedLayer):
    """A quantised layer of a cache, whose keys and values are rounded to eighths."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round()

    def _dequantize(self, tensor):
        return tensor / 8


@pytest.mark.parametrize("name", ["rerope", "self-extend"])
@torch.no_grad()
def test_far_keys_of_a_quantised_cache_are_the_quantised_ones(name):
    model, ids = make_model("llama"), tokens(LONG)
    layers = model.config.num_hidden_layers

    def steps(model, cache, after=100):
        return step_by_step(model, ids[:, cache.get_seq_length() :], after, cache)

    def rounded_cache():
        cache = DynamicCache()
        cache.layers = [RoundedLayer(residual_length=8) for _ in range(layers)]
        return cache

    twin = written_out(model, name)
    expected = steps(twin, rounded_cache())
    rope_patch.patch(model, name, **MAPS[name][0])
    cache = rounded_cache()
    close(steps(model, cache), expected)
    assert not cache.rotation.turned  # no unquantised copy beside the quantised keys
    assert (expected - forward(model, ids)).abs().max() > 1e-2


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_cropped_and_copied_caches_go_on_exactly(name):
    model, ids, other = patched(name), tokens(150), tokens(150, seed=9)
    expected = forward(model, ids)
    cache = DynamicCache(config=model.config)
    step_by_step(model, torch.cat([ids[:, :90], other[:, 90:]], 1), 80, cache)
    again = copy.deepcopy(cache)
    for each in (cache, again):
        each.crop(-60)  # the tokens behind are others: no turned copy of their keys may stay
        got = [model(token, past_key_values=each).logits for token in ids[:, 90:].split(1, 1)]
        close(torch.cat(got, 1), expected[:, 90:])


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_reordered_rows_keep_their_keys(name):
    model, rows = patched(name), torch.cat([tokens(150), tokens(150, seed=9)])
    expected = forward(model, rows)
    cache = DynamicCache(config=model.config)
    step_by_step(model, rows[:, :120], 100, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = [model(token, past_key_values=cache).logits for token in rows[[1, 0], 120:].split(1, 1)]
    close(torch.cat(got, 1), expected[[1, 0], 120:])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", METHODS)
def test_generate_continues_as_whole_forwards_do(name, options):
    model, ids = patched(name, make_generator, family="llama"), tokens(60)
    got = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
    if "num_beams" not in options:
        expected = forward(model, got[:, :-1])[:, 59:].argmax(-1)
        assert torch.equal(got[:, 60:], expected)
    without = model.generate(ids, max_new_tokens=40, do_sample=False, use_cache=False, **options)
    assert torch.equal(got, without)


def test_assisted_decoding_gives_the_same_tokens():
    model, draft = (patched("jet-long", make_generator, family="llama") for _ in range(2))
    ids = tokens(60)
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    got = model.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=draft)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", METHODS)
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


def test_caches_of_other_rotations_are_refused():
    model, ids = make_model(), tokens(100)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    rope_patch.patch(model, "rerope")
    with pytest.raises(ValueError, match="no record of how their keys were rotated"):
        model(ids[:, :1], past_key_values=cache)
    mapped = DynamicCache(config=model.config)
    with torch.no_grad():
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
    with pytest.raises(ValueError, match="no record of how their keys were rotated"):
        model(ids[:, -1:], past_key_values=rebuilt, **arguments)
    places = torch.arange(LONG - 1 + padding)[None] - padding
    with pytest.raises(ValueError, match=r"1 rows of \d+ tokens, got a tensor of shape \[1, 2\]"):
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
    cache, prompt = DynamicCache(config=model.config), LONG - 30
    with torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache)
        for position in range(prompt, LONG):
            model(ids[:, position : position + 1], past_key_values=cache)
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
