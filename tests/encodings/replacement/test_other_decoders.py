"""Encodings on decoders that differ from Llama: loops, layers without rotation, masks of their own.

Each is right (chunks equal one pass, as they do in the unencoded model) or refused in one sentence.
"""

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.releases import require_model

import rope_patch
from rope_patch.transformers_api import cache_arguments, cache_in_output


def build(name, implementation="sdpa", **changes):
    require_model(name)
    model = tiny_model(name, **changes)
    model.set_attn_implementation(implementation)
    return model


def text():
    return torch.randint(4, 100, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def one_pass(model, ids, **arguments):
    return model(input_ids=ids, use_cache=False, **arguments).logits


@torch.no_grad()
def in_chunks(model, ids):
    cache, parts = None, []
    for part in ids.split([14, 6, 1, 1, 1, 1], 1):
        output = model(input_ids=part, use_cache=True, **cache_arguments(model, cache))
        cache = cache_in_output(output)
        parts.append(output.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("name", "encoding", "implementation"),
    [
        # Its layers run several times, and each time writes to another part of the cache.
        *(("dory", encoding, "sdpa") for encoding in ("alibi", "t5", "xpos", "none")),
        ("dory", "alibi", "eager"),
        # It has layers that never rotate, which are given nothing to switch off.
        *(("beam", encoding, "sdpa") for encoding in ("alibi", "none", "learned", "rnope")),
    ],
)
def test_chunks_equal_one_pass(name, encoding, implementation):
    model = build(name, implementation)
    rope_patch.encode(model, encoding)
    ids = text()
    torch.testing.assert_close(in_chunks(model, ids), one_pass(model, ids), rtol=0, atol=2e-5)


def test_heads_are_those_of_the_attentions():
    """Laguna's layers say how many heads they have; its config says another number."""
    model = build("laguna")
    encoding = rope_patch.encode(model, "alibi").encoding
    assert encoding.heads == model.model.layers[0].self_attn.num_heads
    assert encoding.heads != model.config.num_attention_heads
    ids = text()
    torch.testing.assert_close(in_chunks(model, ids), one_pass(model, ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("doge", "DogeAttention hands .* another mask"),
        ("zaya", "another mask"),
        ("deepseek_v32", "DeepseekV32Attention hands .* another mask"),
        ("minimax_m3_vl_text", "another mask"),
        ("dots3_note_text", "query heads"),
        ("minimax", "none of .* attention functions"),
    ],
)
def test_attentions_that_a_bias_cannot_reach_are_refused(name, why):
    """Doge hid every key with a bias other than 0, without a word, and others ended in tracebacks.

    Its own mask is made from the one it is given: 0 where a key is seen, all else hidden. Sparse
    attention would choose keys by the bias of the first head.
    """
    model = build(name, "eager")
    before = one_pass(model, text())
    with pytest.raises(rope_patch.Refused, match=why):
        rope_patch.encode(model, "alibi")
    assert torch.equal(one_pass(model, text()), before)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_to_later_tokens_is_refused_under_a_bias(implementation):
    """No distance is defined ahead of a query, so the mask with the bias would hide those keys."""
    model = build("llama", implementation)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    if implementation == "eager":  # whose keys a mask alone hides
        model.config.is_causal = False
    rope_patch.encode(model, "alibi")
    with pytest.raises(rope_patch.Refused, match="attends to later tokens"):
        one_pass(model, text())


@pytest.mark.parametrize(
    ("name", "encoding", "why"),
    [
        ("deepseek_v4", "none", "is given its rotation as a dict"),
        ("hy_v4", "learned", "reads hidden states of 4 dimensions"),
        ("dory", "learned", "was given no position_ids"),
        ("dory", "fire", "was given no position_ids"),
    ],
)
def test_what_layers_are_given_otherwise_is_refused(name, encoding, why):
    model = build(name, "eager")
    rope_patch.encode(model, encoding)
    with pytest.raises(rope_patch.Refused, match=why):
        one_pass(model, text())
