"""Test frequencies that depend on the length, against rotating every key afresh."""

import pytest
import torch
from helpers.growing_texts import END, LONGROPE, PROMPT, position_reads, read_in_parts
from helpers.method_names import frequency_methods
from helpers.reference_rerotation import Reference, exact, stepped
from helpers.tiny_models import (
    LONG,
    OLD_TRANSFORMERS,
    SHORT,
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

SHAPES = ["llama", "qwen3", "gemma3", "phi3"]
DYNAMIC = ["dynamic", "dynamic-linear", "dynamic-yarn", "dynamic-ntk-by-parts"]


@pytest.fixture
def model():
    """Return a patched model of two layers."""
    model = make_model()
    rope_patch.patch(model, "dynamic-yarn")
    return model


@pytest.fixture
def shallow():
    """Return a patched model of one layer, in which no hidden state has earlier frequencies."""
    model = make_model(num_hidden_layers=1)
    rope_patch.patch(model, "dynamic-yarn")
    return model


def new_cache(model, kind=DynamicCache):
    size = {"max_cache_len": LONG + 20} if kind is StaticCache else {}
    return kind(config=model.config, **size)


# -- decoding, against all keys rotated by the current frequencies at every step -------------------


@pytest.mark.parametrize(
    ("family", "method", "options", "prompt"),
    [
        *(("llama", method, {}, PROMPT) for method in DYNAMIC),
        *((family, "dynamic-yarn", {}, PROMPT) for family in SHAPES[1:]),
        *((family, "longrope", LONGROPE, PROMPT) for family in ("llama", "phi3")),
        *(
            pytest.param(family, "longrope", LONGROPE, PROMPT, marks=pytest.mark.slow)
            for family in ("qwen3", "gemma3")
        ),
        *((family, "dynamic-yarn", {"growth": "exact"}, PROMPT) for family in ("llama", "gemma3")),
        *(("llama", "dynamic-yarn", {}, TRAINED + more) for more in (-1, 0, 1, 14)),
    ],
)
def test_decoding_matches_rotating_all_keys_afresh(family, method, options, prompt):
    model, ids = make_model(family), tokens(END)
    growth = exact if options.get("growth") == "exact" else stepped
    reference = Reference(model, method, growth, options)
    rope_patch.patch(model, method, **options)
    assert_close(step_by_step(model, ids, prompt), reference.decode(ids, prompt))


def test_references_differ_from_stale_keys_and_from_each_other():
    """Compare with transformers, which never re-rotates a cached key."""
    model, ids = make_model(), tokens(END)
    truth = Reference(model, "dynamic").decode(ids, PROMPT)
    config = make_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0})
    native = make_model(config=config)
    native.load_state_dict(model.state_dict())
    assert_differs(step_by_step(native, ids, PROMPT), truth)
    assert_differs(Reference(model, "dynamic", exact).decode(ids, PROMPT), truth)


def test_every_dynamic_method_decodes_one_layer_as_without_a_cache():
    names = [name for name in frequency_methods() if registered_methods()[name].is_dynamic]
    assert set(DYNAMIC) < set(names)
    model, ids = make_model(num_hidden_layers=1), tokens(END)
    plain = forward(model, ids)
    for name in names:
        with rope_patch.patch(model, name):
            expected = forward(model, ids)
            assert_close(step_by_step(model, ids, PROMPT)[:, -1], expected[:, -1])
            assert_differs(expected, plain)


# -- up to the trained length, against the unpatched model -----------------------------------------


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in DYNAMIC),
        *((family, "dynamic-yarn") for family in SHAPES[1:]),
    ],
)
def test_logits_up_to_the_trained_length_are_bitwise_unchanged(family, method):
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


def test_patch_replaces_a_rounded_buffer_by_exact_frequencies():
    model = make_model()
    plain = logits(model, TRAINED)
    model.model.rotary_emb.to(torch.bfloat16)
    rope_patch.patch(model, "dynamic-yarn")
    assert logits(model, TRAINED).equal(plain)


# -- independent rows ------------------------------------------------------------------------------

ROWS = [tokens(length, seed=length) for length in (50, 170, 84)]


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=pytest.mark.slow if n == "qwen3" else ()) for n in SHAPES]
)
def test_padded_rows_decode_like_single_rows(family):
    """Decode rows that pass the trained length and growth steps at different times."""
    model, new = make_model(family), tokens(16, batch=len(ROWS), seed=7)
    expected = [
        Reference(model, "dynamic-yarn").decode(torch.cat([row, more[None]], 1), row.shape[1])
        for row, more in zip(ROWS, new, strict=True)
    ]
    rope_patch.patch(model, "dynamic-yarn")
    ids, mask = padded(ROWS, "left")
    ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    got = read_in_parts(model, ids, [170], new_cache(model), mask)
    for row, truth in zip(got, expected, strict=True):
        assert_close(row[-16:], truth[0, -16:])


def test_earlier_calls_do_not_change_logits(model):
    fresh = logits(model, LONG)
    for length in (TARGET, SHORT, TRAINED + 1):
        logits(model, length)
        assert logits(model, LONG).equal(fresh)


@torch.no_grad()
def test_two_interleaved_conversations(model):
    ids, other_ids = tokens(END), tokens(END, seed=9)
    expected = step_by_step(model, ids, PROMPT)
    cache, other_cache = new_cache(model), new_cache(model)
    got = [model(ids[:, :PROMPT], past_key_values=cache).logits]
    model(other_ids[:, : PROMPT + 12], past_key_values=other_cache)
    for i in range(PROMPT, END):
        got.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
        if i + 12 < END:
            model(other_ids[:, i + 12 : i + 13], past_key_values=other_cache)
    assert torch.cat(got, dim=1).equal(expected)


def test_packed_row_has_the_length_of_its_longest_document(model):
    """Positions restart with each document; the longest document sets the frequencies."""
    first, second = tokens(100), tokens(50, seed=3)
    positions = torch.cat([torch.arange(100), torch.arange(50)])[None]
    packed = forward(model, torch.cat([first, second], 1), position_ids=positions)
    assert_close(packed[:, :100], forward(model, first))


def test_decoding_after_a_packed_row(shallow):
    ids, cache = tokens(TRAINED + 60), new_cache(shallow)
    positions = torch.cat([torch.arange(TRAINED - 10), torch.arange(70)])[None]
    got = read_in_parts(shallow, ids, [TRAINED + 40], cache, positions=positions)
    mask = torch.ones(1, 1, TRAINED + 60, TRAINED + 60, dtype=torch.bool).tril()  # no boundaries
    whole = forward(shallow, ids, position_ids=positions, attention_mask=mask)
    assert cache.rotation.row_spans[0, 2] > TRAINED
    assert_close(got[:, -1], whole[:, -1])


def test_length_is_the_span_of_positions(model):
    shifted = forward(model, tokens(LONG), position_ids=torch.arange(LONG)[None] + 1000)
    torch.testing.assert_close(shifted, logits(model, LONG), rtol=0, atol=2e-3)


def test_empty_row_leaves_other_rows_unchanged(model):
    ids, mask = padded([tokens(LONG), tokens(LONG)[:, :0]], "right")
    assert_close(forward(model, ids, attention_mask=mask)[:1], logits(model, LONG))


# -- the rotary module -----------------------------------------------------------------------------


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="its rotary module takes no rows")
def test_frequencies_are_per_row_only_if_rows_differ():
    model = make_model()
    rotary, buffers = model.model.rotary_emb, []
    initial = rotary.inv_freq
    handle = rope_patch.patch(model, "dynamic-yarn")
    rotary.register_forward_pre_hook(lambda module, _: buffers.append(module.inv_freq))
    ids, mask = padded(ROWS, "right")
    forward(model, ids, attention_mask=mask)
    forward(model, ids)
    expected = [handle.frequencies_at(row.shape[1])[None].inv_freq.float() for row in ROWS]
    assert buffers[0].equal(torch.stack(expected)[:, None])  # [3, 1, 8]
    assert buffers[1].equal(expected[1])  # [8]: without a mask all rows have the same length
    # The buffer that a broadcast to other processes would send.
    assert rotary.inv_freq.equal(initial)


@pytest.mark.parametrize("length", [SHORT, TRAINED, TRAINED + 1, 100, TARGET])
def test_rotary_module_called_directly_uses_its_positions(model, length):
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


def test_failed_forward_restores_the_frequencies(model):
    cache, ids = new_cache(model), tokens(END)
    expected = step_by_step(model, ids, PROMPT)
    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="on purpose"):
            model(ids, past_key_values=cache)
        hook.remove()
        cos_sin = model.model.rotary_emb(torch.zeros(1), torch.arange(SHORT)[None])
    plain = make_model().model.rotary_emb(torch.zeros(1), torch.arange(SHORT)[None])
    assert cos_sin[0].equal(plain[0])
    assert step_by_step(model, ids, PROMPT, cache).equal(expected)


def fail(*_):
    raise RuntimeError("on purpose")


# -- reads of lengths, and fixed lengths -----------------------------------------------------------


def test_decoding_reads_lengths_only_at_growth_steps(model):
    ids, mask = tokens(END), torch.ones(1, END, dtype=torch.long)
    with position_reads() as shapes:
        read_in_parts(model, ids, [PROMPT], new_cache(model), mask)
    steps = 2  # factors 2^(1/4) and 2^(1/2) between 64 and 80 tokens
    assert shapes.count((1, 2)) == 1 + steps  # the ends of the row's span


def test_fixed_length_reads_no_positions(model):
    rope_patch.current(model).fix_length(TARGET)
    with position_reads() as shapes:
        fixed = logits(model, SHORT)
    assert not shapes
    with rope_patch.patch(model, "yarn", factor=4):
        assert_close(fixed, logits(model, SHORT))


def test_fixed_length_can_be_unset():
    model = make_model()
    plain = logits(model, SHORT)
    handle = rope_patch.patch(model, "dynamic-yarn")
    cache, ids = new_cache(model), tokens(END)
    expected = step_by_step(model, ids, PROMPT)
    handle.fix_length(TARGET)
    assert_differs(logits(model, SHORT), plain)
    handle.fix_length(None)
    assert logits(model, SHORT).equal(plain)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        handle.fix_length(TARGET)
        model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache)  # re-rotates all keys
        handle.fix_length(None)
        cache.crop(-1)
        got = step_by_step(model, ids[:, PROMPT:], 1, cache)
    assert_close(got, expected[:, PROMPT:])


@pytest.mark.parametrize("length", [0, -1, 2.5, "long"])
def test_fixed_length_must_be_a_number_of_tokens(model, length):
    with pytest.raises((ValueError, TypeError), match="length"):
        rope_patch.current(model).fix_length(length)


def test_fixed_length_does_not_change_a_static_method():
    model = make_model()
    handle = rope_patch.patch(model, "yarn", factor=4)
    before = logits(model, LONG)
    handle.fix_length(SHORT)
    assert logits(model, LONG).equal(before)
    assert handle.frequencies_at(SHORT) == handle.frequencies


# -- forms of positions and masks ------------------------------------------------------------------


def test_int32_positions(model):
    narrow = torch.arange(LONG)[None].int()
    assert forward(model, tokens(LONG), position_ids=narrow).equal(logits(model, LONG))
    wide, short = (model.model.rotary_emb(torch.zeros(1), p) for p in (narrow.long(), narrow))
    assert short[0].equal(wide[0])


def test_mask_for_all_slots_of_a_static_cache(model):
    """Zeros for slots that are not filled yet are no padding."""
    ids, cache, got = tokens(END), new_cache(model, StaticCache), []
    expected = step_by_step(model, ids, PROMPT)
    with torch.no_grad():
        for start, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, END))]:
            mask = (torch.arange(LONG + 20)[None] < end).long()
            got.append(model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits)
    assert_close(torch.cat(got, dim=1), expected)
