"""Test LongRoPE's start tokens: the first positions keep the rotation before the extension.

Undo, copies and saving are tested in test_every_patch.py, rows of a batch in test_position_rule.py.
"""

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
from transformers import DynamicCache, StaticCache

import rope_patch

START = 5  # tokens
SCALE = math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))  # LongRoPE's law
OPTIONS = {"factor": FACTOR, "long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}


def patched(model, start_tokens=START, method="longrope", **changes):
    """Patch a model with start tokens and return it."""
    options = {k: v for k, v in {**OPTIONS, **changes}.items() if v is not None}
    rope_patch.patch(model, method, start_tokens=start_tokens, **options)
    return model


def one_layer(family="llama", **changes):
    if family == "gemma3":
        changes["layer_types"] = ["full_attention"]
    return make_model(family, num_hidden_layers=1, **changes)


def rotary_of(model):
    return next(m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "config"))


def stretch_of(model):
    return [1 + 0.4 * pair for pair in range(len(rotary_of(model).inv_freq))]


def compute_cos_sin(positions, theta, stretch, scale, start):
    """Compute cos and sin of each pair `[..., R / 2]` in float64, position by position."""
    cos, sin = [], []
    for position in positions.flatten().tolist():
        first = position < start
        angles = [
            position / theta ** (i / len(stretch)) / (1.0 if first else each)
            for i, each in enumerate(stretch)
        ]
        cos.append([math.cos(a) * (1.0 if first else scale) for a in angles])
        sin.append([math.sin(a) * (1.0 if first else scale) for a in angles])
    shape = (*positions.shape, len(stretch))
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
    rotary, stretch = rotary_of(model), stretch_of(model)
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    theta = config.rope_parameters["rope_theta"]
    patched(model, long_factor=stretch, short_factor=stretch, start="unscaled")
    positions = torch.tensor([[0, 1, 4, 5, 6, 200], [150, 5, 4, 3, 0, 77]])
    got = rotary(torch.zeros(2, 6, 4), positions)
    # gpt_oss has a scaling, and start="unscaled" goes back to the length before it.
    trained = config.rope_parameters.get("original_max_position_embeddings", TRAINED)
    scale = math.sqrt(1 + math.log(FACTOR) / math.log(trained))
    cos, sin = compute_cos_sin(positions, theta, stretch, scale, START)
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
    stretch, theta = stretch_of(model), model.config.rope_parameters["rope_theta"]
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
    cos, sin = compute_cos_sin(torch.arange(LONG), theta, stretch, SCALE, START)

    def rotated(x):
        x, pairs = x.clone(), len(stretch)
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
    plain = {kind: rotary(*inputs, kind) for kind in ("sliding_attention", "full_attention")}
    patched(model, 0)
    stretched = rotary(*inputs, "full_attention")
    patched(model)
    assert all(map(torch.equal, rotary(*inputs, "sliding_attention"), plain["sliding_attention"]))
    tables = rotary(*inputs, layer_type="full_attention")
    for table, before, after in zip(tables, plain["full_attention"], stretched, strict=True):
        assert torch.equal(table[:, :START], before[:, :START])
        assert torch.equal(table[:, START:], after[:, START:])
        assert not torch.equal(table[:, :START], after[:, :START])


def test_casts_keep_both_rotations_exact():
    model = patched(make_model())
    inputs = (torch.zeros(1, LONG, 4), torch.arange(LONG)[None])
    expected = model.model.rotary_emb(*inputs)
    model.bfloat16()
    assert all(map(torch.equal, model.model.rotary_emb(*inputs), expected))
    assert forward(model, tokens(8)).dtype == torch.bfloat16


def test_start_tokens_keep_a_trained_scaling():
    """Llama 3's scaling was trained, so start tokens keep it."""
    parameters = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = TRAINED // 2
    model, ids = make_model(rope_parameters=parameters), tokens(START)
    expected = forward(model, ids)
    patched(model)
    assert torch.equal(forward(model, ids), expected)


def test_start_tokens_do_not_keep_a_replaced_scaling():
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model, ids = make_model(rope_parameters=parameters), tokens(START)
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    assert_differs(forward(model, ids), forward(plain, ids))
    patched(model, trained_length=TRAINED)
    assert_close(forward(model, ids), forward(plain, ids))


# -- caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [2, TRAINED - 3, LONG])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_layer_decodes_as_without_a_cache(family, prompt):
    """Compare steps on both sides of the trained length with a forward of all tokens."""
    model, lengths = patched(one_layer(family)), [prompt + 1, prompt + 6]
    if prompt < TRAINED:
        lengths += [START + 1, TRAINED, TRAINED + 1, TRAINED + 3]
    ids = tokens(max(lengths))
    got = step_by_step(model, ids, prompt)
    for length in lengths:
        if length > prompt:
            assert_close(got[:, length - 1], forward(model, ids[:, :length])[:, -1])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoding_matches_rotating_all_keys_afresh(family, monkeypatch):
    model, ids, prompt = make_model(family), tokens(TRAINED + 4), TRAINED - 4
    plain = 1e4 ** (-torch.arange(8, dtype=torch.float32) / 8)
    rotate = reference_rerotation.rotate

    def rotate_with_start(x, positions, inv_freq, scale):
        is_start = (positions < START)[:, None, :, None]
        extended = rotate(x, positions, inv_freq, scale)
        return torch.where(is_start, rotate(x, positions, plain, 1.0), extended)

    reference = Reference(model, "longrope", options=OPTIONS)
    without = reference.decode(ids, prompt)
    monkeypatch.setattr(reference_rerotation, "rotate", rotate_with_start)
    expected = reference.decode(ids, prompt)
    assert_differs(without, expected)
    assert_close(step_by_step(patched(model), ids, prompt), expected)


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
    rest, cache = tokens(2, batch=2, seed=6), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        before = [layer.keys.clone() for layer in cache.layers]
        for i in range(2):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            step = rest[:, i : i + 1]
            got = model(step, attention_mask=mask, past_key_values=cache).logits
    for old, layer in zip(before, cache.layers, strict=True):
        same = (layer.keys[:, :, :TRAINED] == old).all(-1).all(1)
        assert same[1].all()
        assert same[0].tolist() == [True] * START + [False] * (TRAINED - START)
    for i, row in enumerate(rows):
        whole = torch.cat([row, rest[i : i + 1]], dim=1)
        assert_close(got[i : i + 1], step_by_step(model, whole, row.shape[1])[:, -1:])


def test_mixed_windows_switch_the_attention_factor_of_start_tokens():
    """Beyond the trained length, the attention factor applies to start tokens, too."""
    model, ids = one_layer(), tokens(TRAINED + 4)
    plain = copy.deepcopy(model)
    patched(model, method="mixed-longrope", short_factor=None)
    assert torch.equal(forward(model, ids[:, :TRAINED]), forward(plain, ids[:, :TRAINED]))
    got = step_by_step(model, ids, TRAINED - 2)
    for length in (TRAINED, TRAINED + 1, TRAINED + 4):
        assert_close(got[:, length - 1], forward(model, ids[:, :length])[:, -1])
    expected = forward(patched(plain, short_factor=None), ids)
    assert_close(forward(model, ids), expected)


# -- compiled graphs, hooks and kernels ------------------------------------------------------------


@pytest.mark.parametrize("equal_sets", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.usefixtures("reset_compiler")
def test_compiled_forward_is_one_graph(equal_sets):
    """Compile with one set of frequencies, and with a short and a long set."""
    short = LONG_FACTOR if equal_sets else SHORT_FACTOR
    model = patched(make_model(num_hidden_layers=1), short_factor=short)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids, mask = padded([tokens(30), tokens(LONG)], "left")
    expected = forward(model, ids, attention_mask=mask)
    assert_close(forward(compiled, ids, attention_mask=mask), expected)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("reset_compiler")
def test_compiled_decode_steps_match_a_full_forward():
    model, ids = patched(one_layer()), tokens(TRAINED + 2)
    step = torch.compile(model, fullgraph=True, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=TRAINED + 2)  # of one shape
    with torch.no_grad():
        model(ids[:, : TRAINED - 1], past_key_values=cache)
        for i in range(TRAINED - 1, ids.shape[1]):
            position_ids = torch.tensor([[i]])
            got = step(ids[:, i : i + 1], position_ids=position_ids, past_key_values=cache).logits
    assert_close(got[:, -1], forward(model, ids)[:, -1])


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="accelerate's hooks are tried on the newest")
def test_accelerate_hooks_around_the_rotary_module_stay():
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


def test_kernels_take_tables_of_cos_and_sin():
    model, ids = patched(make_model("qwen3"), kernels="hf"), tokens(LONG)
    expected = forward(model, ids)
    assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)
    patched(model)
    assert all("forward" in vars(layer.self_attn) for layer in model.model.layers)
    assert_close(forward(model, ids), expected)
    assert "start_tokens" in rope_patch.current(model).summary()


# -- exports and adapters --------------------------------------------------------------------------


@pytest.mark.parametrize("short_factor", [SHORT_FACTOR, LONG_FACTOR])
def test_only_vllm_serves_start_tokens_with_its_plugin(short_factor):
    model = patched(make_model(), short_factor=short_factor)
    for engine in ("transformers", "transformers4", "sglang", "llama.cpp", "mlx"):
        with pytest.raises(ValueError, match=r"below 5 .*start_tokens"):
            rope_patch.export(model, engine)
    export = rope_patch.export(model, "vllm")
    assert export.needs_plugin
    assert export.config["rope_parameters"]["start_tokens"] == 5
    rope_patch.unpatch(model)
    patched(model, 0, short_factor=LONG_FACTOR)
    assert not rope_patch.export(model, "vllm").needs_plugin
    rope_patch.export(model, "transformers")


def test_adapter_stores_its_start_tokens(tmp_path):
    peft = pytest.importorskip("peft")
    model = patched(make_model())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    rope_patch.save(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match="start_tokens=5"):
        rope_patch.load_adapter(patched(make_model(), 3), tmp_path / "adapter")
    rope_patch.load_adapter(patched(make_model()), tmp_path / "adapter")


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "fact"),
    [
        *((value, ValueError, "start_tokens") for value in (-1, 2.5, math.inf)),
        *((value, TypeError, "start_tokens must be a number") for value in ("4", True, None, [4])),
        (TRAINED + 1, ValueError, f"at most {TRAINED}"),
    ],
)
def test_start_tokens_must_be_a_whole_number_within_the_trained_length(wrong, error, fact):
    with pytest.raises(error, match=fact):
        patched(make_model(), wrong)


def test_all_trained_positions_may_be_start_tokens_where_others_change():
    model = patched(make_model(), TRAINED)
    with pytest.raises(ValueError, match=f"at most {TRAINED - 1}"):
        patched(model, TRAINED, factor=1)


def test_start_tokens_accept_a_whole_float():
    method = rope_patch.patch(make_model(), "longrope", start_tokens=4.0, **OPTIONS).method
    assert method.options()["start_tokens"] == 4
    assert isinstance(method.options()["start_tokens"], int)
    assert not method.has_config_form
    without = rope_patch.patch(make_model(), "longrope", start_tokens=0, **OPTIONS)
    assert without.method.has_config_form


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_kernels_without_start_token_support_are_refused(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    model = make_model()
    with pytest.raises(ValueError, match=r'start_tokens.*"auto"'):
        patched(model, kernels=kernels)
    assert rope_patch.current(model) is None
    patched(model, 0, kernels=kernels)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_several_positions_per_token_are_refused(architecture):
    model = tiny_model(architecture)
    stretch = stretch_of(model.model.language_model)
    with pytest.raises(ValueError, match=r"M-RoPE.*start_tokens"):
        patched(model, long_factor=stretch, short_factor=stretch)
    assert rope_patch.current(model) is None
    patched(model, 0, long_factor=stretch, short_factor=stretch)


def test_attention_factor_in_the_softmax_scale_is_refused():
    model, ids = tiny_model("deepseek_v3"), tokens(LONG)
    options = dict.fromkeys(("long_factor", "short_factor"), stretch_of(model))
    with pytest.raises(ValueError, match="attention_factor=1"):
        patched(model, **options)
    options["attention_factor"] = 1.0
    expected = forward(model, ids[:, :START])
    assert torch.equal(forward(patched(model, **options), ids[:, :START]), expected)
    assert_differs(forward(model, ids), forward(patched(model, 0, **options), ids))


def test_config_with_two_sets_is_refused():
    sets = {"long_factor": LONG_FACTOR, "short_factor": SHORT_FACTOR}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **sets}
    parameters["original_max_position_embeddings"] = TRAINED
    changes = {"rope_parameters": parameters, "max_position_embeddings": TARGET}
    model = make_model("llama", make_config("llama", **changes))
    with pytest.raises(ValueError, match='start="unscaled"'):
        patched(model, short_factor=None)
    patched(model, start="unscaled", factor=8)
