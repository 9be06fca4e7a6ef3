"""Encodings on decoders that differ from Llama: loops, layers without rotation, masks of their own.

Each is right (chunks equal one pass, as they do in the unencoded model) or refused in one sentence.
"""

import pytest
import torch
from architectures.tiny_architectures import tiny_model
from helpers.releases import require_model
from transformers.models.llama.modeling_llama import LlamaAttention

import rope_patch
from rope_patch.patching.architecture.attention_source import hands_mask_on
from rope_patch.transformers_api.caches import cache_in_output
from rope_patch.transformers_api.forwards import cache_arguments


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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("encoding", ["alibi", "t5", "xpos", "none"])
def test_loops_have_a_part_of_the_cache_each(encoding, implementation):
    """Dory's layers run several times, and each time writes to another part of the cache."""
    model = build("dory", implementation)
    rope_patch.encode(model, encoding)
    ids = text()
    torch.testing.assert_close(in_chunks(model, ids), one_pass(model, ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize("encoding", ["alibi", "none", "learned", "rnope"])
def test_layers_that_never_rotate_are_given_nothing_to_switch_off(encoding):
    model = build("beam")
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
        ("doge", "DogeAttention hands its attention function another mask"),
        ("zaya", "hands its attention function another mask"),
        ("deepseek_v32", "DeepseekV32Attention hands its attention function another mask"),
        ("minimax_m3_vl_text", "hands its attention function another mask"),
        ("dots3_note_text", "query heads, and the encoding 'alibi' has one bias for each head"),
        ("minimax", "calls none of transformers' attention functions"),
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


def test_llama_hands_its_mask_on():
    assert hands_mask_on(LlamaAttention)
    assert not hands_mask_on(torch.nn.Linear)
