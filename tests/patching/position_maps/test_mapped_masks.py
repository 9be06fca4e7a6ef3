"""Test that mapped attention honours what the attention function is given, or refuses it."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.tiny_models import (
    BEFORE_5_17,
    LONG,
    OLD_TRANSFORMERS,
    SIZES,
    TRAINED,
    forward,
    make_model,
    tokens,
)
from helpers.written_out_maps import MAPS, written_out
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

import rope_patch
from rope_patch.methods import build
from rope_patch.patching import ForwardView, Visibility, attend_masked
from rope_patch.transformers_api import AttentionCall, StandIn, read_call

PLACES = torch.arange(LONG)
CAUSAL = (PLACES[:, None] >= PLACES)[None, None]
PREFIX = CAUSAL | (PLACES < 32)
METHODS = ["self-extend", "rerope", "jet-long", "dca", "streaming"]
KNOWN = {"stand_in": StandIn("a position map", "use another")}


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", METHODS)
def test_later_keys_that_a_mask_shows_are_met_at_their_own_distance(name):
    model, ids = make_model("llama"), tokens(LONG)
    expected = forward(written_out(model, name), ids, attention_mask=PREFIX)
    plain = forward(model, ids, attention_mask=PREFIX)
    rope_patch.patch(model, name, **MAPS[name][0])
    got = forward(model, ids, attention_mask=PREFIX)
    close(got, expected)
    assert (got - forward(model, ids)).abs().max() > 1e-2
    close(got[:, : MAPS[name][2]], plain[:, : MAPS[name][2]])
    additive = torch.zeros(PREFIX.shape).masked_fill(~PREFIX, torch.finfo(torch.float32).min)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        close(forward(model, ids, attention_mask=additive), expected)


def bidirectional_gemma3():
    model = make_model("gemma3", use_bidirectional_attention=True)
    return lambda: forward(model, tokens(LONG)), model


def config_without_causality():
    model = make_model("llama")
    model.config.is_causal = False
    return lambda: forward(model, tokens(LONG)), model


def gemma3_with_an_image():
    torch.manual_seed(0)
    text = {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 32}
    text["layer_types"] = ["full_attention"] * 2
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=16,
        image_token_index=4,
        boi_token_index=6,
        eoi_token_index=7,
    )
    config.image_token_id = 4
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, 0, 0.1)
    ids = torch.cat([torch.full((1, 16), 4), tokens(LONG - 16) % 100 + 20], 1)
    inputs = {"token_type_ids": (ids == 4).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    return lambda: forward(model, ids, **inputs), model


@pytest.mark.skipif(BEFORE_5_17, reason="fewer models attend to later tokens")
@pytest.mark.parametrize(
    ("build", "implementation"),
    [
        (bidirectional_gemma3, "sdpa"),
        (config_without_causality, "sdpa"),
        (config_without_causality, "eager"),
        (gemma3_with_an_image, "eager"),
    ],
)
def test_queries_within_the_trained_length_see_what_the_plain_model_shows(build, implementation):
    run, model = build()
    model.set_attn_implementation(implementation)
    plain = run()
    rope_patch.patch(model, "self-extend")
    got = run()
    assert (got - plain).abs().max() > 1e-2
    if build is gemma3_with_an_image:
        close(got[:, :TRAINED], plain[:, :TRAINED])
    else:  # later layers see hidden states of later tokens, which the map changes
        for layer in model.model.layers[1:]:
            layer.forward = lambda hidden, *_, **__: hidden
        changed = run()
        rope_patch.unpatch(model)
        close(changed[:, :TRAINED], run()[:, :TRAINED])


# -- one attention, against transformers' own functions --------------------------------------------

H, K, Q, S, D = 4, 2, 6, 6, 8


class Attention(nn.Module):
    """What attention functions ask of a module."""

    def __init__(self, **attributes):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.num_key_value_groups, self.head_dim = H // K, D
        self.sinks = torch.linspace(-1, 1, H)
        self.eval()
        for name, value in attributes.items():
            setattr(self, name, value)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_view(steps, slots):
    """Return a view of consecutive positions in which nothing is turned."""
    queries = torch.arange(slots - steps, slots)[None]
    near = SimpleNamespace(start=torch.zeros_like(queries), stop=queries + 1)
    return SimpleNamespace(
        keys=torch.arange(slots)[None],
        queries=queries,
        regions=[near],
        query_tables=lambda *_: None,
        key_tables=lambda *_: None,
    )


def ours(function, module, query, key, value, mask, **arguments):
    call = read_call(function, module, query, key, mask, arguments, filled=key.shape[2], **KNOWN)
    visibility = Visibility(call, query, key)
    view = whole_view(query.shape[2], key.shape[2])
    output, weights = attend_masked(view, None, query, key, value, visibility)
    return output.transpose(1, 2), weights, visibility


HIDDEN = random(2, 1, Q, S, seed=5) > 0.5
HIDDEN[..., 0] = False
MASKS = {
    "none": None,
    "causal": torch.ones(Q, S, dtype=torch.bool).tril()[None, None],
    "by row": ~HIDDEN,
    "by head": (random(2, H, Q, S, seed=6) > 0) | ~HIDDEN,
    "added": torch.zeros(2, 1, Q, S).masked_fill(HIDDEN, torch.finfo(torch.float32).min),
    "added by head": random(2, H, Q, S, seed=7),
    "added to all": random(Q, S, seed=8),
    "one query's": ~HIDDEN[:, :, :1],
}
EAGER = modeling_llama.eager_attention_forward
CALLS = {
    "sdpa": (sdpa_attention_forward, {}, {}),
    "sdpa, keyword": (sdpa_attention_forward, {"is_causal": True}, {"is_causal": False}),
    "sdpa, module": (sdpa_attention_forward, {"is_causal": False}, {"scaling": 0.3}),
    "eager": (EAGER, {}, {"scaling": 0.3, "dropout": 0.5, "is_causal": True}),
    "soft cap": (modeling_gemma2.eager_attention_forward, {}, {"softcap": 2.0, "scaling": 0.3}),
    "sinks": (modeling_gpt_oss.eager_attention_forward, {}, {"scaling": 0.3}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("call", CALLS)
def test_attention_under_a_mask_is_that_of_transformers(call, mask):
    if OLD_TRANSFORMERS and mask == "added to all" and "sdpa" not in call:
        pytest.skip("eager attention of 5.0 takes no mask of two dimensions")
    function, attributes, arguments = CALLS[call]
    module, given = Attention(**attributes), MASKS[mask]
    query, key, value = random(2, H, Q, D), random(2, K, S, D, seed=1), random(2, K, S, D, seed=2)
    expected, weights = function(module, query, key, value, given, **arguments)
    got, own_weights, visibility = ours(function, module, query, key, value, given, **arguments)
    close(got, expected, 1e-5)
    if weights is not None:
        close(own_weights, weights, 1e-5)
    causal = (mask == "causal" and "sdpa" in call) or (mask == "none" and call == "sdpa")
    assert visibility.is_causal() is causal


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_query_sees_all_keys_without_a_mask(is_causal):
    module = Attention(is_causal=is_causal)
    parts = random(2, H, 1, D), random(2, K, S, D, seed=1), random(2, K, S, D, seed=2)
    expected, _ = sdpa_attention_forward(module, *parts, None)
    got, _, visibility = ours(sdpa_attention_forward, module, *parts, None)
    close(got, expected, 1e-5)
    assert visibility.is_causal()


def test_blocks_of_flex_attention_are_read():
    parts = random(2, H, Q, D), random(2, K, S, D, seed=1), random(2, K, S, D, seed=2)
    for rule, is_causal in (
        (lambda row, head, step, slot: slot <= step, True),
        (lambda row, head, step, slot: (slot <= step) | (slot < 3), False),
    ):
        mask = create_block_mask(rule, None, None, Q, S, device="cpu")
        steps, slots = torch.arange(Q)[:, None], torch.arange(S)
        expected, _ = sdpa_attention_forward(
            Attention(), *parts, rule(0, 0, steps, slots)[None, None]
        )
        got, _, visibility = ours(flex_attention_forward, Attention(), *parts, mask)
        close(got, expected, 1e-5)
        assert visibility.is_causal() is is_causal


FLASH = [
    # Queries, keys, tokens, the mask, other arguments, and how many keys each query sees.
    (4, 4, 4, None, {}, [1, 2, 3, 4]),
    (4, 4, 4, None, {"is_causal": False}, [4, 4, 4, 4]),
    (2, 6, 6, None, {}, [5, 6]),
    (2, 9, 6, None, {}, [5, 6]),
    (4, 4, 4, [[0, 1, 1, 1]], {}, [0, 1, 2, 3]),
    (2, 9, 6, [[1, 1, 0, 1, 1, 1]], {}, [4, 5]),
    (4, 4, 4, None, {"position_ids": torch.tensor([[0, 1, 0, 1]])}, [1, 2, 1, 2]),
    (4, 4, 4, None, {"position_ids": torch.tensor([[0, 1, 40, 41]])}, [1, 2, 3, 4]),
    (4, 4, 4, [[1, 1, 1, 1]], {"position_ids": torch.tensor([[0, 1, 0, 1]])}, [1, 2, 3, 4]),
    (2, 4, 4, None, {"position_ids": torch.tensor([[0, 0]])}, [3, 4]),
    (
        4,
        4,
        4,
        None,
        {
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 1, 4])),
            **dict.fromkeys(("max_length_q", "max_length_k"), 3),
        },
        [1, 1, 2, 3],
    ),
]


@pytest.mark.parametrize(("steps", "slots", "filled", "mask", "arguments", "counts"), FLASH)
def test_flash_attention_shows_keys_by_order_padding_and_packing(
    steps, slots, filled, mask, arguments, counts
):
    query, key = random(1, H, steps, D), random(1, K, slots, D)
    mask = None if mask is None else torch.tensor(mask)
    call = read_call(
        flash_attention_forward, Attention(), query, key, mask, arguments, filled=filled, **KNOWN
    )
    seen, bias = Visibility(call, query, key).of(slice(0, steps))
    assert bias is None
    seen = torch.ones(1, slots, dtype=torch.bool) if seen is None else seen[0, 0, 0]
    assert seen.expand(steps, -1).sum(-1).tolist() == counts


def test_a_whole_row_is_causal_under_flash_attention():
    query, key = random(1, H, S, D), random(1, K, S, D)
    for positions, is_whole in ((torch.arange(S), True), (torch.arange(S) % 4, False)):
        call = read_call(
            *(flash_attention_forward, Attention(), query, key, None),
            {"position_ids": positions[None]},
            filled=S,
            **KNOWN,
        )
        assert Visibility(call, query, key).is_causal() == is_whole


# Of T5's kind; SDPA and eager attention take it in later releases alone.
BIASED = {"position_bias": torch.ones(1)}
READERS = [sdpa_attention_forward, getattr(modeling_t5, "eager_attention_forward", None)]
READERS = [f for f in READERS if f and "position_bias" in inspect.signature(f).parameters]
IGNORES_TABLES = "block_table" not in inspect.getsource(modeling_flash_attention_utils)


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        *((reader, BIASED, "passes position_bias to") for reader in READERS),
        pytest.param(
            *(flash_attention_forward, {"block_table": torch.ones(1)}, "block_table to flash"),
            marks=pytest.mark.skipif(IGNORES_TABLES, reason="flash attention reads none"),
        ),
        (lambda *_, **__: None, {}, "stands in for the attention function"),
    ],
)
def test_arguments_and_functions_that_are_unknown_are_refused(function, arguments, said):
    query, key = random(1, H, Q, D), random(1, K, S, D)
    with pytest.raises(rope_patch.Refused, match=said):
        read_call(function, Attention(), query, key, None, arguments, filled=S, **KNOWN)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 1, Q, S, dtype=torch.long), torch.ones(3, 1, Q, S), "a text"]
)
def test_masks_of_another_form_are_refused(mask):
    query, key = random(2, H, Q, D), random(2, K, S, D)
    with pytest.raises(rope_patch.Refused, match="2 rows, 6 queries and 6 keys"):
        ours(sdpa_attention_forward, Attention(), query, key, key, mask)


# -- what stands behind the attention function -----------------------------------------------------


@pytest.fixture
def own_attention(monkeypatch):
    """Register an attention of the user's own, which sharpens; return how often it was called."""
    calls = []

    def sharpened(module, query, *rest, **options):
        calls.append(query.shape[2])
        return sdpa_attention_forward(module, query * 2, *rest, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sharpened", sharpened)
    return calls


def test_attentions_that_look_their_function_up_elsewhere_are_refused():
    class Indirect(modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            assert modeling_llama.ALL_ATTENTION_FUNCTIONS
            assert modeling_llama.apply_rotary_pos_emb
            return super().forward(*args, **kwargs)

    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Indirect
    with pytest.raises(rope_patch.Refused, match="Indirect does not hand its queries"):
        rope_patch.patch(model, "self-extend")


def test_attention_functions_of_ones_own_are_refused(own_attention):
    model = make_model("llama")
    model.set_attn_implementation("sharpened")
    plain = forward(model, tokens(40))
    with pytest.raises(rope_patch.Refused, match="sharpened"):
        rope_patch.patch(model, "self-extend")
    assert torch.equal(forward(model, tokens(40)), plain)
    rope_patch.patch(model, "yarn", factor=4, temperature="log-n")
    own_attention.clear()
    forward(model, tokens(LONG))
    assert own_attention == [LONG] * model.config.num_hidden_layers
    model.set_attn_implementation("sdpa")
    rope_patch.patch(model, "self-extend")
    model.set_attn_implementation("sharpened")  # after the patch
    with pytest.raises(rope_patch.Refused, match="sharpened"):
        forward(model, tokens(LONG))


def test_maps_on_an_encoding_that_scales_keys_are_refused():
    model = make_model("llama")
    rope_patch.encode(model, "xpos")
    expected = forward(model, tokens(LONG))
    with pytest.raises(rope_patch.Refused, match="FadingPairs"):
        rope_patch.patch(model, "self-extend")
    assert torch.equal(forward(model, tokens(LONG)), expected)


MASKED = "position_maps.parts.attend_masked"  # what stores logits


@pytest.mark.parametrize("chunks", [[LONG], [100, 30, LONG - 130]])
def test_causal_attention_stores_no_logits(chunks, monkeypatch):
    """Its fused parts serve prompts without a mask, and chunks, whose masks are compared."""
    model, ids = make_model("llama"), tokens(LONG)
    rope_patch.patch(model, "self-extend")
    cache, expected = transformers.DynamicCache(config=model.config), forward(model, ids)
    monkeypatch.setattr(f"{rope_patch.patching.__name__}.{MASKED}", None)
    with torch.no_grad():
        got = [model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)]
    close(torch.cat(got, 1), expected)


def test_layers_that_share_a_mask_have_a_causality_each():
    """Flash attention's mask tells tokens from padding; whether it is causal is said beside it."""
    states = torch.zeros(1, 2, TRAINED + 8, 16)
    positions = torch.arange(TRAINED + 8)[None]
    view = ForwardView(build("rerope"), TRAINED, positions, positions, filled=TRAINED + 8)
    shared = {"scaling": 1.0, "mask": torch.ones(1, TRAINED + 8), "hides_keys": True}
    for first_ahead in (1, None, 1):
        call = AttentionCall(**shared, first_ahead=first_ahead)
        assert view.is_causal(Visibility(call, states, states)) == (first_ahead == 1)
