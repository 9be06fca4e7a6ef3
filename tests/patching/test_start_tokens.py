"""LongRoPE's start tokens: the first positions keep the rotation from before the extension."""

import copy
import json
import math
import pickle

import pytest
import torch
import unrotated
from architectures import tiny_model
from tiny_models import (
    FACTOR,
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
    make_config,
    make_model,
    padded,
    step_by_step,
    tokens,
)
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from unrotated import Reference

import rope_patch
from rope_patch.patching.kernels.attention_forward import PatchedAttentionForward
from rope_patch.patching.kernels.position_passthrough import PositionPassthrough
from rope_patch.patching.start_tokens import StartTokenRotary

START = 5  # tokens
SCALE = math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))  # LongRoPE's law
OPTIONS = {"factor": FACTOR, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}


def patched(model, start_tokens=START, method="longrope", **changes):
    """Patches the model, and returns it."""
    given = {k: v for k, v in {**OPTIONS, **changes}.items() if v is not None}
    rope_patch.patch(model, method, start_tokens=start_tokens, **given)
    return model


def one_layer(family="llama", **changes):
    if family == "gemma3":
        changes["layer_types"] = ["full_attention"]
    return make_model(family, num_hidden_layers=1, **changes)


def rotary_of(model):
    return next(m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "config"))


def by_hand(positions, theta, rotary_dim, stretch, scale, start):
    """cos and sin of each pair `[..., R / 2]`, written out in float64, position by position."""
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


# How each lays out what it hands out: twice in a row, each number twice, or complex numbers.
LAYOUTS = {
    "llama": "halves",
    "qwen3": "halves",
    "phi": "halves",  # turns a part of each head
    "gpt_neox": "halves",  # likewise
    "cohere": "neighbours",
    "glm": "halves",  # table in halves, pairs of neighbours
    "gpt_oss": "once",
    "llama4_text": "complex",
}


def laid_out(layout, cos, sin):
    if layout == "halves":
        return tuple(torch.cat([x, x], dim=-1) for x in (cos, sin))
    if layout == "neighbours":
        return tuple(x.repeat_interleave(2, dim=-1) for x in (cos, sin))
    return (cos, sin) if layout == "once" else (torch.complex(cos, sin),)


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_what_a_rotary_module_hands_out_is_as_written_by_hand(architecture):
    model = tiny_model(architecture)
    rotary = rotary_of(model)
    pairs = len(rotary.inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    theta = config.rope_parameters["rope_theta"]
    patched(model, long_factor=stretch, short_factor=stretch, start="unscaled")
    positions = torch.tensor([[0, 1, 4, 5, 6, 200], [150, 5, 4, 3, 0, 77]])
    got = rotary(torch.zeros(2, 6, 4), positions)
    # gpt_oss was trained on fewer tokens before its own scaling, from which this one starts.
    trained = config.rope_parameters.get("original_max_position_embeddings", TRAINED)
    scale = math.sqrt(1 + math.log(FACTOR) / math.log(trained))
    cos, sin = by_hand(positions, theta, 2 * pairs, stretch, scale, START)
    expected = laid_out(LAYOUTS[architecture], cos, sin)
    got = got if isinstance(got, tuple) else (got,)
    for ours, truth in zip(got, expected, strict=True):
        assert ours.shape == truth.shape
        assert (ours.to(truth.dtype) - truth).abs().max() < 2e-5


PAIRED = {"llama": "halves", "phi": "halves", "cohere": "neighbours", "glm": "neighbours"}


@pytest.mark.parametrize("architecture", PAIRED)
def test_attention_is_as_computed_by_hand(architecture):
    """Queries and keys as the projections give them, rotated and compared in float64."""
    model = tiny_model(architecture, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    pairs = len(rotary_of(model).inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    theta = model.config.rope_parameters["rope_theta"]
    patched(model, long_factor=stretch, short_factor=None)
    attention = model.base_model.layers[0].self_attn
    seen = {}
    for name in ("q_proj", "k_proj"):
        note = lambda module, args, out, name=name: seen.__setitem__(name, out)  # noqa: E731
        getattr(attention, name).register_forward_hook(note)
    ids = tokens(LONG)
    with torch.no_grad():
        got = model(ids, output_attentions=True, use_cache=False).attentions[0][0].double()
    q, k = (
        seen[name][0].double().view(LONG, -1, attention.head_dim).transpose(0, 1)
        for name in ("q_proj", "k_proj")
    )
    cos, sin = by_hand(torch.arange(LONG), theta, 2 * pairs, stretch, SCALE, START)

    def turned(x):
        x = x.clone()
        for i in range(pairs):
            a, b = (2 * i, 2 * i + 1) if PAIRED[architecture] == "neighbours" else (i, i + pairs)
            first, second = x[..., a].clone(), x[..., b].clone()
            x[..., a] = first * cos[:, i] - second * sin[:, i]
            x[..., b] = first * sin[:, i] + second * cos[:, i]
        return x

    q, k = turned(q), turned(k).repeat_interleave(len(q) // len(k), dim=0)
    said = q @ k.transpose(1, 2) * attention.scaling
    causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()
    expected = said.masked_fill(~causal, -math.inf).softmax(-1)
    assert (got - expected).abs().max() < 2e-5
    # Without start tokens it would be another attention.
    model = patched(model, 0, long_factor=stretch, short_factor=None)
    with torch.no_grad():
        plain = model(ids, output_attentions=True, use_cache=False).attentions[0][0].double()
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_within_the_start_tokens_a_model_is_as_unpatched(family):
    model, ids = make_model(family), tokens(SHORT)
    expected = forward(model, ids)
    assert torch.equal(forward(patched(model, SHORT), ids), expected)
    assert not torch.equal(forward(patched(model, SHORT - 1), ids), expected)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beyond_the_start_tokens_it_is_plain_longrope(family, length):
    """Positions that begin behind them; an index says nothing."""
    model, ids = make_model(family), tokens(length)
    positions = torch.arange(length)[None] + START
    expected = forward(patched(model, 0), ids, position_ids=positions)
    assert torch.equal(forward(patched(model), ids, position_ids=positions), expected)
    one_earlier = forward(model, ids, position_ids=positions - 1)
    assert not torch.equal(one_earlier, expected)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_sliding_layers_rotate_as_ever(length):
    model = make_model("gemma3")
    rotary = model.model.rotary_emb
    given = (torch.zeros(1, length, 4), torch.arange(length)[None])
    kinds = ("sliding_attention", "full_attention")
    plain = {kind: rotary(*given, kind) for kind in kinds}
    patched(model, 0)
    stretched = rotary(*given, "full_attention")
    patched(model)
    assert all(map(torch.equal, rotary(*given, "sliding_attention"), plain["sliding_attention"]))
    for ours, before, after in zip(
        rotary(*given, layer_type="full_attention"), plain["full_attention"], stretched, strict=True
    ):
        assert torch.equal(ours[:, :START], before[:, :START])
        assert torch.equal(ours[:, START:], after[:, START:])
        assert not torch.equal(ours[:, :START], after[:, :START])


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_is_as_it_is_alone(family, side):
    """Short and long ones: start tokens are a row's own first, behind whatever padding."""
    model = patched(make_model(family))
    rows = [tokens(SHORT, seed=2), tokens(LONG, seed=3), tokens(3, seed=4)]
    ids, mask = padded(rows, side)
    got = forward(model, ids, attention_mask=mask)
    for row, mine, here in zip(rows, got, mask.bool(), strict=True):
        assert_close(mine[here][None], forward(model, row))


def test_padded_rows_decode_as_they_do_alone():
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


def test_every_document_of_a_packed_row_has_first_tokens():
    model = patched(one_layer())
    parts = [tokens(30, seed=2), tokens(20, seed=3)]
    positions = torch.cat([torch.arange(30), torch.arange(20)])[None]
    got = forward(model, torch.cat(parts, dim=1), position_ids=positions)
    for part, mine in zip(parts, got.split([30, 20], dim=1), strict=True):
        assert_close(mine, forward(model, part))


def test_generate_pads_to_the_left():
    model = patched(make_model(tie_word_embeddings=False, initializer_range=0.2))
    rows = [tokens(TRAINED - 10, seed=2), tokens(9, seed=3)]
    ids, mask = padded(rows, "left")
    given = {"max_new_tokens": 30, "do_sample": False}
    got = model.generate(ids, attention_mask=mask, **given)
    for row, mine in zip(rows, got, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), **given)
        assert torch.equal(mine[-30:], alone[0, -30:])


# -- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [2, SHORT, TRAINED, LONG])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_in_one_layer_a_cache_changes_nothing_at_all(family, prompt):
    """Each step is the last of a pass over the whole, on both sides of the trained length."""
    model, ids = patched(one_layer(family)), tokens(LONG + 5)
    got = step_by_step(model, ids, prompt)
    for length in (prompt + 1, SHORT + 3, TRAINED, TRAINED + 1, LONG + 5):
        if length > prompt:
            whole = forward(model, ids[:, :length])[:, -1]
            assert_close(got[:, length - 1], whole)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoding_is_as_if_all_keys_were_rotated_afresh(family, monkeypatch):
    model, ids = make_model(family), tokens(LONG)
    plain = 1e4 ** (-torch.arange(8, dtype=torch.float32) / 8)
    own = unrotated.turn

    def turn(x, positions, inv_freq, scale):
        first = (positions < START)[:, None, :, None]
        return torch.where(first, own(x, positions, plain, 1.0), own(x, positions, inv_freq, scale))

    reference = Reference(model, "longrope", options=OPTIONS)
    without = reference.decode(ids, SHORT)
    monkeypatch.setattr(unrotated, "turn", turn)
    expected = reference.decode(ids, SHORT)
    assert_differs(without, expected)
    assert_close(step_by_step(patched(model), ids, SHORT), expected)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_turning_leaves_keys_of_start_tokens_alone_bit_for_bit(kind):
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


def test_only_the_rows_that_grow_are_turned():
    """One row passes the trained length; the start tokens of both stay, at slots of their own."""
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


def test_mixed_windows_switch_the_attention_factor_around_them():
    """The factor is 1 up to the trained length; keys of start tokens have it beyond, too."""
    model = one_layer()
    plain, ids = copy.deepcopy(model), tokens(LONG)
    patched(model, method="mixed-longrope", short_factor=None)
    assert torch.equal(forward(model, ids[:, :TRAINED]), forward(plain, ids[:, :TRAINED]))
    got = step_by_step(model, ids, SHORT)
    for length in (TRAINED, TRAINED + 1, LONG):
        assert_close(got[:, length - 1], forward(model, ids[:, :length])[:, -1])
    expected = forward(patched(plain, short_factor=None), ids)
    assert_close(forward(model, ids), expected)


# -- what is around ------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("same", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_in_one_graph(same):
    """With one set of frequencies, and with two that follow the length."""
    short = LONG_FACTOR if same else SHORT_FACTOR
    model = patched(make_model(num_hidden_layers=1), short_factor=short)
    compiled = torch.compile(model, fullgraph=True, backend="eager" if same else "aot_eager")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    assert_close(forward(compiled, ids), forward(model, ids))
    expected = forward(model, ids, attention_mask=mask)
    assert_close(forward(compiled, ids, attention_mask=mask), expected)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_decoding_steps():
    model, ids = patched(one_layer()), tokens(TRAINED + 8)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, : TRAINED - 4], past_key_values=cache)
        for i in range(TRAINED - 4, ids.shape[1]):
            at = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits
    assert_close(got[:, -1], forward(model, ids)[:, -1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_undoing_is_bit_exact(family):
    model, ids = make_model(family), tokens(LONG)
    expected, state = forward(model, ids), [dict(vars(m)) for m in model.modules()]
    handle = rope_patch.patch(model, "longrope", start_tokens=START, **OPTIONS)
    assert_differs(forward(model, ids), expected)
    handle.undo()
    assert torch.equal(forward(model, ids), expected)
    for module, before in zip(model.modules(), state, strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_undone_by_themselves(duplicate):
    model, ids = make_model(), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model), ids)
    other = duplicate(model)
    rope_patch.unpatch(model)
    assert torch.equal(forward(other, ids), expected)
    rope_patch.unpatch(other)
    assert torch.equal(forward(other, ids), plain)


def test_casts_leave_both_rotations_exact():
    model = patched(make_model())
    given = (torch.zeros(1, LONG, 4), torch.arange(LONG)[None])
    expected = model.model.rotary_emb(*given)
    model.bfloat16()
    assert all(map(torch.equal, model.model.rotary_emb(*given), expected))
    assert forward(model, tokens(8)).dtype == torch.bfloat16


def test_a_start_from_the_configs_own_scaling():
    """Llama 3's scaling was trained in: the first tokens keep that."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED // 2,
    }
    model, ids = make_model(rope_parameters=parameters), tokens(START)
    expected = forward(model, ids)
    patched(model)
    assert torch.equal(forward(model, ids), expected)


def test_a_scaling_that_is_replaced_is_not_what_they_keep():
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model, ids = make_model(rope_parameters=scaled), tokens(START)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    assert_differs(forward(model, ids), forward(plain, ids))
    patched(model, trained_length=TRAINED)
    assert_close(forward(model, ids), forward(plain, ids))


# -- who rotates ---------------------------------------------------------------------------------


def test_tables_of_cos_and_sin_are_what_layers_get():
    model, ids = make_model("qwen3"), tokens(LONG)
    patched(model, kernels="hf")
    expected = forward(model, ids)
    assert not [
        m for m in model.modules() if isinstance(vars(m).get("forward"), PatchedAttentionForward)
    ]
    patched(model)
    forwards = [vars(m).get("forward") for m in model.modules()]
    # Where a rotary module takes no rows of its own (5.0), it is within what gives it one by one.
    within = [each for f in forwards for each in (f, *getattr(f, "args", ()))]
    assert [f for f in within if isinstance(f, StartTokenRotary)]
    assert not [f for f in forwards if isinstance(f, PositionPassthrough)]
    assert_close(forward(model, ids), expected)
    assert "start_tokens" in rope_patch.current(model).summary()


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_kernels_that_cannot_say_it_are_refused(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    model = make_model()
    with pytest.raises(ValueError, match=r'start_tokens have a rotation of their own.*"auto"'):
        patched(model, kernels=kernels)
    assert rope_patch.current(model) is None
    patched(model, 0, kernels=kernels)


# -- files and engines ---------------------------------------------------------------------------


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_the_sidecar_carries_them(family, short_factor, tmp_path):
    model, ids = make_model(family), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model, short_factor=short_factor), ids)
    rope_patch.save(model, tmp_path / "saved")
    sidecar = json.loads((tmp_path / "saved" / "rope_patch.json").read_text())
    assert sidecar["native"] is False
    assert sidecar["options"]["start_tokens"] == START
    assert torch.equal(forward(rope_patch.load(tmp_path / "saved").eval(), ids), expected)
    # Nothing that is nearly right: transformers by itself gets the model as it was.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(forward(theirs, ids), plain)


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
@pytest.mark.parametrize(
    "engine", ["transformers", "transformers4", "vllm", "sglang", "llama.cpp", "mlx"]
)
def test_no_engine_gets_a_rotation_without_them(engine, short_factor):
    model = patched(make_model(), short_factor=short_factor)
    with pytest.raises(ValueError, match=r"positions below 5 .*\(start_tokens\).*leave start_tok"):
        rope_patch.export(model, engine)
    rope_patch.unpatch(model)
    if engine in ("transformers", "vllm"):
        rope_patch.export(patched(model, 0, short_factor=LONG_FACTOR), engine)


def test_an_adapter_knows_its_start_tokens(tmp_path):
    peft = pytest.importorskip("peft")
    model = patched(make_model())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    rope_patch.save(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match="start_tokens=5"):
        rope_patch.load_adapter(patched(make_model(), 3), tmp_path / "adapter")
    rope_patch.load_adapter(patched(make_model()), tmp_path / "adapter")


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 2.5, math.inf])
def test_a_number_of_tokens_is_whole(wrong):
    with pytest.raises(ValueError, match="start_tokens must be"):
        patched(make_model(), wrong)


@pytest.mark.parametrize("wrong", ["4", True, None, [4]])
def test_a_number_of_tokens_is_a_number(wrong):
    with pytest.raises(TypeError, match="start_tokens must be a number"):
        patched(make_model(), wrong)


def test_they_are_within_the_trained_length():
    model = make_model()
    patched(model, TRAINED)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED}"):
        patched(model, TRAINED + 1)
    with pytest.raises(ValueError, match=f"start_tokens must be at most {TRAINED - 1}"):
        patched(model, TRAINED, factor=1)


def test_whole_numbers_of_other_types():
    method = rope_patch.patch(make_model(), "longrope", start_tokens=4.0, **OPTIONS).method
    assert method.options()["start_tokens"] == 4
    assert isinstance(method.options()["start_tokens"], int)
    assert not method.has_config_form
    assert rope_patch.patch(
        make_model(), "longrope", start_tokens=0, **OPTIONS
    ).method.has_config_form


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_several_positions_are_refused(architecture):
    model = tiny_model(architecture)
    pairs = len(rotary_of(model.model.language_model).inv_freq)
    stretch = [1 + 0.4 * pair for pair in range(pairs)]
    with pytest.raises(ValueError, match=r"M-RoPE.*leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    assert rope_patch.current(model) is None
    patched(model, 0, long_factor=stretch, short_factor=stretch)


def test_softmax_scales_know_no_tokens():
    model, ids = tiny_model("deepseek_v3"), tokens(LONG)
    stretch = [1 + 0.4 * pair for pair in range(len(rotary_of(model).inv_freq))]
    with pytest.raises(ValueError, match="attention_factor=1, or leave start_tokens out"):
        patched(model, long_factor=stretch, short_factor=stretch)
    given = {"long_factor": stretch, "short_factor": stretch, "attention_factor": 1.0}
    expected = forward(model, ids[:, :START])
    assert torch.equal(forward(patched(model, **given), ids[:, :START]), expected)
    assert_differs(forward(model, ids), forward(patched(model, 0, **given), ids))


def test_two_rotations_from_before_are_one_too_many():
    own = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": LONG_FACTOR,
        "short_factor": SHORT_FACTOR,
        "factor": 2.0,
        "original_max_position_embeddings": TRAINED,
    }
    changes = {"rope_parameters": own, "max_position_embeddings": TARGET}
    model = make_model("llama", make_config("llama", **changes))
    with pytest.raises(ValueError, match=r'two of them.*start="unscaled"'):
        patched(model, short_factor=None)
    patched(model, start="unscaled", factor=8)


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="accelerate's hooks are tried on the newest")
def test_hooks_of_accelerate_around_it_stay():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids = make_model(), tokens(LONG)
    plain = forward(model, ids)
    expected = forward(patched(model), ids)
    rope_patch.unpatch(model)
    add_hook_to_module(model.model.rotary_emb, ModelHook())
    assert torch.equal(forward(patched(model), ids), expected)
    rope_patch.unpatch(model)
    remove_hook_from_module(model.model.rotary_emb)
    assert torch.equal(forward(model, ids), plain)
