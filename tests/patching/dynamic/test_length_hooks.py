"""Frequencies that follow the sequence, held against rotating every key afresh."""

import pytest
import torch
from helpers.reference_rerotation import Reference, exact, stepped
from helpers.tiny_models import (
    LONG,
    LONG_FACTOR,
    OLD_TRANSFORMERS,
    SHORT,
    SHORT_FACTOR,
    TARGET,
    TRAINED,
    assert_close,
    assert_differs,
    forward,
    logits,
    make_config,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from transformers import DynamicCache, StaticCache

import rope_patch
from rope_patch.methods import registered_methods
from rope_patch.patching.dynamic import hooks

LONGROPE = {"factor": 4, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
SHAPES = ["llama", "qwen3", "gemma3", "phi3"]
DYNAMIC = ["dynamic", "dynamic-linear", "dynamic-yarn", "dynamic-ntk-by-parts"]
END = 300  # past the trained length by 10 steps of growth


# -- the truth: at every step, all keys under the current frequencies ------------------------------


@pytest.mark.parametrize("method", [*DYNAMIC, "longrope"])
@pytest.mark.parametrize("family", SHAPES)
def test_decoding_is_as_if_all_keys_were_rotated_afresh(family, method):
    options = LONGROPE if method == "longrope" else {}
    model, ids = make_model(family), tokens(END)
    reference = Reference(model, method, options=options)
    rope_patch.patch(model, method, **options)
    assert_close(step_by_step(model, ids, SHORT), reference.decode(ids, SHORT))


@pytest.mark.parametrize("family", SHAPES)
def test_exact_growth_follows_every_token(family):
    model, ids = make_model(family), tokens(LONG)
    reference = Reference(model, "dynamic-yarn", exact)
    rope_patch.patch(model, "dynamic-yarn", growth="exact")
    assert_close(step_by_step(model, ids, SHORT), reference.decode(ids, SHORT))
    assert_differs(
        reference.decode(ids, SHORT), Reference(model, "dynamic-yarn").decode(ids, SHORT)
    )


@pytest.mark.parametrize("prompt", [SHORT, TRAINED - 1, TRAINED, TRAINED + 1, LONG])
def test_prompts_of_any_length_start_right(prompt):
    model, ids = make_model(), tokens(LONG + 40)
    reference = Reference(model, "dynamic-yarn")
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(step_by_step(model, ids, prompt), reference.decode(ids, prompt))


def test_stale_keys_would_be_seen():
    """What transformers does: each key stays as it was rotated when it came."""
    model, ids = make_model(), tokens(END)
    truth = Reference(model, "dynamic").decode(ids, SHORT)
    config = make_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0})
    native = make_model(config=config)
    native.load_state_dict(model.state_dict())
    assert_differs(step_by_step(native, ids, SHORT), truth)


def test_in_one_layer_a_cache_changes_nothing_at_all():
    """Hidden states of old tokens keep the scale they had; with one layer there are none."""
    model, ids = make_model(num_hidden_layers=1), tokens(END)
    rope_patch.patch(model, "dynamic-yarn")
    assert_close(step_by_step(model, ids, SHORT)[:, -1], forward(model, ids)[:, -1])


def test_every_dynamic_method_decodes_right_in_one_layer():
    names = [name for name, method in registered_methods().items() if method.is_dynamic]
    assert set(DYNAMIC) < set(names)
    for name in names:
        model, ids = make_model(num_hidden_layers=1), tokens(END)
        plain = forward(model, ids)
        with rope_patch.patch(model, name):
            assert_close(step_by_step(model, ids, SHORT)[:, -1], forward(model, ids)[:, -1])
            assert_differs(forward(model, ids), plain)


# -- up to the trained length: the unpatched model -------------------------------------------------


@pytest.mark.parametrize("method", DYNAMIC)
@pytest.mark.parametrize("family", SHAPES)
def test_up_to_the_trained_length_nothing_changes_bit_for_bit(family, method):
    model = make_model(family)
    plain = [logits(model, length) for length in (SHORT, TRAINED, LONG)]
    cached = step_by_step(model, tokens(TRAINED), SHORT)
    handle = rope_patch.patch(model, method)
    assert_differs(logits(model, LONG), plain[2])
    assert logits(model, SHORT).equal(plain[0])
    assert logits(model, TRAINED).equal(plain[1])
    assert step_by_step(model, tokens(TRAINED), SHORT).equal(cached)
    handle.undo()
    assert logits(model, LONG).equal(plain[2])


def test_a_patch_on_a_rounded_buffer_is_exact_up_to_the_trained_length():
    model = make_model()
    plain = logits(model, TRAINED)
    model.model.rotary_emb.to(torch.bfloat16)
    rope_patch.patch(model, "dynamic-yarn")
    assert logits(model, TRAINED).equal(plain)


# -- rows are alone --------------------------------------------------------------------------------

ROWS = [tokens(length, seed=length) for length in (30, 200, 90)]


@pytest.mark.parametrize("method", ["dynamic-yarn", "longrope"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_row_is_as_it_is_alone(family, side, method):
    options = LONGROPE if method == "longrope" else {}
    model = make_model(family)
    rope_patch.patch(model, method, **options)
    ids, mask = padded(ROWS, side)
    together = forward(model, ids, attention_mask=mask)
    for row, got, here in zip(ROWS, together, mask.bool(), strict=True):
        assert_close(got[here], forward(model, row)[0])


@pytest.mark.parametrize("family", SHAPES)
def test_padded_rows_decode_as_they_do_alone(family):
    """Rows that pass the trained length and the steps beyond it at different times."""
    model = make_model(family)
    new = tokens(60, batch=len(ROWS), seed=7)
    alone = [
        Reference(model, "dynamic-yarn").decode(torch.cat([row, more[None]], 1), row.shape[1])
        for row, more in zip(ROWS, new, strict=True)
    ]
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded(ROWS, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for step in range(new.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
            got = model(
                new[:, step : step + 1],
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            ).logits
            for row, expected in zip(got, alone, strict=True):
                assert_close(row[0], expected[0, step - new.shape[1]])


def test_earlier_calls_change_nothing():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    fresh = logits(model, LONG)
    for length in (TARGET, SHORT, TRAINED + 1):
        logits(model, length)
        assert logits(model, LONG).equal(fresh)


def test_two_conversations_take_turns():
    model, ids, others = make_model(), tokens(LONG), tokens(LONG, seed=9)
    rope_patch.patch(model, "dynamic-yarn")
    alone = step_by_step(model, ids, SHORT)
    mine, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        got = [model(ids[:, :SHORT], past_key_values=mine).logits]
        model(others[:, :100], past_key_values=theirs)
        for i in range(SHORT, LONG):
            got.append(model(ids[:, i : i + 1], past_key_values=mine).logits)
            if i + 60 < LONG:
                model(others[:, i + 60 : i + 61], past_key_values=theirs)
    assert torch.cat(got, dim=1).equal(alone)


def test_the_longest_document_of_a_packed_row_counts():
    """Positions start anew with each document: the frequencies are those of the longest one."""
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    first, second = tokens(100), tokens(50, seed=3)
    positions = torch.cat([torch.arange(100), torch.arange(50)])[None]
    packed = forward(model, torch.cat([first, second], 1), position_ids=positions)
    assert_close(packed[:, :100], forward(model, first))


def test_a_packed_row_decodes_on():
    model, ids = make_model(num_hidden_layers=1), tokens(TRAINED + 60)
    rope_patch.patch(model, "dynamic-yarn")
    positions = torch.cat([torch.arange(TRAINED - 10), torch.arange(70)])[None]
    cache = DynamicCache(config=model.config)
    start = TRAINED + 40
    with torch.no_grad():
        model(ids[:, :start], position_ids=positions[:, :start], past_key_values=cache)
        for i in range(start, TRAINED + 60):
            got = model(
                ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache
            ).logits
    mask = torch.ones(1, 1, TRAINED + 60, TRAINED + 60, dtype=torch.bool).tril()  # no boundaries
    whole = forward(model, ids, position_ids=positions, attention_mask=mask)
    assert cache.rotation.row_spans[0, 2] > TRAINED
    assert_close(got[:, -1], whole[:, -1])


def test_distances_count_not_positions():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    shifted = forward(model, tokens(LONG), position_ids=torch.arange(LONG)[None] + 1000)
    torch.testing.assert_close(shifted, logits(model, LONG), rtol=0, atol=2e-3)


def test_an_empty_row_harms_nobody():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded([tokens(LONG), tokens(LONG)[:, :0]], "right")
    assert_close(forward(model, ids, attention_mask=mask)[:1], logits(model, LONG))


# -- the rotary module by itself -------------------------------------------------------------------


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="its rotary module takes no rows")
def test_frequencies_are_per_row_only_where_rows_differ():
    model = make_model()
    rotary, seen = model.model.rotary_emb, []
    resting = rotary.inv_freq
    handle = rope_patch.patch(model, "dynamic-yarn")
    rotary.register_forward_pre_hook(lambda module, _: seen.append(module.inv_freq))
    ids, mask = padded(ROWS, "right")
    forward(model, ids, attention_mask=mask)
    forward(model, ids)
    expected = [handle.frequencies_at(row.shape[1])[None].inv_freq.float() for row in ROWS]
    assert seen[0].equal(torch.stack(expected)[:, None])  # [3, 1, 8]
    assert seen[1].equal(expected[1])  # [8]: without a mask all rows are as long as the longest
    # What other processes, which have other rows, would be handed.
    assert rotary.inv_freq.equal(resting)


@pytest.mark.parametrize("length", [SHORT, TRAINED, TRAINED + 1, 100, TARGET])
def test_a_rotary_module_called_by_itself_goes_by_its_positions(length):
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    logits(model, LONG)
    cos, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    factor = stepped(length, TRAINED)
    expected = rope_patch.frequencies(
        "yarn", head_dim=16, theta=1e4, trained_length=TRAINED, factor=factor
    )
    angle = torch.arange(length)[:, None] * expected.inv_freq
    torch.testing.assert_close(
        cos[0, :, :8].double(), angle.cos() * expected.attention_factor, rtol=0, atol=1e-5
    )


def test_a_failed_forward_leaves_no_trace():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    cache, ids = DynamicCache(config=model.config), tokens(LONG)
    expected = step_by_step(model, ids, SHORT)
    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="on purpose"):
            model(ids, past_key_values=cache)
        hook.remove()
        by_itself = model.model.rotary_emb(torch.zeros(1), torch.arange(SHORT)[None])
    plain = make_model().model.rotary_emb(torch.zeros(1), torch.arange(SHORT)[None])
    assert by_itself[0].equal(plain[0])
    assert step_by_step(model, ids, SHORT, cache).equal(expected)


def fail(*_):
    raise RuntimeError("on purpose")


# -- where lengths come from -----------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Count how often lengths are read from the device of the positions."""
    count = []
    spans = hooks.first_and_last_positions
    monkeypatch.setattr(
        hooks, "first_and_last_positions", lambda *args: count.append(1) or spans(*args)
    )
    return count


def test_decoding_reads_lengths_only_at_the_steps(reads):
    model, ids = make_model(), tokens(END)
    rope_patch.patch(model, "dynamic-yarn")
    positions, mask = torch.arange(END)[None], torch.ones_like(ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in [(0, SHORT), *((i, i + 1) for i in range(SHORT, END))]:
            model(
                ids[:, start:end],
                position_ids=positions[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
            )
    steps = 9  # factors 2^(1/4) to 2^(9/4) between 64 and 300 tokens
    assert len(reads) == 1 + steps


def test_a_fixed_length_needs_no_reading(reads):
    model = make_model()
    handle = rope_patch.patch(model, "dynamic-yarn")
    handle.fix_length(TARGET)
    fixed = logits(model, SHORT)
    assert not reads
    with rope_patch.patch(model, "yarn", factor=4):
        assert_close(fixed, logits(model, SHORT))


def test_a_fixed_length_can_be_taken_back():
    model = make_model()
    plain = logits(model, SHORT)
    handle = rope_patch.patch(model, "dynamic-yarn")
    cache = DynamicCache(config=model.config)
    ids = tokens(LONG)
    expected = step_by_step(model, ids, SHORT)
    handle.fix_length(TARGET)
    assert_differs(logits(model, SHORT), plain)
    handle.fix_length(None)
    assert logits(model, SHORT).equal(plain)
    with torch.no_grad():
        model(ids[:, :SHORT], past_key_values=cache)
        handle.fix_length(TARGET)
        model(ids[:, SHORT : SHORT + 1], past_key_values=cache)  # turns all keys on
        handle.fix_length(None)
        cache.crop(-1)
        got = step_by_step(model, ids[:, SHORT:], 1, cache)
    assert_close(got, expected[:, SHORT:])


@pytest.mark.parametrize("length", [0, -1, 2.5, "long"])
def test_a_fixed_length_is_a_number_of_tokens(length):
    handle = rope_patch.patch(make_model(), "dynamic-yarn")
    with pytest.raises((ValueError, TypeError), match="length must be"):
        handle.fix_length(length)


def test_fixing_a_length_is_nothing_to_a_static_method():
    model = make_model()
    handle = rope_patch.patch(model, "yarn", factor=4)
    before = logits(model, LONG)
    handle.fix_length(SHORT)
    assert logits(model, LONG).equal(before)
    assert handle.frequencies_at(SHORT) == handle.frequencies


# -- how positions and masks may be given ----------------------------------------------------------


def test_positions_of_a_narrow_type():
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    narrow = torch.arange(LONG)[None].int()
    assert forward(model, tokens(LONG), position_ids=narrow).equal(logits(model, LONG))
    wide, short = (model.model.rotary_emb(torch.zeros(1), p) for p in (narrow.long(), narrow))
    assert short[0].equal(wide[0])


def test_a_mask_for_all_slots_of_a_static_cache():
    """It says nothing of slots to come, and that is no padding."""
    model, ids = make_model(), tokens(LONG)
    rope_patch.patch(model, "dynamic-yarn")
    expected = step_by_step(model, ids, SHORT)
    cache = StaticCache(config=model.config, max_cache_len=LONG + 20)
    got = []
    with torch.no_grad():
        for start, end in [(0, SHORT), *((i, i + 1) for i in range(SHORT, LONG))]:
            mask = (torch.arange(LONG + 20)[None] < end).long()
            got.append(model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits)
    assert_close(torch.cat(got, dim=1), expected)
