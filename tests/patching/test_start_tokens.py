"""Test LongRoPE's start tokens: the first positions keep the rotation before the extension."""

import copy
import math

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers import reference_rerotation
from helpers.reference_rerotation import Reference
from helpers.tiny_models import (
    FACTOR,
    LONG,
    SHORT,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from start_token_models import OPTIONS, SCALE, START, one_layer, patched, rotary_of
from transformers import DynamicCache, StaticCache


def compute_cos_sin(positions, theta, rotary_dim, stretch, scale, start):
    """Compute cos and sin of each pair `[..., R / 2]` in float64, position by position."""
    cos, sin = [], []
    for position in positions.flatten().tolist():
        first = position < start
        angles = [
            position / theta ** (2 * i / rotary_dim) / (1.0 if first else stretch[i])
            for i in range(rotary_dim // 2)
        ]
        cos.append([math.cos(a) * (1.0 if first else scale) for a in angles])
        sin.append([math.sin(a) * (1.0 if first else scale) for a in angles])
    shape = (*positions.shape, rotary_dim // 2)
    return (torch.tensor(x, dtype=torch.float64).view(shape) for x in (cos, sin))


# Layout of each module's output: halves repeated, each number repeated, single, or complex.
LAYOUTS = {
    "llama": "halves",
    "qwen3": "halves",
    "phi": "halves",  # rotates a part of each head
    "gpt_neox": "halves",  # likewise
    "cohere": "neighbours",
    "glm": "halves",  # table in halves, pairs of neighbours
    "gpt_oss": "once",
    "llama4_text": "complex",
}


def arrange(layout, cos, sin):
    if layout == "halves":
        return tuple(torch.cat([x, x], dim=-1) for x in (cos, sin))
    if layout == "neighbours":
        return tuple(x.repeat_interleave(2, dim=-1) for x in (cos, sin))
    return (cos, sin) if layout == "once" else (torch.complex(cos, sin),)


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_rotary_module_output_matches_the_formula(architecture):
    model = tiny_model(architecture)
    rotary = rotary_of(model)
    pairs = len(rotary.inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    theta = config.rope_parameters["rope_theta"]
    patched(model, long_factor=stretch, short_factor=stretch, start="unscaled")
    positions = torch.tensor([[0, 1, 4, 5, 6, 200], [150, 5, 4, 3, 0, 77]])
    got = rotary(torch.zeros(2, 6, 4), positions)
    # gpt_oss has a scaling, and start="unscaled" goes back to the length before it.
    trained = config.rope_parameters.get("original_max_position_embeddings", TRAINED)
    scale = math.sqrt(1 + math.log(FACTOR) / math.log(trained))
    cos, sin = compute_cos_sin(positions, theta, 2 * pairs, stretch, scale, START)
    expected = arrange(LAYOUTS[architecture], cos, sin)
    got = got if isinstance(got, tuple) else (got,)
    for table, truth in zip(got, expected, strict=True):
        assert table.shape == truth.shape
        assert (table.to(truth.dtype) - truth).abs().max() < 2e-5


PAIRED = {"llama": "halves", "phi": "halves", "cohere": "neighbours", "glm": "neighbours"}


@pytest.mark.parametrize("architecture", PAIRED)
def test_attention_matches_the_formula(architecture):
    """Rotate the projections' queries and keys in float64, and compare attention weights."""
    model = tiny_model(architecture, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    pairs = len(rotary_of(model).inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    theta = model.config.rope_parameters["rope_theta"]
    patched(model, long_factor=stretch, short_factor=None)
    attention = model.base_model.layers[0].self_attn
    projections = {}
    for name in ("q_proj", "k_proj"):
        note = lambda module, args, out, name=name: projections.__setitem__(name, out)  # noqa: E731
        getattr(attention, name).register_forward_hook(note)
    ids = tokens(LONG)
    with torch.no_grad():
        got = model(ids, output_attentions=True, use_cache=False).attentions[0][0].double()
    q, k = (
        projections[name][0].double().view(LONG, -1, attention.head_dim).transpose(0, 1)
        for name in ("q_proj", "k_proj")
    )
    cos, sin = compute_cos_sin(torch.arange(LONG), theta, 2 * pairs, stretch, SCALE, START)

    def rotated(x):
        x = x.clone()
        for i in range(pairs):
            a, b = (2 * i, 2 * i + 1) if PAIRED[architecture] == "neighbours" else (i, i + pairs)
            first, second = x[..., a].clone(), x[..., b].clone()
            x[..., a] = first * cos[:, i] - second * sin[:, i]
            x[..., b] = first * sin[:, i] + second * cos[:, i]
        return x

    q, k = rotated(q), rotated(k).repeat_interleave(len(q) // len(k), dim=0)
    scores = q @ k.transpose(1, 2) * attention.scaling
    causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()
    expected = scores.masked_fill(~causal, -math.inf).softmax(-1)
    assert (got - expected).abs().max() < 2e-5
    # Without start tokens, attention differs.
    model = patched(model, 0, long_factor=stretch, short_factor=None)
    with torch.no_grad():
        plain = model(ids, output_attentions=True, use_cache=False).attentions[0][0].double()
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_start_tokens_keep_the_logits_bit_for_bit(family):
    model, ids = make_model(family), tokens(SHORT)
    expected = forward(model, ids)
    assert torch.equal(forward(patched(model, SHORT), ids), expected)
    assert not torch.equal(forward(patched(model, SHORT - 1), ids), expected)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_positions_after_the_start_tokens_have_plain_longrope(family, length):
    """Start tokens are those with small positions, whatever their index."""
    model, ids = make_model(family), tokens(length)
    positions = torch.arange(length)[None] + START
    expected = forward(patched(model, 0), ids, position_ids=positions)
    assert torch.equal(forward(patched(model), ids, position_ids=positions), expected)
    one_earlier = forward(model, ids, position_ids=positions - 1)
    assert not torch.equal(one_earlier, expected)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_sliding_layers_are_unchanged(length):
    model = make_model("gemma3")
    rotary = model.model.rotary_emb
    inputs = (torch.zeros(1, length, 4), torch.arange(length)[None])
    kinds = ("sliding_attention", "full_attention")
    plain = {kind: rotary(*inputs, kind) for kind in kinds}
    patched(model, 0)
    stretched = rotary(*inputs, "full_attention")
    patched(model)
    assert all(map(torch.equal, rotary(*inputs, "sliding_attention"), plain["sliding_attention"]))
    for table, before, after in zip(
        rotary(*inputs, layer_type="full_attention"),
        plain["full_attention"],
        stretched,
        strict=True,
    ):
        assert torch.equal(table[:, :START], before[:, :START])
        assert torch.equal(table[:, START:], after[:, START:])
        assert not torch.equal(table[:, :START], after[:, :START])


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_give_the_logits_of_single_rows(family, side):
    """Each row's start tokens come after its padding."""
    model = patched(make_model(family))
    rows = [tokens(SHORT, seed=2), tokens(LONG, seed=3), tokens(3, seed=4)]
    ids, mask = padded(rows, side)
    got = forward(model, ids, attention_mask=mask)
    for row, row_logits, slots in zip(rows, got, mask.bool(), strict=True):
        assert_close(row_logits[slots][None], forward(model, row))


def test_padded_rows_decode_like_single_rows():
    model = patched(make_model())
    rows = [tokens(TRAINED - 4, seed=2), tokens(20, seed=3)]
    rest = tokens(60, batch=2, seed=6)
    ids, mask = padded(rows, "left")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for i in range(rest.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            step = rest[:, i : i + 1]
            got = model(step, attention_mask=mask, past_key_values=cache).logits
    for i, row in enumerate(rows):
        whole = torch.cat([row, rest[i : i + 1]], dim=1)
        assert_close(got[i : i + 1], step_by_step(model, whole, row.shape[1])[:, -1:])


def test_every_document_of_a_packed_row_has_start_tokens():
    model = patched(one_layer())
    parts = [tokens(30, seed=2), tokens(20, seed=3)]
    positions = torch.cat([torch.arange(30), torch.arange(20)])[None]
    got = forward(model, torch.cat(parts, dim=1), position_ids=positions)
    for part, document_logits in zip(parts, got.split([30, 20], dim=1), strict=True):
        assert_close(document_logits, forward(model, part))


def test_generate_with_left_padding():
    model = patched(make_model(tie_word_embeddings=False, initializer_range=0.2))
    rows = [tokens(TRAINED - 10, seed=2), tokens(9, seed=3)]
    ids, mask = padded(rows, "left")
    options = {"max_new_tokens": 30, "do_sample": False}
    got = model.generate(ids, attention_mask=mask, **options)
    for row, generated in zip(rows, got, strict=True):
        single = model.generate(row, attention_mask=torch.ones_like(row), **options)
        assert torch.equal(generated[-30:], single[0, -30:])


# -- caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [2, SHORT, TRAINED, LONG])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_layer_decodes_as_without_a_cache(family, prompt):
    """Compare steps on both sides of the trained length with a forward of all tokens."""
    model, ids = patched(one_layer(family)), tokens(LONG + 5)
    got = step_by_step(model, ids, prompt)
    for length in (prompt + 1, SHORT + 3, TRAINED, TRAINED + 1, LONG + 5):
        if length > prompt:
            whole = forward(model, ids[:, :length])[:, -1]
            assert_close(got[:, length - 1], whole)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoding_matches_rotating_all_keys_afresh(family, monkeypatch):
    model, ids = make_model(family), tokens(LONG)
    plain = 1e4 ** (-torch.arange(8, dtype=torch.float32) / 8)
    rotate = reference_rerotation.rotate

    def rotate_with_start(x, positions, inv_freq, scale):
        is_start = (positions < START)[:, None, :, None]
        extended = rotate(x, positions, inv_freq, scale)
        return torch.where(is_start, rotate(x, positions, plain, 1.0), extended)

    reference = Reference(model, "longrope", options=OPTIONS)
    without = reference.decode(ids, SHORT)
    monkeypatch.setattr(reference_rerotation, "rotate", rotate_with_start)
    expected = reference.decode(ids, SHORT)
    assert_differs(without, expected)
    assert_close(step_by_step(patched(model), ids, SHORT), expected)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_rerotation_keeps_the_keys_of_start_tokens_bit_for_bit(kind):
    model, ids = patched(make_model()), tokens(TRAINED + 1)
    cache = kind(config=model.config, **({"max_cache_len": LONG} if kind is StaticCache else {}))
    with torch.no_grad():
        model(ids[:, :TRAINED], past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        model(ids[:, TRAINED:], past_key_values=cache)
    for old, layer in zip(before, cache.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :START], old[:, :, :START])
        changed = (layer.keys[:, :, START:TRAINED] != old[:, :, START:TRAINED]).any(-1).any(1)
        assert changed.all()


def test_only_rows_that_grow_are_rerotated():
    """One row passes the trained length; the start tokens of both rows keep their keys."""
    model = patched(make_model())
    rows = [tokens(TRAINED, seed=2), tokens(20, seed=3)]
    ids, mask = padded(rows, "left")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        model(tokens(1, batch=2), attention_mask=mask, past_key_values=cache)
    for old, layer in zip(before, cache.layers, strict=True):
        same = (layer.keys[:, :, :TRAINED] == old).all(-1).all(1)
        assert same[1].all()
        assert same[0].tolist() == [True] * START + [False] * (TRAINED - START)


def test_mixed_windows_switch_the_attention_factor_of_start_tokens():
    """Beyond the trained length, the attention factor applies to start tokens, too."""
    model = one_layer()
    plain, ids = copy.deepcopy(model), tokens(LONG)
    patched(model, method="mixed-longrope", short_factor=None)
    assert torch.equal(forward(model, ids[:, :TRAINED]), forward(plain, ids[:, :TRAINED]))
    got = step_by_step(model, ids, SHORT)
    for length in (TRAINED, TRAINED + 1, LONG):
        assert_close(got[:, length - 1], forward(model, ids[:, :length])[:, -1])
    expected = forward(patched(plain, short_factor=None), ids)
    assert_close(forward(model, ids), expected)
